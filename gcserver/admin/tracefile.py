"""A trace as a file for Perfetto and Chrome: their trace event format, in JSON.

What may live here: from slices to events. What may not: clocks and what is left out (`traceslices.py`), asking daemons
(`trace_command.py`), OpenTelemetry (`otlp.py`).

A process is a node. Its threads are its lanes, and what each rank does in a process group; kernels, pushes and frames
sent or received are slices of these. A frame on its way is an asynchronous slice "wire" of its receiver, and a flow
from where it left to where it arrived. A step is an asynchronous slice of each node, from its first slice to its last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, TextIO

from gcproto.spans import Kind
from gcserver.admin.traceslices import Slice, Trace

Event = dict[str, Any]
WIRE: Final = "wire"
STEP: Final = "step"
#: What slices are called. Two kinds of work make an aggregate: ``part`` among their arguments tells which.
NAMES: Final = {
    Kind.READY: "ready",
    Kind.PUSH: "push",
    Kind.PULL: "pull",
    Kind.ENCODE: "encode",
    Kind.ADD: "aggregate",
    Kind.FINALISE: "aggregate",
    Kind.DECODE: "decode",
    Kind.SEND: "send",
    Kind.RECEIVE: "receive",
}
_PARTS: Final = {Kind.ADD: "add", Kind.FINALISE: "finalise"}
_FRAMES: Final = frozenset({Kind.SEND, Kind.RECEIVE})
_PHASES: Final = {1: "contribution", 2: "aggregate"}
#: So many tensors are named of blocks that were pushed together.
_NAMED: Final = 16


def write(trace: Trace, file: TextIO) -> None:
    """Write a settled trace. Raises OSError."""
    zero = min((s.begin for s in trace.slices), default=0.0)
    file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(_about(trace, zero)) + ',"traceEvents":[')
    between = "\n"
    for event in _Events(trace, zero).all():
        file.write(between + json.dumps(event, separators=(",", ":")))
        between = ",\n"
    file.write("\n]}\n")


def _about(trace: Trace, zero: float) -> Event:
    """What a reader must know of all times: whose clock they are on, and how far off each node's may be."""
    nodes = [
        {
            "name": name,
            "clock_ahead_us": round(node.clock.offset(zero) * 1e6, 3),
            "clock_error_us": round(node.clock.error * 1e6, 3),
            "dropped": node.about.dropped,
            "absent": list(node.about.absent),
            "reason": node.reason,
        }
        for name, node in trace.nodes.items()
    ]
    return {
        "made_by": "gradcomm",
        "clock_of": trace.context.node,
        "zero_unix_seconds": zero + trace.context.wall_clock,
        "nodes": nodes,
        "unusable_spans": trace.unusable,
    }


