"""A trace's file to a collector of OpenTelemetry's, by OTLP over HTTP.

What may live here: from the events of `tracefile.py` to spans, and sending them by the official SDK and exporter, which
the extra `otel` installs. What may not: recording, other formats.

A step of a process group is one trace there, whose id follows from job, group and step; below its span each node has
one, and below that are the node's slices and the frames that came to it. Clocks are as the file corrected them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gcserver.admin.exits import CtlError, Exit
from gcserver.admin.tracefile import STEP, WIRE

#: Spans in one request.
BATCH: Final = 512
#: and how long one may take, seconds, tries included
PATIENCE: Final = 10
_MISSING: Final = "OpenTelemetry's packages are missing: pip install 'gradcomm[otel]'"

#: of a step: job, process group, number
_StepKey = tuple[str, str, int]


class ExportError(CtlError):
    """Why nothing, or not everything, could be sent, and what to do about it."""


class NoTraceError(ExportError):
    """What was to be sent is no file with a trace."""

    status = Exit.USAGE


@dataclass(frozen=True, slots=True)
class Piece:
    """One span to be: times in nanoseconds since 1970, ``node`` a name, empty for the step of all nodes."""

    name: str
    node: str
    step: _StepKey
    begin: int
    end: int
    arguments: dict[str, Any]


def send(path: Path, url: str) -> int:
    """Send a file's spans to ``url``; returns how many. Raises ExportError."""
    file = _read(path)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ModuleNotFoundError:
        raise ExportError(_MISSING) from None
    try:
        spans = list(_spans(list(_pieces(file))))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise NoTraceError(f"{path} was changed since `gcctl trace stop --out` wrote it: {error!r}") from None
    # What it says in its log is in the error below.
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    exporter = OTLPSpanExporter(endpoint=url, timeout=PATIENCE)
    try:
        for at in range(0, len(spans), BATCH):
            if exporter.export(spans[at : at + BATCH]) is not SpanExportResult.SUCCESS:
                raise ExportError(f"{url} took only {at} of {len(spans)} spans; is a collector there, at that path?")
    finally:
        exporter.shutdown()
    return len(spans)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if found["otherData"]["made_by"] == "gradcomm":
            return dict(found)
    except OSError as error:
        raise NoTraceError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise NoTraceError(f"{path} is no trace that `gcctl trace stop --out` wrote")


def _pieces(file: dict[str, Any]) -> Iterator[Piece]:
    """The slices of a file, synchronous and asynchronous."""
    zero = round(file["otherData"]["zero_unix_seconds"] * 1e9)
    names = {e["pid"]: e["args"]["name"] for e in file["traceEvents"] if e["name"] == "process_name"}
    open_: dict[str, dict[str, Any]] = {}
    for e in file["traceEvents"]:
        if e["ph"] == "X":
            yield _piece(e, names, zero, e["ts"] + e["dur"])
        elif e["ph"] == "b":
            open_[e["id"]] = e
        elif e["ph"] == "e":
            yield _piece(open_.pop(e["id"]), names, zero, e["ts"])


def _piece(e: dict[str, Any], names: dict[int, str], zero: int, end: float) -> Piece:
    arguments = e["args"]
    step = (arguments["job_id"], arguments["group"], arguments["step"])
    name = e["cat"] if e["cat"] in (STEP, WIRE) else e["name"]
    return Piece(name, names[e["pid"]], step, zero + round(e["ts"] * 1e3), zero + round(end * 1e3), arguments)


def _identity(what: str, nbytes: int) -> int:
    """A number that is the same wherever the same thing is exported."""
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=nbytes).digest()) or 1


def _spans(pieces: list[Piece]) -> Iterator[Any]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags

    resources: dict[str, Resource] = {}
    scope = InstrumentationScope("gradcomm")

    def context(step: _StepKey, what: str) -> SpanContext:
        of = f"{step}/{what}"
        return SpanContext(_identity(str(step), 16), _identity(of, 8), False, TraceFlags(TraceFlags.SAMPLED))

    def span(p: Piece, own: SpanContext, parent: SpanContext | None) -> ReadableSpan:
        if p.node not in resources:
            node = {"service.instance.id": p.node, "host.name": p.node} if p.node else {}
            resources[p.node] = Resource({"service.name": "gradcomm", **node})
        attributes = {f"gradcomm.{name}": value for name, value in p.arguments.items()}
        return ReadableSpan(
            p.name, own, parent, resources[p.node], attributes, start_time=p.begin, end_time=p.end,
            instrumentation_scope=scope,
        )  # fmt: skip

    whole: dict[_StepKey, Piece] = {}
    for number, p in enumerate(pieces):
        if p.name != STEP:
            yield span(p, context(p.step, f"{p.node}/{number}"), context(p.step, p.node))
            continue
        known = whole.get(p.step, p)
        about = {name: p.arguments[name] for name in ("job", "job_id", "group", "step")}
        whole[p.step] = Piece(STEP, "", p.step, min(known.begin, p.begin), max(known.end, p.end), about)
        yield span(p, context(p.step, p.node), context(p.step, ""))
    for p in whole.values():
        yield span(p, context(p.step, ""), None)
