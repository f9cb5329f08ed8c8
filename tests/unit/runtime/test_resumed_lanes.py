"""Two lanes whose states went to new lanes by way of a checkpoint, beside two that were left alone: the same bytes.

What may live here: whole steps of real lanes for every kind of codec, without sockets. What may not: single questions
(`test_checkpoints.py`), workers and supervisors (`tests/integration/test_checkpoint.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gcproto import slots
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import Rule
from gcproto.states import PIECE, AskStates, BlockStates, GiveStates, StatesKept
from gcproto.wire import Flag
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.control_events import OpenSection
from gcserver.core.plan import compiled
from gcserver.runtime.checkpoints import Checkpoints
from gcserver.runtime.resolve import resolve
from tests.fuzz.lanes import NAMES, NODES, PARTITION, Lane, Pair

#: a block each
SECTION = Section(0, (TensorSpec("w", (30, 16), 0), TensorSpec("v", (20, 16), 0)), (1,))
JOB, LATER = b"j" * 16, b"l" * 16
SPECS = ("topk(ratio=0.05)+momentum", "dgc(ratio=0.05,warmup=6)", "onebit", "qsgd(bits=2)+ef", "terngrad", "natural",
         "randomk(ratio=0.1)", "signum", "sidco-e(ratio=0.05)", "powersgd(rank=2)", "fp16")  # fmt: skip


def begin(pair: Pair, job: bytes, specs: list[str], **resumed: Any) -> None:
    """Open a domain for each codec on both lanes, as a supervisor does."""
    for me, lane in enumerate((pair.a, pair.b)):
        (lane.folder / "jobs" / job.hex()).mkdir(parents=True, exist_ok=True)
        members = tuple(ev.Member(node, name, 1) for node, name in zip(NODES, NAMES, strict=True))
        for number, spec in enumerate(specs):
            config = ev.DomainConfig(
                job, number, spec, 1, members, me, 1, 2, 2, 0, (me,), PARTITION, spec.startswith("powersgd"), **resumed
            )
            rules = (compiled(Rule("*", spec), resolve),)
            lane.process.orders.take(ev.DomainOpened(config, (ev.Plan(0, rules, resolve("none")),)))
            lane.process.orders.take(OpenSection((job, number), SECTION))
    pair.carry()


def reported(lane: Lane, job: bytes, domain: int, number: int) -> bool:
    return any(r.domain[1] == domain and r.step == number for r in lane.heard(fx.ReportStep, job))


def step(pair: Pair, job: bytes, number: int, count: int, drawn: int) -> bytes:
    """One step of all domains; ``drawn`` says which gradients. What came out at both lanes."""
    out = b""
    for domain in range(count):
        for me, lane in enumerate((pair.a, pair.b)):
            memory = lane.process.executor.domains[job, domain]
            for key, state in memory.blocks.items():
                made = np.random.default_rng((drawn, me, domain, key))
                floats = np.frombuffer(state.inputs[0], np.float32)
                floats[:] = made.standard_normal(floats.size)
                slots.commit_push(state.arena, state.slot, 0, number, Flag.AVERAGE, 1.0)
            keys = tuple(memory.blocks)
            lane.process.feed(ev.Pushed((job, domain), 0, number, keys, True, Flag.AVERAGE))
        pair.carry()
        for lane in (pair.a, pair.b):
            if not reported(lane, job, domain, number):
                pair.tick()
            assert reported(lane, job, domain, number), lane.faults(job)
            lane.process.orders.take(ev.Settled((job, domain), number, False, 0))
            memory = lane.process.executor.domains[job, domain]
            out += b"".join(bytes(s.output) for s in memory.blocks.values())
    return out


def carried(lane: Lane, other: Lane, me: int, count: int) -> int:
    """Hand what one lane has settled to another; returns how many floats that were."""
    source, target, moved = Checkpoints(lane.process), Checkpoints(other.process), 0
    for domain in range(count):
        memory = lane.process.executor.domains[JOB, domain]
        for key, state in memory.blocks.items():
            for owner in (False, True) if state.block.owner == me else (False,):
                answer = source.answer(JOB, me, AskStates(domain, key, owner, 0, 3))
                assert isinstance(answer, BlockStates) and answer.floats <= PIECE
                if answer.floats:
                    said = GiveStates(domain, key, owner, 0, answer.floats, answer.tag, answer.held, answer.data)
                    assert target.answer(LATER, me, said) == StatesKept(domain, key, owner, 0)
                    moved += answer.floats
    return moved


def test_new_lanes_go_on_as_the_old_ones_would_have() -> None:
    """For every codec by itself, and two whose plan changes it: what one held back another takes up."""
    specs = list(SPECS)
    pair = Pair()
    try:
        begin(pair, JOB, specs)
        for number in (1, 2, 3):
            step(pair, JOB, number, len(specs), number)
        begin(pair, LATER, specs, drawn_from=JOB, ahead=3)
        moved = [carried(lane, lane, me, len(specs)) for me, lane in enumerate((pair.a, pair.b))]
        assert min(moved) > 3_000
        alone = [step(pair, JOB, number, len(specs), number) for number in (4, 5, 6)]
        assert [step(pair, LATER, number, len(specs), number + 3) for number in (1, 2, 3)] == alone
    finally:
        pair.close()


@pytest.mark.parametrize("without", ["states", "seeds"])
def test_without_states_or_seeds_they_would_not(without: str) -> None:
    specs = ["onebit" if without == "states" else "terngrad"]
    pair = Pair()
    try:
        begin(pair, JOB, specs)
        for number in (1, 2, 3):
            step(pair, JOB, number, 1, number)
        begin(pair, LATER, specs, **({"drawn_from": JOB, "ahead": 3} if without == "states" else {}))
        assert step(pair, LATER, 1, 1, 4) != step(pair, JOB, 4, 1, 4)
    finally:
        pair.close()


def test_a_dense_codec_delivers_what_was_brought() -> None:
    """The checkpoint is of a sparsifier, the later job's plan is none: what was held back comes with its first step."""
    pair = Pair()
    try:
        begin(pair, JOB, ["topk(ratio=0.05)"])
        for number in (1, 2, 3):
            step(pair, JOB, number, 1, number)
        begin(pair, LATER, ["none"])
        for me, lane in enumerate((pair.a, pair.b)):
            assert carried(lane, lane, me, 1)
        delivered = np.frombuffer(step(pair, LATER, 1, 1, 4), np.float32).reshape(2, -1)
        plain = np.frombuffer(step(pair, LATER, 2, 1, 4), np.float32).reshape(2, -1)
        held = np.zeros(plain.shape[1], np.float32)
        for lane in (pair.a, pair.b):
            at = 0
            memory = lane.process.executor.domains[JOB, 0]
            for key, state in memory.blocks.items():
                for owner in (False, True):
                    found = memory.settled_states(key, owner)
                    if found is not None:
                        held[at : at + state.block.elements] += found[0][: state.block.elements]
                at += state.block.elements
        np.testing.assert_allclose(delivered[0], plain[0] + held / 2, atol=1e-5)
        assert np.abs(held).max() > 0.5 and (delivered[0] == delivered[1]).all()
    finally:
        pair.close()
