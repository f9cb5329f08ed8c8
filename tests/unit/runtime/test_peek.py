"""Reading a domain's memory from outside, over files that a lane's own code made.

What may live here: tests of `gcserver/runtime/peek.py`. What may not: daemons (`tests/integration/test_peek.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from gcproto import slots
from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcserver.core.events import DomainConfig, Member
from gcserver.runtime.blocks import DomainMemory, StateUse
from gcserver.runtime.peek import JobGone, Peek, PeekError, Watched

JOB = b"p" * 16
KIB = 1 << 10
#: cut into blocks of 256 KiB over two lanes
TENSORS = (TensorSpec("a", (300, 500), 0), TensorSpec("empty", (0,), 0), TensorSpec("b", (40_000,), 0))
SECTION = Section(0, TENSORS)


def watched(state: Path, sections: tuple[Section, ...] = (SECTION,), ranks: int = 2) -> Watched:
    members = (Member(1, "x", ranks), Member(2, "y", ranks))
    config = DomainConfig(
        JOB, 3, "model", 1, members, 0, ranks, 2 * ranks, 2, 65536, tuple(range(ranks)), partition_bytes=256 * KIB
    )
    return Watched(str(state), 2, config, sections)


def lanes(w: Watched) -> list[DomainMemory]:
    folder = Path(w.state) / "jobs" / JOB.hex()
    memories = [DomainMemory(w.config, w.lanes, lane, folder) for lane in range(w.lanes)]
    for memory in memories:
        for section in w.sections:
            memory.open_section(section)
    return memories


def push(memories: list[DomainMemory], values: list[np.ndarray], step: int, scale: float = 1.0) -> None:
    """``values[rank]``: the whole section of that rank."""
    for memory in memories:
        for state in memory.blocks.values():
            b = state.block
            for rank, x in enumerate(values):
                state.inputs[rank][:] = x[b.start : b.start + b.elements].tobytes()
                slots.commit_push(state.arena, state.slot, rank, step, 1, scale)


def random(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def read(peek: Peek, name: str, picks: np.ndarray | None = None) -> np.ndarray:
    reading = peek.read(next(t for t in peek.tensors if t.name == name), picks)
    assert reading is not None
    return reading.contribution


def test_ranks_are_summed_and_tensors_put_together_from_blocks_of_two_lanes(tmp_path: Path) -> None:
    w = watched(tmp_path)
    memories = lanes(w)
    assert all(len(m.blocks) >= 1 for m in memories)
    values = [random(SECTION.elements, rank) for rank in range(2)]
    push(memories, values, 1, scale=8.0)
    total = (values[0] + values[1]) / np.float32(8)
    with Peek(w) as peek:
        assert [(t.name, t.elements) for t in peek.tensors] == [("a", 150_000), ("b", 40_000)]
        np.testing.assert_array_equal(read(peek, "a"), total[:150_000])
        np.testing.assert_array_equal(read(peek, "b"), total[150_000:])
        picks = np.arange(3, 150_000, 777)
        np.testing.assert_array_equal(read(peek, "a", picks), total[:150_000][picks])


def test_before_the_first_push_there_is_nothing_to_read(tmp_path: Path) -> None:
    w = watched(tmp_path)
    lanes(w)
    with Peek(w) as peek:
        assert all(peek.read(t) is None for t in peek.tensors)


def test_the_residual_that_went_into_a_step_is_added(tmp_path: Path) -> None:
    w = watched(tmp_path, ranks=1)
    memories = lanes(w)
    gradient = random(SECTION.elements, 1)
    for memory in memories:
        for key, state in memory.blocks.items():
            use = StateUse(state.block.elements, True, 7)
            before, after = memory.begin_states(key, 5, (0, 1), False, use)
            before[:], after[:] = 10.0, 20.0
    push(memories, [gradient], 5)
    with Peek(w) as peek:
        np.testing.assert_array_equal(read(peek, "a"), gradient[:150_000] + np.float32(10))
        for memory in memories:
            for key in memory.blocks:
                memory.flip(key, 5, 1, False)
        # settled, but the gradient is still that of step 5
        np.testing.assert_array_equal(read(peek, "a"), gradient[:150_000] + np.float32(10))
        push(memories, [gradient], 6)
        np.testing.assert_array_equal(read(peek, "a"), gradient[:150_000] + np.float32(20))


@pytest.mark.parametrize("spec", ["none", "topk(ratio=0.01)"])
def test_the_outcome_is_what_the_owner_encoded_and_unknown_where_that_was_elsewhere(tmp_path: Path, spec: str) -> None:
    w = watched(tmp_path, ranks=1)
    memories = lanes(w)
    mean = random(SECTION.elements, 2)
    push(memories, [mean], 1, scale=2.0)
    for memory in memories:
        for key, state in memory.blocks.items():
            b = state.block
            state.output[:] = (2 * mean[b.start : b.start + b.elements]).tobytes()
            slots.commit_output(state.arena, state.slot, 1, 0, 0)
            state.record["spec"] = spec.encode()
            if b.owner == 0 and spec != "none":
                memory.begin_states(key, 1, (0, 1), True, StateUse(b.elements, True, 7))[1][:] = 6.0
                memory.flip(key, 1, 1, True)
    with Peek(w) as peek:
        told = 0
        for tensor in peek.tensors:
            owners = {p.block.block.owner for p in tensor.pieces}
            reading = peek.read(tensor)
            assert reading is not None
            start = 0 if tensor.name == "a" else 150_000
            wanted = mean[start : start + tensor.elements]
            if spec == "none":
                assert reading.outcome is not None
                np.testing.assert_array_equal(reading.outcome, wanted)
            elif owners == {0}:
                assert reading.outcome is not None
                np.testing.assert_allclose(reading.outcome, wanted + 3.0, rtol=1e-6)  # 6 over two ranks
            else:
                assert reading.outcome is None
            told += reading.outcome is not None
        assert told == (2 if spec == "none" else 1)


@pytest.mark.parametrize(("dtype", "code"), [(np.float16, DType.F16), (np.uint16, DType.BF16)])
def test_narrow_types_are_read_as_float32(tmp_path: Path, dtype: type, code: DType) -> None:
    section = Section(0, (TensorSpec("h", (1000,), int(code)),))
    w = watched(tmp_path, (section,), ranks=1)
    memories = lanes(w)
    values = random(1000, 3)
    raw = values.astype(np.float16) if code is DType.F16 else (values.view(np.uint32) >> 16).astype(np.uint16)
    push(memories, [raw], 1)
    wide = raw.astype(np.float32) if code is DType.F16 else (raw.astype(np.uint32) << 16).view(np.float32)
    with Peek(w) as peek:
        np.testing.assert_array_equal(read(peek, "h"), wide)


def test_integers_are_not_gradients(tmp_path: Path) -> None:
    section = Section(1, (TensorSpec("i", (10,), int(DType.I64)),))
    w = watched(tmp_path, (SECTION, section))
    lanes(w)
    with Peek(w) as peek:
        assert [t.name for t in peek.tensors] == ["a", "b"]


def test_reading_changes_no_byte_and_no_time(tmp_path: Path) -> None:
    w = watched(tmp_path)
    memories = lanes(w)
    push(memories, [random(SECTION.elements, rank) for rank in range(2)], 1)
    for memory in memories:
        for key, state in memory.blocks.items():
            memory.begin_states(key, 1, (0, 1), False, StateUse(state.block.elements, True, 7))

    def look() -> dict[str, tuple[int, int, bytes]]:
        found = {}
        for path in tmp_path.rglob("*"):
            status = path.stat()
            found[str(path)] = (status.st_mtime_ns, status.st_size, path.read_bytes() if path.is_file() else b"")
        return found

    before = look()
    assert len(before) > 8
    with Peek(w) as peek:
        for tensor in peek.tensors:
            assert peek.read(tensor) is not None
        for piece in peek.tensors[0].pieces:
            assert piece.block.arena.readonly
    assert look() == before


def test_a_job_that_is_not_there_is_said_so_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(JobGone, match="has ended"):
        Peek(watched(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_job_that_ends_while_it_is_read(tmp_path: Path) -> None:
    w = watched(tmp_path)
    memories = lanes(w)
    push(memories, [random(SECTION.elements, rank) for rank in range(2)], 1)
    with Peek(w) as peek:
        shutil.rmtree(tmp_path / "jobs")
        # what is mapped stays readable; what has to be opened does not
        assert peek.read(peek.tensors[0]) is not None
        with pytest.raises(JobGone, match="has ended"):
            peek.alive()
        for memory in memories:
            for state in memory.blocks.values():
                state.record["residual_at"] = 1 << 48
        with pytest.raises(JobGone, match="heap0"):
            peek.read(peek.tensors[0])


def test_another_layout_is_refused(tmp_path: Path) -> None:
    w = watched(tmp_path)
    lanes(w)
    other = Section(0, (TensorSpec("a", (300, 500), 0), TensorSpec("b", (1_000_000,), 0)))
    with pytest.raises(PeekError, match="expected"):
        Peek(watched(tmp_path, (other,)))
    with pytest.raises(PeekError, match="expected header"):
        Peek(watched(tmp_path, ranks=1))
