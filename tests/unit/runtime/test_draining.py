"""A dense contribution that takes up what earlier codecs held back: what is sent, what is left, done again the same.

What may live here: tests of that part of `gcserver/runtime/encoding.py`, `contributions.py` and `blocks.py`. What may
not: when the core asks for it (`core/test_draining.py`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gcproto import slots
from gcproto.dtypes import DType
from gcserver.codecs import parse
from gcserver.core.effects import Encode
from gcserver.runtime.blocks import DomainMemory, StateUse
from gcserver.runtime.records import versions_of
from gcserver.runtime.resolve import resolve
from gcserver.runtime.states import state_use
from tests.unit.runtime.one_block import JOB, N, node, random


def use_of(memory: DomainMemory, spec: str) -> StateUse:
    use = state_use(parse(spec), memory.blocks[0])
    assert use is not None
    return use


def states(memory: DomainMemory, spec: str, owner: bool = False) -> list[np.ndarray]:
    return [memory.state(0, v, owner, use_of(memory, spec)) for v in (0, 1)]


@pytest.mark.parametrize("dense", ["none", "fp16", "bf16"])
@pytest.mark.parametrize(("dtype", "scale"), [(DType.F32, 1.0), (DType.F32, 512.0), (DType.F16, 8.0)])
def test_a_dense_contribution_takes_up_both_residuals(tmp_path: Path, dense: str, dtype: DType, scale: float) -> None:
    """In the loss scale of its inputs; the settled versions stay until the step is settled, the others are zeros."""
    executor, memory = node(tmp_path, dtype=dtype)
    state = memory.blocks[0]
    choice = resolve(dense)
    kept = {owner: states(memory, "topk(ratio=0.1)", owner) for owner in (False, True)}
    for owner, factor in ((False, 1.0), (True, 0.5)):
        memory.begin_states(0, 1, (0, 1), owner, use_of(memory, "topk(ratio=0.1)"))
        kept[owner][1][:] = factor * random(3)
        memory.flip(0, 1, 1, owner)
    x = random(4) * np.float32(scale)
    np.frombuffer(state.inputs[0], np.float32 if dtype is DType.F32 else np.float16)[:] = x
    slots.commit_push(state.arena, state.slot, 0, 2, 2, scale)
    e = Encode((JOB, 0), 0, 2, choice, 5, 1, 0, None, 2, 0, flush=3, owner_read=1)
    done = executor.encode(e)
    payload = executor.handles.table[done.handle or 0]
    if dense == "none":
        sent = np.frombuffer(payload, np.float32 if dtype is DType.F32 else np.float16).astype(np.float32)
    else:
        sent = np.empty(N, np.float32)
        parse(dense).decode(np.frombuffer(payload, np.uint8), sent)
    narrow = dense != "none" or dtype is not DType.F32
    inputs = x.astype(np.float16).astype(np.float32) if dtype is DType.F16 else x
    expected = inputs + 1.5 * np.float32(scale) * random(3)
    assert np.allclose(sent, expected, rtol=1e-2 if narrow else 1e-6, atol=scale * (1e-2 if narrow else 1e-6))
    again = executor.encode(e)
    assert bytes(executor.handles.table[again.handle or 0]) == bytes(payload), "done again it gives the same"
    for owner in (False, True):
        before = versions_of(state.record[0], owner)
        assert (before.current, before.settled, before.written, before.holds) == (1, 1, 2, True)
        memory.flip(0, 2, 0, owner)
        after = versions_of(state.record[0], owner)
        assert (after.current, after.settled, after.holds) == (0, 2, False)
        assert not kept[owner][0].any() and kept[owner][1].any()


def test_what_lies_behind_a_residual_stays_when_it_is_taken_up(tmp_path: Path) -> None:
    _, memory = node(tmp_path)
    first, second = states(memory, "topk(ratio=0.1)+momentum(m=0.9)")
    first[:], second[:] = 1.0, 2.0
    assert (memory.drain(0, 7, 1, False) == 2.0).all()
    assert (first[:N] == 0.0).all() and (first[N:] == 2.0).all() and (second == 2.0).all()
