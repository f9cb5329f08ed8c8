"""What the tests of a lane's arithmetic share: an executor over one block of float32, and a contribution to it.

What may live here: that set-up. What may not: tests.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gcproto import slots
from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcserver.core.effects import Encode
from gcserver.core.events import DomainConfig, Encoded, Member
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.executor import Executor
from gcserver.runtime.resolve import resolve

N = 4096
JOB = b"j" * 16
SECTION = Section(0, (TensorSpec("w", (N,), 0),))


def node(tmp_path: Path, me: int = 0, members: int = 2, dtype: DType = DType.F32) -> tuple[Executor, DomainMemory]:
    """An executor with one block of N elements, of which member 0 is the owner."""
    everyone = tuple(Member(i + 1, "ab"[i], 1) for i in range(members))
    config = DomainConfig(JOB, 0, "calls", 1, everyone, me, 1, members, 2, 65536, (me,))
    memory = DomainMemory(config, 1, 0, tmp_path / f"node{me}")
    memory.open_section(Section(0, (TensorSpec("w", (N,), int(dtype)),)))
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
