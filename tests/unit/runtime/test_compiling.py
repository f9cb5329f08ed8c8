"""What a lane does about kernels that nobody has compiled."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from gcserver import cli
from gcserver.codecs import warmup
from gcserver.runtime import compiling


def test_nothing_is_started_where_all_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started something"))
    compiling.compile_what_is_missing()


def test_what_is_missing_is_compiled_by_the_command_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.parser().parse_args(compiling.COMMAND[3:]).command == "warmup"
    monkeypatch.setattr(warmup, "is_warm", lambda: False)
    with caplog.at_level(logging.INFO, "gcserver"):
        compiling.compile_what_is_missing()
    (said,) = caplog.messages
    assert said.startswith(f"compiling {len(warmup.kernels())} kernels")


def test_a_lane_goes_on_where_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(warmup, "is_warm", lambda: False)
    fails = "import sys; sys.exit('no room for the cache')"
    monkeypatch.setattr(compiling, "COMMAND", (sys.executable, "-c", fails))
    compiling.compile_what_is_missing()
    assert caplog.messages[-1].endswith("ended with 1, so the lane does it: no room for the cache")
