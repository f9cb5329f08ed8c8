"""What a trace's file must be, for tests that have made one.

What may live here: the format's rules, as Perfetto and Chrome read it, and picking events out of a file. What may not:
what a certain trace has to say.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]


def sound(file: dict[str, Any]) -> list[Event]:
    """Its slices (ph X) and asynchronous slices (b, with ``dur`` from their e), with ``node``, in order of time.

    Asserts what a reader relies on: slices of a thread lie within one another or apart, every b has its e and every
    flow two ends, each of which lies in a slice of its thread.
    """
    events: list[Event] = file["traceEvents"]
    assert {e["ph"] for e in events} <= set("MXbesf")
    assert all(isinstance(e["pid"], int) and isinstance(e["name"], str) for e in events)
    nodes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(nodes.values()) == [n["name"] for n in file["otherData"]["nodes"]]
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    found = [e | {"node": nodes[e["pid"]]} for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in found} == threads
    _nested(found)
    ends = {e["id"]: e for e in events if e["ph"] == "e"}
    begins = [e for e in events if e["ph"] == "b"]
    assert len(begins) == len(ends) == len({e["id"] for e in begins})
    for e in begins:
        end = ends[e["id"]]
        assert all(end[name] == e[name] for name in ("cat", "name", "pid")) and end["ts"] >= e["ts"]
        found.append(e | {"node": nodes[e["pid"]], "dur": end["ts"] - e["ts"]})
    _flows(events)
    assert min((e["ts"] for e in found), default=0.0) == 0.0
    return sorted(found, key=lambda e: e["ts"])


def _nested(slices: list[Event]) -> None:
    rows: dict[Any, list[Event]] = defaultdict(list)
    for e in slices:
        assert e["dur"] >= 0
        rows[e["pid"], e["tid"]].append(e)
    for row in rows.values():
        open_: list[float] = []
        for e in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
            end = e["ts"] + e["dur"]
            while open_ and open_[-1] <= e["ts"] + 1e-6:
                open_.pop()
            assert not open_ or end <= open_[-1] + 1e-6, f"{e} reaches beyond what it began in"
            open_.append(end)


def _flows(events: list[Event]) -> None:
    for ends in ("s", "f"):
        flows = [e for e in events if e["ph"] == ends]
        assert len({e["id"] for e in flows}) == len(flows)
        for e in flows:
            assert any(
                x["ph"] == "X" and (x["pid"], x["tid"]) == (e["pid"], e["tid"])
                and x["ts"] <= e["ts"] <= x["ts"] + x["dur"] for x in events
            ), f"{e} is in no slice"  # fmt: skip
    left, arrived = ({e["id"] for e in events if e["ph"] == ends} for ends in ("s", "f"))
    assert left == arrived


def named(slices: list[Event], name: str, **arguments: Any) -> list[Event]:
    """Slices of a category whose arguments are these."""
    return [e for e in slices if e["cat"] == name and all(e["args"].get(k) == v for k, v in arguments.items())]
