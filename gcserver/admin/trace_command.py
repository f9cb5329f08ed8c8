"""`gcctl trace`: begin to record steps on all nodes, end it, and make a file of it.

What may live here: its arguments, its calls, where files go. What may not: what is in the file (`tracefile.py`),
OpenTelemetry (`otlp.py`), connections to a daemon (`gcctl.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from google.protobuf.message import Message

from gcproto import admin_pb2 as pb
from gcserver.admin import otlp, tables, tracefile
from gcserver.admin.traceslices import Trace
from gcserver.values import human_duration, read_duration

#: How long ending a trace on all nodes, and each part of it, may take, seconds.
TIMEOUT: Final = 60.0
KEPT: Final = "the daemons keep the trace: try again with another --out"


class TraceError(Exception):
    """What stands between a trace and its file, and what to do about it."""


def add_options(trace: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """``start``, ``stop`` and ``export`` below ``gcctl trace``."""
    actions = trace.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, parents=[common], help=about, description=about)

    start = add("start", "begin to record steps as spans, on this node and others")
    start.add_argument("--job", default="", help="label or id (default: all)")
    start.add_argument("--steps", type=_count, default=0, metavar="N", help="whole steps of each process group")
    start.add_argument(
        "--seconds", type=_seconds, default=0.0, metavar="TIME", help="how long at most (default 60s, at most 10min)"
    )
    start.add_argument("--nodes", type=_names, default=[], metavar="A,B", help="besides this one (default: all)")
    stop = add("stop", "end it on all nodes and write what they recorded, for https://ui.perfetto.dev or Chrome")
    stop.add_argument("--out", type=Path, metavar="FILE.json", help="(default: only say what there is)")
    export = add("export", "send a file that `trace stop` wrote to a collector of OpenTelemetry's")
    export.add_argument("file", type=Path, metavar="FILE.json")
    export.add_argument("--otlp", required=True, metavar="URL", help="such as http://collector:4318/v1/traces")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else read_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; got {text!r}") from None


def _names(text: str) -> list[str]:
    return [] if text == "all" else [name.strip() for name in text.split(",") if name.strip()]


def timeout(options: argparse.Namespace) -> float:
    return float(getattr(options, "timeout", TIMEOUT))


# ------------------------------------------------------------------------------------------- calls
def start(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.StartTraceRequest(job=options.job, steps=options.steps, seconds=options.seconds, nodes=options.nodes)
    answer: Message = stub.StartTrace(request, timeout=timeout(options))
    return answer


def stop(stub: Any, options: argparse.Namespace) -> Message:
    """End it; with ``--out`` write the file too. Raises TraceError, before anything is ended if that can be known."""
    answer: Message
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_target(options.out)) if options.out is not None else None
        answer = stub.StopTrace(pb.StopTraceRequest(), timeout=timeout(options))
        if file is not None:
            trace = Trace()
            for part in stub.GetTrace(pb.GetTraceRequest(), timeout=timeout(options)):
                trace.take(part)
            trace.settle()
            tracefile.write(trace, file)
    return answer


def export(stub: Any, options: argparse.Namespace) -> Message:
    """Send a file's spans. No daemon is asked. Raises TraceError."""
    try:
        sent = otlp.send(options.file, options.otlp)
    except otlp.ExportError as error:
        raise TraceError(str(error)) from None
    return pb.StopTraceResponse(message=f"{sent} spans sent to {options.otlp}")


@contextlib.contextmanager
def _target(path: Path) -> Iterator[TextIO]:
    """``path`` to write to: what is there stays until all of the new file is. Raises TraceError."""
    whole = path.exists() and not path.is_file()  # a device, a pipe
    partial = path if whole else path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("w", encoding="utf-8") as file:
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


COMMANDS: Final[dict[str, tuple[Callable[[Any, argparse.Namespace], Message], Callable[[dict[str, Any]], str]]]] = {
    "trace start": (start, done),
    "trace stop": (stop, shown),
    "trace export": (export, done),
}
