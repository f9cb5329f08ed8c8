"""Norms of what workers pushed.

What may live here: tests of `gcserver/runtime/norms.py`.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from gcproto import slots
from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcserver.core.events import DomainConfig, Member
from gcserver.runtime.blocks import DomainMemory, StateUse
from gcserver.runtime.norms import gradient_square
from tests.unit.runtime.one_block import JOB, N, node, push, random


def test_the_sum_of_the_local_ranks_counts_once_all_have_pushed(tmp_path: Path) -> None:
    config = DomainConfig(JOB, 0, "calls", 1, (Member(1, "a", 2),), 0, 2, 2, 65536, 65536, (0, 1))
    memory = DomainMemory(config, 1, 0, tmp_path)
    memory.open_section(Section(0, (TensorSpec("w", (N,), int(DType.F32)),)))
    state = memory.blocks[0]
    for rank, value in enumerate((1.0, 2.0)):
        assert gradient_square(state) == 0.0
        state.floats(state.inputs[rank])[:] = value * 8
        slots.commit_push(state.arena, state.slot, rank, 1, 2, 8.0)
    assert gradient_square(state) == 9.0 * N, "without the loss scale"


def test_a_loss_scale_that_cannot_be_squared_ends_no_lane(tmp_path: Path) -> None:
    _, memory = node(tmp_path)
    state = memory.blocks[0]
    state.floats(state.inputs[0])[:] = 1.0
    for scale, square in ((1e300, 0.0), (1e-300, math.inf)):
        slots.commit_push(state.arena, state.slot, 0, 1, 2, scale)
        assert gradient_square(state) == square


@pytest.mark.parametrize(("dtype", "as_bits"), [(DType.F16, np.float16), (DType.BF16, np.uint16)])
def test_halves(tmp_path: Path, dtype: DType, as_bits: type) -> None:
    _, memory = node(tmp_path, dtype=dtype)
    state = memory.blocks[0]
    np.frombuffer(state.inputs[0], as_bits)[:] = 0x4000 if as_bits is np.uint16 else 2.0
    slots.commit_push(state.arena, state.slot, 0, 1, 2, 1.0)
    assert gradient_square(state) == 4.0 * N


def test_what_is_never_compressed_has_none(tmp_path: Path) -> None:
    _, memory = node(tmp_path, dtype=DType.I32)
    state = memory.blocks[0]
    slots.commit_push(state.arena, state.slot, 0, 1, 2, 1.0)
    assert gradient_square(state) == 0.0


def test_a_lane_tells_what_is_held_back_and_of_how_much(tmp_path: Path) -> None:
    executor, memory = node(tmp_path)
    x = random(3)
    push(memory, x)
    assert list(executor.facts((JOB, 0), gradients=True)) == [(0, 0, 0.0, 0.0)], "of nothing held back nobody asks"
    _, held = memory.begin_states(0, 1, (0, 1), False, StateUse(N, True, 0))
    held[:N] = 2.0
    memory.flip(0, 1, 1, owner=False)
    ((key, nbytes, residual, gradient),) = executor.facts((JOB, 0), gradients=True)
    assert (key, nbytes, residual) == (0, 0, 4.0 * N)
    assert gradient == pytest.approx(float(np.dot(x, x)), rel=1e-6)
    assert list(executor.facts((JOB, 0), gradients=False)) == [(0, 0, 4.0 * N, 0.0)]
