"""Averages of one block: owner and receiver agree, whatever a codec does to votes and to the loss scale.

What may live here: tests of `gcserver/runtime/averaging.py`. What may not: the protocol, rounds of two exchanges
(`test_exchanges.py`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gcproto import slots
from gcproto.dtypes import DType
from gcserver.core.effects import Accumulate, Decode, Finalise
from gcserver.core.events import Finalised
from gcserver.runtime.resolve import resolve
from tests.unit.runtime.one_block import JOB, encode, node, push, random


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


@pytest.mark.parametrize("spec", ["none", "topk(ratio=1)"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_result_too_large_for_fp16_is_seen_by_a_loss_scaler(tmp_path: Path, spec: str, scale: float) -> None:
    """The sum of two contributions that fit (divisor 1)."""
    owner, memory = node(tmp_path, 0, dtype=DType.F16)
    choice, state = resolve(spec), memory.blocks[0]
    x = np.frombuffer(state.inputs[0], np.float16)
    x[:] = 60000.0
    slots.commit_push(state.arena, state.slot, 0, 1, 2, scale)
    mine = encode(owner, spec, 1, 0)
    assert not mine.nonfinite
    for i in (0, 1):
        owner.accumulate(Accumulate((JOB, 0), 0, 1, i, mine.handle, choice.id, choice.level, i == 0, False))
    done = owner.finalise(Finalise((JOB, 0), 0, 1, choice, 9, 0, 1, 0, 1, False, 2, 0))
    result = np.frombuffer(state.output, np.float16)
    assert done.nonfinite is (scale != 1.0)
    if scale == 1.0:
        assert (result == 65504.0).all()
