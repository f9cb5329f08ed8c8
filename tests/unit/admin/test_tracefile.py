"""A trace of two nodes as a file: one clock, whole steps, everything where a reader looks for it.

What may live here: tests of `gcserver/admin/traceslices.py` and `tracefile.py`. What may not: daemons.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from gcproto.spans import Kind, Span
from gcserver.admin import tracefile
from gcserver.admin.spans import TraceContext, TracedNode, TracePart
from gcserver.admin.traceslices import Trace
from tests.trace_files import Event, named, sound
from tests.unit.admin.traces import AHEAD, ERROR, LENGTH, SAID, STEPS, WAY, B, parts, resent, settled, spans


def file_of(trace: Trace) -> dict[str, Any]:
    out = io.StringIO()
    tracefile.write(trace, out)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def slices(made: list[TracePart]) -> list[Event]:
    return sound(file_of(settled(made)))


def test_a_step_reads_from_ready_to_pull_over_both_nodes_on_one_clock() -> None:
    found = slices(parts())
    for step in range(1, STEPS + 1):
        of = [(e["cat"], e["node"], e["args"].get("part", "")) for e in found if e["args"]["step"] == step]
        # of two that begin together any may come first
        assert [x for x in of if x[0] not in ("step", "receive")] == [
            ("ready", "a", ""), ("push", "a", ""), ("encode", "a", ""), ("send", "a", ""), ("wire", "b", ""),
            ("aggregate", "b", "add"), ("aggregate", "b", "finalise"), ("send", "b", ""), ("wire", "a", ""),
            ("decode", "a", ""), ("pull", "a", ""),
        ]  # fmt: skip
        (out, back) = named(found, "wire", step=step)
        assert abs(out["dur"] - WAY * 1e6) < 1e3 and abs(back["dur"] - WAY * 1e6) < 1e3
        assert (out["name"], out["args"]["what"], back["args"]["what"]) == ("wire a to b", "contribution", "aggregate")
    (first, *_) = named(found, "encode")
    assert first["args"] == {
        "job": "gpt", "job_id": ("j" * 16).encode().hex(), "group": "ddp.0", "step": 1, "bytes": 100, "tensor": "ln",
        "blocks": [64],
    }  # fmt: skip


def test_it_says_whose_clock_it_is_and_how_far_off_each_may_be() -> None:
    file = file_of(settled(parts()))
    about = file["otherData"]
    a, b = about["nodes"]
    assert (about["clock_of"], a["clock_error_us"], b["dropped"], b["absent"]) == (
        "a", 0.0, 5, ["rank 3 did not answer"],
    )  # fmt: skip
    assert about["zero_unix_seconds"] == pytest.approx(1.7e9 + 1000.0 + LENGTH)
    # Frames take less than the round trips did, so they say more.
    assert abs(b["clock_ahead_us"] - AHEAD * 1e6) <= b["clock_error_us"] < 0.4 * ERROR * 1e6
    assert abs(b["clock_ahead_us"] - SAID * 1e6) > 1e3


def test_processes_are_nodes_and_threads_lanes_and_ranks() -> None:
    file = file_of(settled(parts()))
    names = {e["pid"]: e["args"]["name"] for e in file["traceEvents"] if e["name"] == "process_name"}
    threads = sorted((names[e["pid"]], e["args"]["name"]) for e in file["traceEvents"] if e["name"] == "thread_name")
    assert threads == [("a", "lane 0"), ("a", "rank 0 pull ddp.0"), ("a", "rank 0 push ddp.0"), ("b", "lane 0")]


def test_steps_that_some_node_had_begun_before_are_left_out() -> None:
    found = slices(parts(first_of_b=2))
    assert {e["args"]["step"] for e in found} == {2, 3}


def test_so_many_steps_as_were_asked_for() -> None:
    found = slices(parts(steps=1, first_of_b=2))
    assert {e["args"]["step"] for e in found} == {2}
    assert [e["node"] for e in named(found, "step")] == ["a", "b"]


def test_blocks_pushed_by_one_doorbell_are_one_slice() -> None:
    made = parts()
    ours = list(made[2])  # type: ignore[arg-type]
    both = [s for push in ours if push.kind == Kind.PUSH for s in (push, push._replace(key=0))]
    made[2] = (*(s for s in ours if s.kind != Kind.PUSH), *both)
    pushes = named(slices(made), "push")
    assert len(pushes) == STEPS
    assert pushes[0]["args"]["tensor"] == "ln, wte" and pushes[0]["args"]["bytes"] == 200


def test_a_frame_that_was_sent_again_is_tied_to_the_one_that_arrived() -> None:
    made = parts()
    ours, theirs = list(made[2]), list(made[4])  # type: ignore[arg-type]
    (lost,) = [s for s in ours if s.kind == Kind.SEND and s.step == 1]
    again = resent(lost)._replace(begin=lost.begin + 0.001, end=lost.begin + 0.0011)
    made[2] = (*ours, again)
    made[4] = tuple(resent(s) if s.kind == Kind.RECEIVE and s.step == 1 else s for s in theirs)
    out, back = named(slices(made), "wire", step=1)
    assert out["args"]["resent"] and out["dur"] < WAY * 1e6 and "resent" not in back["args"]
    assert len(named(slices(made), "send", step=1)) == 3


def test_of_a_frame_that_was_sent_again_twice_the_first_may_be_the_one_that_arrived() -> None:
    """A later copy would seem to leave after it arrived, and clocks be corrected by that."""
    made = parts()
    ours, theirs = list(made[2]), list(made[4])  # type: ignore[arg-type]
    (lost,) = [s for s in ours if s.kind == Kind.SEND and s.step == 1]
    again = [resent(lost)._replace(begin=lost.begin + late, end=lost.begin + late) for late in (0.001, 0.006)]
    made[2] = (*ours, *again)
    made[4] = tuple(
        (resent(s) if s.kind == Kind.RECEIVE else s)._replace(begin=s.begin + 0.001, end=s.end + 0.001)
        if s.step == 1 and s.kind != Kind.SEND else s for s in theirs
    )  # fmt: skip
    trace = settled(made)
    clock = trace.nodes["b"].clock
    assert abs(clock.offset(1000.0) - AHEAD) <= clock.error + 1e-6
    (out, _) = named(sound(file_of(trace)), "wire", step=1)
    assert out["dur"] == pytest.approx(WAY * 1e6, abs=1e3)


def test_spans_of_a_node_whose_clock_is_not_known_are_left_out() -> None:
    made = parts()
    node = made[3]
    assert isinstance(node, TracedNode)
    made[3] = replace(node, clocks=(), spans=0, reason="no round trip to it was measured, so its clock is not known")
    file = file_of(settled(made))
    assert {e["node"] for e in sound(file)} == {"a"}
    assert "no round trip" in file["otherData"]["nodes"][1]["reason"]


@pytest.mark.parametrize(
    "bad",
    [
        {"begin": math.nan}, {"end": math.inf}, {"begin": 9e9}, {"kind": 99}, {"kind": 0},
    ],
)  # fmt: skip
def test_what_a_foreign_daemon_says_that_is_no_span_is_counted_and_left_out(bad: dict[str, Any]) -> None:
    made = parts()
    theirs = list(made[4])  # type: ignore[arg-type]
    made[4] = (*theirs, theirs[0]._replace(**bad))
    trace = settled(made)
    assert trace.unusable == 1
    file = file_of(trace)
    assert file["otherData"]["unusable_spans"] == 1 and sound(file) == slices(parts())


def test_a_node_whose_clock_makes_no_sense_is_left_out_and_named() -> None:
    made = parts()
    node = made[3]
    assert isinstance(node, TracedNode)
    made[3] = replace(node, clocks=(replace(node.clocks[0], offset=math.nan),))
    file = file_of(settled(made))
    assert {e["node"] for e in sound(file)} == {"a"}
    assert "its clock cannot be compared" in file["otherData"]["nodes"][1]["reason"]


def test_a_node_that_stops_answering_keeps_what_it_sent_and_the_reason() -> None:
    made = parts()
    node = made[3]
    assert isinstance(node, TracedNode)
    file = file_of(settled([*made, replace(node, reason="only the first 12 spans: it does not answer any more")]))
    assert {e["node"] for e in sound(file)} == {"a", "b"}
    assert file["otherData"]["nodes"][1]["reason"].startswith("only the first 12")


def test_nothing_recorded_is_a_file_with_nothing_in_it() -> None:
    file = file_of(settled([TraceContext("a", 0, 0.0), TracedNode("a")]))
    assert sound(file) == [] and file["otherData"]["nodes"][0]["name"] == "a"


def test_what_is_not_known_is_shown_by_number() -> None:
    context = parts()[0]
    assert isinstance(context, TraceContext)
    ours, _ = spans(1)
    foreign: list[Span] = [s._replace(peer=B + 1 if s.peer else 0) for s in ours]
    found = slices([replace(context, domains=()), TracedNode("a"), tuple(foreign)])
    assert {(e["args"]["job"], e["args"]["group"]) for e in found} == {((b"j" * 16).hex(), "16")}
    assert not named(found, "wire") and all("to" not in e["args"] for e in found)
