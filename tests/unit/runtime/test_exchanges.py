"""Two exchanges through the executor: what the runtime does around a codec of whole matrices.

What may live here: tests of `gcserver/runtime/exchanges.py` with files in a temporary folder. What may not: the codec's
own arithmetic (`codecs/test_powersgd.py`), the order of a round (`core/`, the simulation).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gcproto import slots, wire
from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcproto.records import replace
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.codecs import CodecError
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.executor import Executor
from gcserver.runtime.resolve import resolve

JOB = b"j" * 16
ID = (JOB, 0)
#: P and Q as they are, and rounded
SPECS = "powersgd(rank=2)", "powersgd(rank=2,values=16)"
MEMBERS = (ev.Member(wire.node_id("a"), "a", 1), ev.Member(wire.node_id("b"), "b", 1))


def section(dtype: DType = DType.F32, *shapes: tuple[int, ...]) -> Section:
    tensors = shapes or ((48, 4, 8), (40,), (64, 16))
    return Section(0, tuple(TensorSpec(f"t{i}", shape, int(dtype)) for i, shape in enumerate(tensors)))


class Node:
    """One member: its memory, and an executor that can be lost."""

    def __init__(self, folder: Path, me: int, what: Section, spec: str = SPECS[0]) -> None:
        self.folder, self.me, self.what = folder / str(me), me, what
        self.folder.mkdir()
        self.codec = resolve(spec)
        self.levels: tuple[int, ...] = ()
        self.restart()

    def restart(self) -> None:
        config = ev.DomainConfig(JOB, 0, "ddp", 1, MEMBERS, self.me, 1, 2, 2, 0, whole=True)
        self.memory = DomainMemory(config, 1, 0, self.folder)
        self.memory.open_section(self.what)
        self.executor = Executor()
        self.executor.domains[ID] = self.memory
        (self.block,) = self.memory.blocks.values()

    def push(self, x: np.ndarray, step: int, scale: float = 1.0) -> None:
        np.frombuffer(self.block.inputs[0], x.dtype)[:] = x
        slots.commit_push(self.block.arena, self.block.slot, 0, step, 0, scale)

    def encode(self, step: int, version: int, stage: int = 0, aggregate: bytes = b"") -> tuple[ev.Encoded, bytes]:
        handle = self.executor.handles.add(memoryview(aggregate)) if aggregate else None
        e = fx.Encode(ID, 0, step, self.codec, 7, version, 1 - version, None, 0, 0, stage, handle, self.levels)
        answer = self.executor.encode(e)
        payload = b"" if answer.handle is None else bytes(self.executor.handles.table[answer.handle])
        return answer, payload

    def total(self, step: int, version: int, payloads: list[bytes], stage: int) -> tuple[ev.Finalised, bytes]:
        for i, p in enumerate(payloads):
            handle = self.executor.handles.add(memoryview(p)) if p else None
            add = fx.Accumulate(ID, 0, step, i, handle, self.codec.id, self.codec.level, i == 0, False, stage)
            self.executor.accumulate(add)
        flags = int(Flag.SECOND) if stage else 0
        e = fx.Finalise(ID, 0, step, self.codec, 7, version, 1 - version, stage, 2, False, flags, 0, stage, self.levels)
        answer = self.executor.finalise(e)
        return answer, b"" if answer.handle is None else bytes(self.executor.handles.table[answer.handle])

    def decode(self, step: int, payload: bytes, nonfinite: bool = False) -> None:
        handle = self.executor.handles.add(memoryview(payload)) if payload else None
        e = fx.Decode(ID, 0, step, handle, self.codec.id, self.codec.level, 2, int(Flag.SECOND), nonfinite, 1)
        self.executor.decode(e)

    def commit(self, step: int) -> None:
        self.executor.commit_output(fx.CommitOutput(ID, 0, step, False, 0))

    def output(self, dtype: type = np.float32) -> np.ndarray:
        return np.frombuffer(self.block.output, dtype).copy()


def run_round(a: Node, b: Node, step: int, version: int, lose: int = -1) -> None:
    """One step over two nodes; ``lose``: b loses its process before this stage's encoding is used."""
    firsts = [n.encode(step, version)[1] for n in (a, b)]
    _, first = a.total(step, version, firsts, 0)
    if lose >= 0:
        b.restart()
        assert b.encode(step, version)[1] == firsts[1], "begun again from the same state: the same bytes"
    seconds = [n.encode(step, version, 1, first)[1] for n in (a, b)]
    if lose > 0:
        b.restart()
        assert b.encode(step, version)[1] == firsts[1]
        assert b.encode(step, version, 1, first)[1] == seconds[1]
    answer, second = a.total(step, version, seconds, 1)
    assert not answer.nonfinite and answer.stage == 1
    b.decode(step, second)
    for n in (a, b):
        n.commit(step)
        n.memory.flip(0, step, 1 - version, False)
    assert not a.executor.exchanges.between and not a.executor.averager.sums and not b.executor.exchanges.between


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(tmp_path: Path, spec: str) -> tuple[Node, Node]:
    return Node(tmp_path, 0, section(), spec), Node(tmp_path, 1, section(), spec)


