"""The level at which a segment is sent as it is: what a plan leaves out of a compressed block loses nothing.

What may live here: tests of `Codec.exact` over all codecs that have one. What may not: other levels.
"""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.codecs import parse
from gcserver.codecs.base import CodecError
from gcserver.codecs.registry import BY_NAME, names
from tests.unit.codecs.sparse_cases import run

MILLION = 1_000_000
RATIOS = ["topk", "dgc", "randomk", "redsync", "gaussiank", "sidco-e", "sidco-gp", "sidco-p"]


def test_the_codecs_of_ratios_are_known() -> None:
    exact = {n for n in names() if BY_NAME[n].exact == MILLION}
    assert exact == set(RATIOS) and {n for n in exact if BY_NAME[n].tunable} == exact - {"randomk"}


@pytest.mark.parametrize("name", RATIOS)
@pytest.mark.parametrize("n", [1, 7, 5000, 40_000])
def test_a_segment_at_a_ratio_of_one_leaves_no_residual(name: str, n: int) -> None:
    """Whatever its values, what was held back included; its neighbour keeps the codec's own level."""
    codec, bounds = parse(f"{name}(ratio=0.01)"), np.array([0, n, n + 20_000])
    levels = np.array([MILLION, 10_000], np.uint32)
    rng = np.random.default_rng(n)
    for kind in ("normal", "equal", "sparse"):
        x = rng.standard_normal(n + 20_000).astype(np.float32)
        if kind == "equal":
            x[:] = 2.0
        elif kind == "sparse":
            x[rng.random(x.size) < 0.9] = 0.0
        held = rng.standard_normal(x.size).astype(np.float32)
        state = np.zeros(codec.state_floats(x.size, 2), np.float32)
        state[: x.size] = held
        result, payload, new = run(codec, x, None, bounds, seed=3, levels=levels, state=state)
        decoded = np.empty_like(x)
        codec.decode(np.frombuffer(payload, np.uint8), decoded)
        assert result.nonfinite == 0
        assert np.array_equal(decoded[:n], (x + held)[:n]) and not new[:n].any()
        assert np.count_nonzero(decoded[n:]) < 10_000


def test_a_matrix_can_be_sent_whole_at_any_rank() -> None:
    codec, shapes = parse("powersgd(rank=4)"), [(80, 60), (80, 60), (30, 0)]
    whole = np.array([codec.exact, 1, 2], np.uint32)
    assert codec.payload_floats(0, shapes, whole) == 80 * 60 + 80 + 30
    assert codec.payload_floats(1, shapes, whole) == 60
    assert codec.payload_range(0, shapes) == (80 + 80 + 30, 2 * 80 * 60 + 30)
    assert codec.payload_range(1, shapes) == (0, 2 * 80 * 60 + 30)
    with pytest.raises(CodecError, match="ranks up to the codec's, 4, or 65 for what is sent whole, one a segment"):
        codec.payload_floats(0, shapes, np.array([64, 1, 2], np.uint32))
