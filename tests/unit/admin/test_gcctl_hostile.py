"""gcctl against a service that means harm or is out of its mind: one line or a table, no escape sequence, no traceback,
and memory that stays within bounds.

What may live here: tests of what `gcctl` makes of answers that no daemon gives. What may not: the service itself
(`hostile.py`), what real daemons answer (`test_gcctl.py`).
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import status_pb2

from gcproto import admin_pb2 as pb
from gcserver.admin import gcctl, gcctl_calls, gcctl_logs, tables, trace_command
from gcserver.admin.exits import Exit
from gcserver.admin.gcctl_calls import COMMANDS
from tests.unit.admin.hostile import EVIL, drives, filled, hostile

NUMBERS = (math.inf, -math.inf, math.nan, 1e308, -1e18, -1.0, 0.0, 5e-324)
#: what a command needs besides its name
NEEDED = {"set-codec": ("x",), "set-plan": ("--replace",), "set-controller": ("x",)}
ASKING = [*COMMANDS, "top --once", "logs"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """How a command ended, and its answer or its error; nothing of what it prints drives a terminal."""
    status = gcctl.main(arguments)
    captured = capsys.readouterr()
    assert not drives(captured.out + captured.err)
    assert "defect" not in captured.err and captured.err.count("\n") <= 1
    return status, captured.out or captured.err


@pytest.mark.parametrize("number", NUMBERS)
def test_answers_full_of_anything_are_shown(capsys: pytest.CaptureFixture[str], number: float) -> None:
    def answer(name: str, kind: Any, _: grpc.ServicerContext) -> Any:
        made = filled(kind, number)
        return iter([made]) if name in ("GetLogs", "GetTrace") else made

    with hostile(answer) as address:
        for command in ASKING:
            arguments = (*command.split(), *NEEDED.get(command, ()), "--address", address)
            status, text = said(capsys, *arguments)
            assert (status, "\\x1b[2J" in text) == (Exit.OK, True), command
            status, text = said(capsys, *arguments, "--json")
            # Of the log each record is a line.
            found = [json.loads(line) for line in (text.splitlines() if command == "logs" else [text])]
            assert (status, repr(EVIL)[1:-1] in repr(found)) == (Exit.OK, True), command


@pytest.mark.parametrize("number", NUMBERS)
def test_a_trace_of_anything_is_a_file_that_can_be_read(
    capsys: pytest.CaptureFixture[str], number: float, tmp_path: Path
) -> None:
    def answer(name: str, kind: Any, _: grpc.ServicerContext) -> Any:
        if name != "GetTrace":
            return filled(kind, number)
        said: list[Message] = [filled(kind, number) for _ in range(3)]
        spans = [pb.TraceSpan(kind=7, begin=begin, end=end, job="x") for begin, end in ((-1e308, 1e308), (1, number))]
        clocks = [pb.TraceClock(at=1, offset=1, error=number)]
        return iter([*said, pb.GetTraceResponse(node=pb.TracedNode(name="b", clocks=clocks)), kind(spans=spans)])

    path = tmp_path / "trace.json"
    with hostile(answer) as address:
        assert said(capsys, "trace", "stop", "--out", str(path), "--address", address)[0] == Exit.OK

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["otherData"]["made_by"] == "gradcomm"


def test_what_goes_on_and_on_is_given_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcctl_logs, "MOST_OF_LOG", 1 << 20)
    monkeypatch.setattr(trace_command, "MOST_OF_TRACE", 1 << 20)
    ended = threading.Event()

    def answer(name: str, kind: Any, context: grpc.ServicerContext) -> Any:
        def endless() -> Iterator[Message]:
            context.add_callback(ended.set)
            while context.is_active():
                yield pb.GetLogsResponse(records=[pb.LogRecord(message="x" * 60_000)])

        return endless() if name in ("GetLogs", "GetTrace") else kind()

    with hostile(answer) as address:
        for command in (("logs",), ("trace", "stop", "--out", os.devnull)):
            status, text = said(capsys, *command, "--address", address, "--timeout", "60s")
            assert status == Exit.FAILED and "of more than 1 MiB is no daemon's" in text
            assert ended.wait(30)
            ended.clear()


def test_a_message_beyond_all_bounds_is_not_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = ("grpc.max_receive_message_length", 1 << 20)
    assert bound[0] in dict(gcctl_calls.SETTINGS) and dict(gcctl_calls.SETTINGS)[bound[0]] > 0
    monkeypatch.setattr(gcctl_calls, "SETTINGS", (bound,))
    with hostile(lambda name, kind, _: kind(node="a" * (2 << 20))) as address:
        status, text = said(capsys, "status", "--address", address)
    assert status == Exit.FAILED and "larger than max" in text


@pytest.mark.parametrize(
    "details",
    [b"\xff\xff\xff", b"", status_pb2.Status(code=3, message="another").SerializeToString()],
    ids=["no status", "empty", "another code"],
)
def test_a_refusal_whose_details_make_no_sense(capsys: pytest.CaptureFixture[str], details: bytes) -> None:
    def answer(_: str, __: Any, context: grpc.ServicerContext) -> Any:
        context.set_trailing_metadata((("grpc-status-details-bin", details),))
        context.abort(grpc.StatusCode.NOT_FOUND, f"{EVIL}\nno")

    with hostile(answer) as address:
        status, text = said(capsys, "status", "--address", address)
    assert status == Exit.FAILED and "\\x1b[2J" in text and "no" in text


def test_a_long_name_does_not_widen_all_rows() -> None:
    long = "w" * 100_000
    lines = tables.table(("TENSOR", "CODEC"), [(long, "fp16"), *[("b", "none")] * 100]).splitlines()
    assert lines[1] == f"{long}  fp16" and {len(line) for line in lines[2:]} == {206}


def test_what_nobody_foresaw_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("of all\nthings")

    monkeypatch.setattr(gcctl, "settle", fail)
    monkeypatch.delenv("GC_LOG_LEVEL", raising=False)
    assert gcctl.main(["status"]) == Exit.FAILED
    assert capsys.readouterr().err.startswith("gcctl: ZeroDivisionError: of all things (a defect; ")
    monkeypatch.setenv("GC_LOG_LEVEL", "debug")
    assert gcctl.main(["status"]) == Exit.FAILED
    assert "Traceback" in capsys.readouterr().err