def test_shapes_are_the_tensors_of_the_block(pair: tuple[Node, Node]) -> None:
    assert pair[0].block.shapes == ((48, 32), (40, 0), (64, 16))


@pytest.mark.parametrize("lose", [-1, 0, 1])
def test_nodes_agree_and_nothing_is_lost(tmp_path: Path, lose: int, spec: str) -> None:
    """Over many steps the results add up to the mean of what went in, whoever loses its process in between."""
    rng = np.random.default_rng(3)
    a, b = Node(tmp_path, 0, section(), spec), Node(tmp_path, 1, section(), spec)
    n = a.block.block.elements
    x, y = rng.standard_normal((2, n)).astype(np.float32)
    delivered = np.zeros(n)
    steps = 60
    for step in range(1, steps + 1):
        a.push(x, step)
        b.push(y, step)
        run_round(a, b, step, (step - 1) % 2, lose if step % 7 == 3 else -1)
        assert np.array_equal(a.output(), b.output())
        delivered += a.output()
    mean = (x + y) / 2
    error = np.linalg.norm(delivered / steps - mean) / np.linalg.norm(mean)
    assert error < 0.25
    held = sum(state[0][:n].astype(np.float64) for node in (a, b) if (state := node.memory.settled_states(0, False)))
    assert np.allclose(2 * delivered + held, steps * (x + y).astype(np.float64), atol=2e-3), "rounded off or left out"
    assert np.allclose(a.output()[1536:1576], mean[1536:1576]), "a vector is sent as it is"


def test_segments_of_other_ranks_and_one_sent_whole(pair: tuple[Node, Node], spec: str) -> None:
    """Levels are those of both exchanges; what a plan excludes comes out as if it were not compressed."""
    rng = np.random.default_rng(4)
    a, b = pair
    x, y = rng.standard_normal((2, a.block.block.elements)).astype(np.float32)
    lengths = []
    for step, levels in enumerate([(), (1, 2, 2), (2, 65, 65), (1, 1, 65)], 1):
        a.levels = b.levels = levels
        a.push(x, step)
        b.push(y, step)
        lengths.append(len(a.encode(step, (step - 1) % 2)[1]))
        run_round(a, b, step, (step - 1) % 2, lose=1)
        assert np.array_equal(a.output(), b.output())
        if levels[2:] == (65,):
            last = slice(-64 * 16, None)
            owed = x[last] + y[last]
            if step == 3:
                assert not np.allclose(a.output()[last], owed / 2), "with what was held back until now"
            else:
                assert np.allclose(a.output()[last], owed / 2, atol=1e-6)
    factors, whole = (2 * 48 + 2 * 64, 48 + 2 * 64, 2 * 48, 48), (40, 40, 40 + 64 * 16, 40 + 64 * 16)
    head, wide = (0, 4) if spec == SPECS[0] else (4, 2)
    assert lengths == [head + wide * few + 4 * exact for few, exact in zip(factors, whole, strict=True)]


def test_payloads_of_other_levels_make_the_round_void(pair: tuple[Node, Node]) -> None:
    a, b = pair
    for n in (a, b):
        n.push(np.ones(n.block.block.elements, np.float32), 1)
    a.levels, b.levels = (2, 2, 2), (1, 2, 2)
    theirs = b.encode(1, 0)[1]
    # The owner adds what came first before it has encoded itself: only in the end is it seen that both are wrong.
    answer, _ = a.total(1, 0, [theirs, theirs], 0)
    assert answer.nonfinite and np.isnan(a.output()).all()
    mine = a.encode(1, 0)[1]
    assert a.total(1, 0, [mine, theirs], 0)[0].nonfinite
    # Nor does a member go on from a sum of another length.
    assert b.encode(1, 0, 1, mine)[0].nonfinite


def test_a_loss_scale_does_not_change_the_state(tmp_path: Path, spec: str) -> None:
    results = []
    for scale in (1.0, 1024.0):
        folder = tmp_path / str(scale)
        folder.mkdir()
        a, b = Node(folder, 0, section(), spec), Node(folder, 1, section(), spec)
        for step in (1, 2):
            x = np.random.default_rng(step).standard_normal(a.block.block.elements).astype(np.float32)
            for n in (a, b):
                n.push(x * np.float32(scale), step, scale)
            run_round(a, b, step, (step - 1) % 2)
        results.append(a.output() / np.float32(scale))
    assert np.array_equal(results[0], results[1])


def test_half_precision(tmp_path: Path, spec: str) -> None:
    what = section(DType.F16, (64, 32))
    a, b = Node(tmp_path, 0, what, spec), Node(tmp_path, 1, what, spec)
    u, v = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    x = np.outer(u, v[:32]).astype(np.float16).ravel()
    for n in (a, b):
        n.push(x, 1)
    run_round(a, b, 1, 0)
    assert np.array_equal(a.output(np.float16), b.output(np.float16))
    rounded = 0.0 if spec == SPECS[0] else 2**-8
    assert np.allclose(a.output(np.float16), x, rounded, 0.01), "of rank one: nothing is left out"


