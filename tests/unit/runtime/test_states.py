"""Memory of one block: states handed from codec to codec and found again, retained payloads.

What may live here: tests of `gcserver/runtime/states.py` and of states in `blocks.py`. What may not: the protocol.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gcserver.codecs import parse
from gcserver.core.events import Retained
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.resolve import resolve
from gcserver.runtime.states import state_use
from tests.unit.runtime.one_block import SECTION, N, encode, node, push, random


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
    assert memory.residual_square(0) == 0.0, "version 0 is the settled one, and no step has settled"
    memory.flip(0, 1, 1, False)
    encode(executor, "signum", 2, read=1)
    assert np.allclose(states(memory, "signum")[0], 0.1 * random(2), rtol=1e-5)
    assert np.array_equal(states(memory, "topk(ratio=0.01)")[1], residual)
    assert memory.residual_square(0) == np.dot(residual, residual)


def test_states_are_found_again_by_the_next_life(tmp_path: Path) -> None:
    executor, memory = node(tmp_path)
    push(memory, random(3))
    encode(executor, "sidco-e(ratio=0.01)", 1, read=0)
    before = [s.copy() for s in states(memory, "sidco-e(ratio=0.01)")]
    _, again = node(tmp_path)
    for old, new in zip(before, states(again, "sidco-e(ratio=0.01)"), strict=True):
        assert np.array_equal(old, new)


@pytest.mark.parametrize("other", ["signum", "topk(ratio=0.01)+ef(decay=0)", "onebit"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_residual_outlives_any_number_of_steps_of_another_codec(tmp_path: Path, other: str, steps: int) -> None:
    """Steps settle in between, so that what is current changes although nobody wrote a residual."""
    executor, memory = node(tmp_path)
    top, current = "topk(ratio=0.01)", 0
    for step in range(1, 4 + steps):
        spec = top if step <= 3 else other
        push(memory, random(step))
        encode(executor, spec, step, read=current)
        if resolve(spec).feedback:
            current = 1 - current
            memory.flip(0, step, current, False)
        if step == 3:
            settled = states(memory, top)[current].copy()
    found = states(memory, top)[current]
    assert np.linalg.norm(settled) > 0
    assert np.array_equal(found, settled) is (other != "onebit"), "onebit has a residual of its own"


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
