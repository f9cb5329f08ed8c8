"""Memory of one block: states handed from codec to codec, retained payloads; votes and the loss scale.

What may live here: tests of `gcserver/runtime/executor.py` and of states in `blocks.py`. What may not: the protocol.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gcproto import slots
from gcproto.manifest import Section, TensorSpec
from gcserver.codecs import parse
from gcserver.core.effects import Accumulate, Decode, Encode, Finalise
from gcserver.core.events import DomainConfig, Encoded, Finalised, Member, Retained
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.executor import Executor, state_use
from gcserver.runtime.resolve import resolve

N = 4096
JOB = b"j" * 16
SECTION = Section(0, (TensorSpec("w", (N,), 0),))


def node(tmp_path: Path, me: int = 0, members: int = 2) -> tuple[Executor, DomainMemory]:
    """An executor with one block of N float32, of which member 0 is the owner."""
    everyone = tuple(Member(i + 1, "ab"[i], 1) for i in range(members))
    config = DomainConfig(JOB, 0, "calls", 1, everyone, me, 1, members, 2, 65536, (me,))
    memory = DomainMemory(config, 1, 0, tmp_path / f"node{me}")
    memory.open_section(SECTION)
    executor = Executor()
    executor.domains[config.id] = memory
    return executor, memory


def push(memory: DomainMemory, x: np.ndarray, scale: float = 1.0) -> None:
    state = memory.blocks[0]
    state.floats(state.inputs[0])[:] = x
    slots.commit_push(state.arena, state.slot, 0, 1, 2, scale)


def encode(executor: Executor, spec: str, step: int, read: int, seed: int = 5) -> Encoded:
    return executor.encode(Encode((JOB, 0), 0, step, resolve(spec), seed, read, 1 - read, None, 2, 0))


def random(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


def states(memory: DomainMemory, spec: str, owner: bool = False) -> list[np.ndarray]:
    use = state_use(parse(spec), memory.blocks[0])
    assert use is not None
    return [memory.state(0, v, owner, use) for v in (0, 1)]


def test_a_residual_is_handed_from_codec_to_codec_and_the_rest_is_not(tmp_path: Path) -> None:
    executor, memory = node(tmp_path)
    push(memory, random(1))
    encode(executor, "topk(ratio=0.01)", 1, read=0)
    residual = states(memory, "topk(ratio=0.01)")[1].copy()
    assert np.count_nonzero(residual) == N - 40
    # A larger state: the memory moves, the residual goes with it, the momentum starts from nothing.
    for longer in states(memory, "topk(ratio=0.01)+momentum")[1:]:
        assert longer.size == 2 * N
        assert np.array_equal(longer[:N], residual)
        assert not longer[N:].any()
    encode(executor, "topk(ratio=0.01)+momentum", 2, read=1)
    assert states(memory, "topk(ratio=0.01)+momentum")[0][N:].any()
    # Another codec finds the residual and none of the momentum; so does the first one when it comes back.
    kept = states(memory, "onebit")[0].copy()
    assert kept.any()
    assert not states(memory, "topk(ratio=0.01)+momentum")[0][N:].any()
    assert np.array_equal(states(memory, "topk(ratio=0.01)+momentum")[0][:N], kept)


def test_a_codec_without_a_residual_leaves_that_of_another_where_it_is(tmp_path: Path) -> None:
    executor, memory = node(tmp_path)
    push(memory, random(2))
    encode(executor, "topk(ratio=0.01)", 1, read=0)
    residual = states(memory, "topk(ratio=0.01)")[1].copy()
    encode(executor, "signum", 2, read=1)
    assert np.allclose(states(memory, "signum")[0], 0.1 * random(2), rtol=1e-5)
    assert np.array_equal(states(memory, "topk(ratio=0.01)")[1], residual)
    assert memory.residual_square(0) == 0.0, "version 0 is the settled one, and no step has settled"


def test_states_are_found_again_by_the_next_life(tmp_path: Path) -> None:
    executor, memory = node(tmp_path)
    push(memory, random(3))
    encode(executor, "sidco-e(ratio=0.01)", 1, read=0)
    before = [s.copy() for s in states(memory, "sidco-e(ratio=0.01)")]
    _, again = node(tmp_path)
    for old, new in zip(before, states(again, "sidco-e(ratio=0.01)"), strict=True):
        assert np.array_equal(old, new)


@pytest.mark.parametrize("spec", ["topk(ratio=0.1)+ef(decay=0)", "topk(ratio=0.1)", "qsgd", "signsgd", "efsignsgd"])
def test_owner_and_receiver_hold_the_same_bytes_under_a_loss_scale(tmp_path: Path, spec: str) -> None:
    owner, theirs = node(tmp_path, 0)
    member, ours = node(tmp_path, 1)
    choice, scale = resolve(spec), 1024.0
    for memory, seed in ((theirs, 1), (ours, 2)):
        push(memory, scale * random(seed), scale)
    mine, other = encode(owner, spec, 1, 0), encode(member, spec, 1, 0)
    payload = bytes(member.handles.table[other.handle or 0])
    handles = (mine.handle, owner.handles.add(memoryview(payload)))
    for i, handle in enumerate(handles):
        owner.accumulate(Accumulate((JOB, 0), 0, 1, i, handle, choice.id, choice.level, i == 0, False))
    done = owner.finalise(Finalise((JOB, 0), 0, 1, choice, 9, 0, 1, 0, 2, False, 2, 0))
    assert isinstance(done, Finalised)
    frame = member.handles.add(memoryview(bytes(owner.handles.table[done.handle or 0])))
    divisor = 2 if choice.sum_units else 1
    member.decode(Decode((JOB, 0), 0, 1, frame, choice.id, choice.level, divisor, 2, False))
    first, second = (m.blocks[0] for m in (theirs, ours))
    assert bytes(first.output) == bytes(second.output)
    result = first.floats(first.output)
    exact = scale * (random(1) + random(2)) / 2
    if choice.votes:
        assert set(np.unique(result)) == {-scale, scale}
    else:
        assert 0.2 < np.dot(result, exact) / np.dot(exact, exact) < 2.0


def reopened(memory: DomainMemory) -> tuple[DomainMemory, dict[int, Retained]]:
    """The memory as the next process finds it after a kill, and its retained payloads by slot."""
    again = DomainMemory(memory.config, 1, 0, memory.directory)
    return again, {r.slot: r for r in again.open_section(SECTION)[0].retained}


def keep(memory: DomainMemory, slot: int, step: int, payload: bytes) -> None:
    memory.make_kept(0, slot, len(payload))[:] = payload
    memory.commit_kept(0, slot, Retained(step, slot, None, len(payload), step, 0, 0, 0, 0))


def test_a_retained_payload_is_found_again_where_it_moved_to(tmp_path: Path) -> None:
    _, memory = node(tmp_path)
    keep(memory, 0, 1, b"short")
    keep(memory, 1, 2, b"the other one")
    keep(memory, 0, 3, b"longer than before")
    keep(memory, 0, 4, b"fits")
    again, retained = reopened(memory)
    assert {slot: r.step for slot, r in retained.items()} == {0: 4, 1: 2}
    assert bytes(again.kept(0, 0, 4)) == b"fits" and bytes(again.kept(0, 1, 13)) == b"the other one"


def test_a_payload_that_was_being_written_is_not_retained(tmp_path: Path) -> None:
    """The kill comes while the next one is written over it, in the same place or in a larger one."""
    _, memory = node(tmp_path)
    keep(memory, 0, 1, b"first")
    keep(memory, 1, 1, b"second")
    memory.make_kept(0, 0, 3)[:] = b"new"
    memory.make_kept(0, 1, 4096)[:7] = b"and new"
    again, retained = reopened(memory)
    assert not retained
    keep(again, 0, 2, b"after")
    keep(again, 1, 2, bytes(4096))
    assert bytes(again.kept(0, 0, 5)) == b"after", "neither lies in the other"
