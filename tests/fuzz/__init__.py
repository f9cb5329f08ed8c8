"""Hostile inputs for everything that reads what somebody else wrote; `python -m tests.fuzz --help`."""
