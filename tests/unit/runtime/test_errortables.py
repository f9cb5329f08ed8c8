"""Tables of what each level would lose, from samples of a domain's memory.

What may live here: tests of `gcserver/runtime/errortables.py`. What may not: the arithmetic of a family's errors
(`planner/test_errors_*.py`).
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from gcproto import slots
from gcproto.manifest import Section, TensorSpec
from gcserver.planner.errors_lowrank import lowrank_errors
from gcserver.planner.errors_quantised import qsgd_errors
from gcserver.planner.errors_sparse import sparse_bytes, sparse_errors
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.errortables import AREA, LEVELS, ROWS, SPOTS, WIDE, ErrorTables, _errors, _look
from gcserver.runtime.peek import JobGone, Peek, Watched
from tests.unit.runtime.test_peek import lanes, push, random, watched

SMALL = Section(0, (TensorSpec("m", (128, 200), 0), TensorSpec("v", (5000,), 0)))
FAMILIES = {"topk", "sidco", "qsgd", "powersgd"}


def outputs(memories: list[DomainMemory], values: np.ndarray, step: int) -> None:
    for memory in memories:
        for state in memory.blocks.values():
            b = state.block
            state.output[:] = values[b.start : b.start + b.elements].tobytes()
            state.record["spec"] = b"none"
            slots.commit_output(state.arena, state.slot, step, 0, 0)


def job(tmp_path: Path, section: Section = SMALL) -> tuple[Watched, list[DomainMemory]]:
    w = watched(tmp_path, (section,), ranks=1)
    return w, lanes(w)


def test_errors_are_the_planners_with_the_owners_added(tmp_path: Path) -> None:
    w, memories = job(tmp_path)
    gradient, mean = random(SMALL.elements, 1), random(SMALL.elements, 2)
    push(memories, [gradient], 1)
    outputs(memories, mean, 1)
    with Peek(w) as peek:
        tables = ErrorTables(peek)
        assert tables.sample(60.0) == 2
        found = tables.tables()
    assert set(found) == FAMILIES
    m, v = slice(0, 128 * 200), slice(128 * 200, None)
    for row, part in zip(found["topk"], (m, v), strict=True):
        wanted = sparse_errors(gradient[part], LEVELS["topk"]) + sparse_errors(mean[part], LEVELS["topk"])
        np.testing.assert_allclose(row.errors, wanted, rtol=1e-6)
        np.testing.assert_array_equal(row.sizes, sparse_bytes(gradient[part].size, LEVELS["topk"]))
    wanted = qsgd_errors(gradient[m], LEVELS["qsgd"]) + qsgd_errors(mean[m], LEVELS["qsgd"])
    np.testing.assert_allclose(found["qsgd"][0].errors, wanted, rtol=1e-6)
    # sums of powersgd are not compressed again
    wanted = lowrank_errors(gradient[m].reshape(128, 200), LEVELS["powersgd"])
    np.testing.assert_allclose(found["powersgd"][0].errors, wanted, rtol=1e-6)
    assert [row.name for row in found["powersgd"]] == ["m", "v"]


def test_samples_count_by_the_mean_of_their_squares_and_broken_ones_not_at_all(tmp_path: Path) -> None:
    w, memories = job(tmp_path)
    gradient = random(SMALL.elements, 1)
    with Peek(w) as peek:
        tables = ErrorTables(peek, {"topk": LEVELS["topk"]})
        for step, factor in enumerate((3.0, np.nan, 4.0), 1):
            push(memories, [gradient * np.float32(factor)], step)
            tables.sample(60.0)
        (row, _) = tables.tables()["topk"]
    wanted = sparse_errors(gradient[: 128 * 200], LEVELS["topk"]) * np.sqrt(12.5)
    np.testing.assert_allclose(row.errors, wanted, rtol=1e-5)


def test_an_owner_elsewhere_is_taken_to_lose_as_much_as_others(tmp_path: Path) -> None:
    w, memories = job(tmp_path)
    gradient = random(SMALL.elements, 1)
    push(memories, [gradient], 1)
    outputs(memories, gradient, 1)
    with Peek(w) as peek:
        exact = ErrorTables(peek, {"topk": LEVELS["topk"]})
        exact.sample(60.0)
        guessed = ErrorTables(peek, {"topk": LEVELS["topk"]})
        guessed.sample(60.0)
        guessed._sums["topk", "v"].owned_samples = 0
        np.testing.assert_allclose(guessed.tables()["topk"][1].errors, exact.tables()["topk"][1].errors, rtol=1e-6)


def test_large_tensors_are_looked_at_in_part_and_give_nearly_the_same(tmp_path: Path) -> None:
    rows, cols = 3000, 512
    section = Section(0, (TensorSpec("big", (rows, cols), 0),))
    w, memories = job(tmp_path, section)
    # columns of different size, which a stride that shares a factor with a row's length would misjudge
    low = random(rows * 4, 3).reshape(rows, 4) @ random(4 * cols, 4).reshape(4, cols)
    gradient = ((low + random(rows * cols, 5).reshape(rows, cols)) * np.linspace(0.1, 3.0, cols)).astype(np.float32)
    assert gradient.size > SPOTS
    push(memories, [gradient.reshape(-1)], 1)
    with Peek(w) as peek:
        tables = ErrorTables(peek)
        tables.sample(60.0)
        found = tables.tables()
        looks = tables._looks
    assert looks["topk", "big"].picks.size <= SPOTS and looks["qsgd", "big"].picks.size <= SPOTS
    flat = gradient.reshape(-1)
    np.testing.assert_allclose(found["topk"][0].errors, sparse_errors(flat, LEVELS["topk"]), rtol=0.02)
    np.testing.assert_allclose(found["qsgd"][0].errors, qsgd_errors(flat, LEVELS["qsgd"]), rtol=0.02)
    np.testing.assert_allclose(found["powersgd"][0].errors, lowrank_errors(gradient, LEVELS["powersgd"]), rtol=0.05)


def test_a_sample_that_runs_out_of_time_goes_on_with_the_next_tensor(tmp_path: Path) -> None:
    w, memories = job(tmp_path)
    push(memories, [random(SMALL.elements, 1)], 1)
    with Peek(w) as peek:
        tables = ErrorTables(peek, {"topk": LEVELS["topk"]})
        assert tables.sample(0.0) == 1
        assert [row.name for row in tables.tables()["topk"]] == ["m"]
        assert tables.sample(0.0) == 1
        assert [row.name for row in tables.tables()["topk"]] == ["m", "v"]


def test_nothing_pushed_gives_no_table_and_an_ended_job_an_error(tmp_path: Path) -> None:
    w, _ = job(tmp_path)
    with Peek(w) as peek:
        tables = ErrorTables(peek)
        tables.sample(60.0)
        assert tables.tables() == {}
        shutil.rmtree(tmp_path / "jobs")
        with pytest.raises(JobGone):
            tables.sample(60.0)


def test_a_sample_waits_for_busy_cores_only_so_long(tmp_path: Path) -> None:
    w, memories = job(tmp_path)
    push(memories, [random(SMALL.elements, 1)], 1)
    passed = iter(range(0, 1000, 5))
    with Peek(w) as peek:
        tables = ErrorTables(peek, {"topk": LEVELS["topk"]}, clock=lambda: 0.0, wall=lambda: float(next(passed)))
        assert tables.sample(1.0) == 1, "5 s passed and no CPU time"


@pytest.mark.parametrize("shape", [(8, 5_000_000), (128, 4096, 1024), (50_257, 768), (4096, 16_384)])
def test_of_a_matrix_low_rank_looks_at_no_more_than_it_must_whatever_its_rows_are(shape: tuple[int, ...]) -> None:
    """Experts' weights, say, are few rows of millions: they were read whole, and cost several times that."""
    look, n = _look("powersgd", shape), math.prod(shape)
    assert look.picks is not None and AREA // 4 < look.picks.size <= WIDE
    assert look.picks.size == math.prod(look.shape) and look.factor * look.picks.size == pytest.approx(n)
    rows = look.picks.reshape(look.shape) // (n // shape[0])
    assert (rows == rows[:, :1]).all() and rows[0, 0] == 0 and (np.diff(look.picks) > 0).all() and look.picks[-1] < n


def test_of_vectors_low_rank_looks_at_a_few_elements() -> None:
    """It loses nothing of them. A flat shard of gigabytes was copied three times to find that out."""
    look = _look("powersgd", (1 << 28,))
    assert look.picks is not None and look.picks.size == ROWS and look.factor * ROWS == 1 << 28
    assert not _errors("powersgd", np.ones(look.shape, np.float32), np.array([1, 4])).any()
    for shape in ((), (3,)):
        few = _look("powersgd", shape).picks
        assert few is not None and few.tolist() == list(range(max((1, *shape))))
