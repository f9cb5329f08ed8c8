"""Nothing compiles in a job's first plan once warmup has run."""

from __future__ import annotations

import numpy as np

from gcserver.planner.auto import Wish, compose
from gcserver.planner.errors_quantised import qsgd_errors
from gcserver.planner.warmup import KERNELS, warmup
from tests.unit.planner.live_profiles import GBIT1, MBIT100, gpt, with_errors


def test_a_plan_compiles_nothing_after_warmup() -> None:
    warmup()
    assert not warmup()
    before = [len(kernel.signatures) for kernel in KERNELS]
    assert all(before)
    for profile in (gpt(2, MBIT100), with_errors(gpt(9, GBIT1), "topk", "qsgd")):
        compose(profile, Wish(quality="safe"))
    qsgd_errors(np.ones((3, 5), np.float32), np.arange(2, 9, dtype=np.int64), bucket=64, kind="l2")
    assert [len(kernel.signatures) for kernel in KERNELS] == before
