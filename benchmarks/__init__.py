"""Measurements, each run as `python -m benchmarks.NAME`; `--json FILE` writes flat rows."""
