"""`gcctl trace`: begin to record steps on all nodes, end it, and make a file of it.

What may live here: its calls, where files go, what it prints. What may not: the command line (`gcctl_parser.py`), what
is in the file (`tracefile.py`), OpenTelemetry (`otlp.py`), connections to a daemon (`gcctl_calls.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from google.protobuf.message import Message

from gcproto import admin_pb2 as pb
from gcserver.admin import jsonform, otlp, tables, tracefile
from gcserver.admin.exits import CtlError
from gcserver.admin.traceslices import Trace
from gcserver.values import human_duration

KEPT: Final = "the daemons keep the trace: try again with another --out"


class TraceError(CtlError):
    """A trace's file cannot be written. ``str()`` says why and what to do."""


# ------------------------------------------------------------------------------------------- calls
def start(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.StartTraceRequest(job=options.job, steps=options.steps, seconds=options.seconds, nodes=options.nodes)
    answer: Message = stub.StartTrace(request, timeout=options.timeout)
    return answer


def stop(stub: Any, options: argparse.Namespace) -> Message:
    """End it; with ``--out`` write the file too. Raises TraceError, before anything is ended if that can be known."""
    answer: Message
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_target(options.out)) if options.out is not None else None
        answer = stub.StopTrace(pb.StopTraceRequest(), timeout=options.timeout)
        if file is not None:
            trace = Trace()
            for part in stub.GetTrace(pb.GetTraceRequest(), timeout=options.timeout):
                trace.take(part)
            trace.settle()
            tracefile.write(trace, file)
    return answer


def export(options: argparse.Namespace) -> str:
    """Send a file's spans; what is printed then. No daemon is asked. Raises ExportError."""
    sent = otlp.send(options.file, options.otlp)
    if options.json:
        return jsonform.text({"file": str(options.file), "url": options.otlp, "spans": sent}, indent=2)
    return f"{sent} spans sent to {options.otlp}"


@contextlib.contextmanager
def _target(path: Path) -> Iterator[TextIO]:
    """``path`` to write to: what is there stays until all of the new file is. Raises TraceError."""
    whole = path.exists() and not path.is_file()  # a device, a pipe
    partial = path if whole else path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if not whole:
            partial.unlink(missing_ok=True)
        # Its name can be guessed, so it must be a file of ours.
        with partial.open("w" if whole else "x", encoding="utf-8") as file:
            yield file
        if not whole:
            partial.replace(path)
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}; {KEPT}") from None
    finally:
        if not whole:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------- shown
def shown(answer: dict[str, Any]) -> str:
    """What each node recorded, as a table."""
    rows = [
        (n["name"], n["spans"], n["dropped"], _clock(n["clocks"]), "; ".join([*n["absent"], n["reason"]]).strip("; "))
        for n in answer["nodes"]
    ]
    return tables.table(("NODE", "SPANS", "DROPPED", "CLOCK", "MISSING"), rows) + f"\n\n{answer['message']}"


def _clock(samples: list[dict[str, float]]) -> str:
    """How far its clock is from the asked node's."""
    if not samples:
        return "-"
    ahead = samples[-1]["offset"]
    way = "ahead" if ahead > 0 else "behind"
    return f"{human_duration(abs(ahead))} {way}, within {human_duration(max(s['error'] for s in samples))}"


def done(answer: dict[str, Any]) -> str:
    """The sentence."""
    return str(answer["message"])
