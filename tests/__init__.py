"""Tests of gradcomm, one folder per kind; what belongs where is in CONTRIBUTING.md."""