def test_vectors_alone_have_an_empty_second_payload(tmp_path: Path, spec: str) -> None:
    what = section(DType.F32, (40,), (3, 3))
    a, b = Node(tmp_path, 0, what, spec), Node(tmp_path, 1, what, spec)
    x = np.arange(49, dtype=np.float32)
    for n in (a, b):
        n.push(x, 1)
    run_round(a, b, 1, 0)
    assert np.array_equal(a.output(), x) and np.array_equal(b.output(), x)


def test_what_is_not_finite_ends_the_round(pair: tuple[Node, Node]) -> None:
    a, b = pair
    x = np.ones(a.block.block.elements, np.float32)
    a.push(x, 1)
    x[7] = np.inf
    b.push(x, 1)
    answer, payload = b.encode(1, 0)
    assert answer.nonfinite and payload == b""
    # Finite on every node and not in sum: the first aggregate says so, and is empty.
    large = np.full(a.block.block.elements, 3e38, np.float32)
    for n in (a, b):
        n.push(large, 1)
    payloads = [n.encode(1, 0)[1] for n in (a, b)]
    final, total = a.total(1, 0, payloads, 0)
    assert final.nonfinite and total == b"" and np.isnan(a.output()).all()
    b.encode(1, 0)
    b.decode(1, b"", nonfinite=True)
    assert np.isnan(b.output()).all()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_payload_of_the_wrong_length_makes_the_sum_void(pair: tuple[Node, Node], stage: int) -> None:
    a, _ = pair
    a.push(np.ones(a.block.block.elements, np.float32), 1)
    _, first = a.encode(1, 0)
    good = first if stage == 0 else a.encode(1, 0, 1, first)[1]
    add = [fx.Accumulate(ID, 0, 1, i, None, a.codec.id, a.codec.level, i == 0, False, stage) for i in (0, 1)]
    handle = a.executor.handles.add(memoryview(good))
    assert a.executor.accumulate(fx.Accumulate(ID, 0, 1, 0, handle, a.codec.id, a.codec.level, True, False, stage))
    assert not a.executor.accumulate(add[1])
    e = fx.Finalise(ID, 0, 1, a.codec, 7, 0, 1, stage, 2, False, 0, 0, stage)
    answer = a.executor.finalise(e)
    assert answer.nonfinite and answer.handle is None and np.isnan(a.output()).all()


def test_payloads_are_checked_against_the_block(pair: tuple[Node, Node]) -> None:
    a, _ = pair
    a.push(np.ones(a.block.block.elements, np.float32), 1)
    _, first = a.encode(1, 0)
    _, second = a.encode(1, 0, 1, first)
    assert len(first) != len(second)
    header = Header(
        FrameType.DATA, Phase.CONTRIBUTION, job=JOB, codec=a.codec.id, level=a.codec.level,
        elements=a.block.block.elements, sender=1, incarnation=1, link_seq=1,
    )  # fmt: skip
    later = replace(header, flags=int(Flag.SECOND))
    a.executor.check(header, memoryview(first))
    a.executor.check(later, memoryview(second))
    # Lengths that no levels give; others are seen when they are added (the test above).
    n = a.block.block.elements
    for h, payload in (
        (header, first[: len(first) // 3]),
        (header, b""),
        (header, first[:-1]),
        (later, bytes(4 * n + 4)),
    ):
        with pytest.raises(CodecError):
            a.executor.check(h, memoryview(payload))
    a.executor.close(ID)
    a.executor.check(header, memoryview(second))
    with pytest.raises(CodecError):
        a.executor.check(header, memoryview(bytes(7)))
    dense = replace(later, codec=0, level=0)
    with pytest.raises(CodecError):
        a.executor.check(dense, memoryview(bytes(4 * header.elements)))


def test_retained_sums_are_found_after_a_restart(pair: tuple[Node, Node]) -> None:
    a, b = pair
    x = np.random.default_rng(0).standard_normal(a.block.block.elements).astype(np.float32)
    for n in (a, b):
        n.push(x, 1)
    _, first = a.total(1, 0, [n.encode(1, 0)[1] for n in (a, b)], 0)
    _, second = a.total(1, 0, [n.encode(1, 0, 1, first)[1] for n in (a, b)], 1)
    a.restart()
    config = a.memory.config
    memory = DomainMemory(config, 1, 0, a.folder)
    known = memory.open_section(a.what)[0]
    assert [(k.step, k.stage, k.nbytes) for k in sorted(known.retained, key=lambda k: k.stage)] == [
        (1, 0, len(first)), (1, 1, len(second))
    ]  # fmt: skip
    executor = Executor()
    executor.domains[ID] = memory
    for kept, payload in zip(sorted(known.retained, key=lambda k: k.stage), (first, second), strict=True):
        handle = executor.retained_handle(memory, 0, kept)
        assert handle is not None and bytes(executor.handles.table[handle]) == payload