class _Events:
    """The events of a trace whose time 0 is ``zero``."""

    def __init__(self, trace: Trace, zero: float) -> None:
        self._trace, self._zero = trace, zero
        self._names = list(trace.nodes)
        domains = trace.context.domains
        self._groups = {(d.job, d.domain): (d.job_label, d.label) for d in domains}
        self._tensors = {(d.job, d.domain, b.key): b.tensor for d in domains for b in d.blocks}
        #: by node and name
        self._threads: dict[tuple[int, str], int] = {}

    def all(self) -> Iterator[Event]:
        for i, name in enumerate(self._names):
            yield _naming("process_name", i + 1, name=name)
            yield _naming("process_sort_index", i + 1, sort_index=i)
        for s in self._trace.slices:
            begin = self._at(s.begin)
            yield {
                "ph": "X", "pid": s.node + 1, "tid": self._thread(s), "ts": begin,
                "dur": round(self._at(s.end) - begin, 3), "name": NAMES[s.kind], "cat": NAMES[s.kind],
                "args": self._arguments(s),
            }  # fmt: skip
        yield from self._wires()
        yield from self._steps()
        # Lanes below workers, which come before them.
        order = sorted(self._threads, key=lambda thread: (thread[1].startswith("lane"), thread[1]))
        for place, (node, name) in enumerate(order):
            tid = self._threads[node, name]
            yield {**_naming("thread_name", node + 1, name=name), "tid": tid}
            yield {**_naming("thread_sort_index", node + 1, sort_index=place), "tid": tid}

    def _at(self, seconds: float) -> float:
        """Microseconds since 0, in whole nanoseconds, so that what lay within something else still does."""
        return round((seconds - self._zero) * 1e9) / 1e3

    def _thread(self, s: Slice) -> int:
        name = f"lane {s.place}"
        if s.kind is Kind.PULL:
            name = f"rank {s.place} pull {self._group(s)[1]}"
        elif s.kind in (Kind.READY, Kind.PUSH):
            name = f"rank {s.place} push {self._group(s)[1]}"
        return self._threads.setdefault((s.node, name), len(self._threads) + 1)

    def _group(self, s: Slice) -> tuple[str, str]:
        """(job, process group), in words as far as there are any."""
        return self._groups.get((s.job, s.domain)) or (s.job, str(s.domain))

    def _arguments(self, s: Slice) -> Event:
        job, group = self._group(s)
        found: Event = {"job": job, "job_id": s.job, "group": group, "step": s.step, "bytes": s.nbytes}
        tensors = dict.fromkeys(self._tensors.get((s.job, s.domain, k), "") for k in s.blocks[:_NAMED])
        found["tensor"] = ", ".join(tensors) + (", ..." if len(s.blocks) > _NAMED else "")
        found["blocks"] = list(s.blocks[:_NAMED])
        if s.kind in _PARTS:
            found["part"] = _PARTS[s.kind]
        if s.kind in _FRAMES:
            found["what"] = _PHASES.get(s.phase, "")
        if s.peer >= 0:
            found["to" if s.kind is Kind.SEND else "from"] = self._names[s.peer]
        if s.resent:
            found["resent"] = True
        return found

    def _wires(self) -> Iterator[Event]:
        for number, (sent, received) in enumerate(self._trace.frames(), 1):
            begin = self._at(sent.begin)
            # Only between two other nodes may a frame seem to arrive before it left: that much clocks are uncertain.
            end = max(begin, self._at(received.begin))
            row = {"cat": WIRE, "name": f"{WIRE} {self._names[sent.node]} to {self._names[received.node]}"}
            pid, identity = received.node + 1, f"{WIRE}{number}"
            arguments = {**self._arguments(received), "lane": received.place}
            yield {"ph": "b", "pid": pid, "tid": 0, "id": identity, "ts": begin, **row, "args": arguments}
            yield {"ph": "e", "pid": pid, "tid": 0, "id": identity, "ts": end, **row}
            flow = {"cat": WIRE, "name": WIRE, "id": number}
            yield {"ph": "s", "pid": sent.node + 1, "tid": self._thread(sent), "ts": begin, **flow}
            at = self._at(received.begin)
            yield {"ph": "f", "bp": "e", "pid": pid, "tid": self._thread(received), "ts": at, **flow}

    def _steps(self) -> Iterator[Event]:
        ends: dict[tuple[int, str, int, int], tuple[Slice, float]] = {}
        for s in self._trace.slices:
            key = s.node, s.job, s.domain, s.step
            first, end = ends.get(key, (s, s.end))
            ends[key] = first, max(end, s.end)
        for number, (s, end) in enumerate(ends.values(), 1):
            job, group = self._group(s)
            row = {"cat": STEP, "name": f"{STEP} of {group}", "pid": s.node + 1, "tid": 0, "id": f"{STEP}{number}"}
            arguments = {"job": job, "job_id": s.job, "group": group, "step": s.step}
            yield {"ph": "b", "ts": self._at(s.begin), **row, "args": arguments}
            yield {"ph": "e", "ts": self._at(end), **row}


def _naming(what: str, pid: int, **arguments: object) -> Event:
    return {"ph": "M", "pid": pid, "tid": 0, "name": what, "args": arguments}
