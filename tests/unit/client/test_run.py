"""`python -m gcclient.run`: the same command, in a process without torch."""

from __future__ import annotations

import sys

import pytest

from gcclient import run


def test_it_becomes_gcrun_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("os.execv", lambda path, argv: became.append((path, argv)))
    monkeypatch.setattr(sys, "argv", ["run.py", "--node.lanes", "2", "--", "python", "train.py"])
    run.main()
    argv = [sys.executable, "-m", "gcserver.gcrun", "--node.lanes", "2", "--", "python", "train.py"]
    assert became == [(sys.executable, argv)]
