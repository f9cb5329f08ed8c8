"""Errors and bytes of qsgd: expected ones, compared with the codec's over seeds; compiled, compared with Python."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.codecs import parse
from gcserver.planner.errors import TableError
from gcserver.planner.errors_quantised import KINDS, qsgd_bytes, qsgd_errors, qsgd_table, squares
from tests.unit.codecs.stochastic_cases import over_seeds, run

BITS = np.arange(2, 9)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket", [0, 128, 1024])
def test_error_and_bytes_are_those_of_the_codec(bits, kind, bucket):
    n, levels = 3000, np.array([bits])
    x = np.random.default_rng(bits).standard_t(3, n).astype(np.float32)
    codec = parse(f"qsgd(bits={bits},bucket={bucket},kind={kind})")
    lost = ((over_seeds(codec, x, 60) - x) ** 2).sum(axis=1)
    # 60 seeds of 3000 independent roundings: a mean within 3 % of its expectation
    assert np.sqrt(lost.mean()) == pytest.approx(qsgd_errors(x, levels, bucket, kind)[0], rel=0.03)
    assert qsgd_bytes(n, levels, bucket, kind)[0] == len(run(codec, x)[1]) - 4


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("bucket", [0, 64])
def test_compiled_and_python_agree(kind, bucket):
    rng = np.random.default_rng(0)
    steps = 2.0**BITS - 1 if kind == 0 else 2.0 ** (BITS - 1) - 1
    for n in (0, 1, 63, 64, 200):
        for x in (rng.standard_normal(n), np.zeros(n), np.full(n, 3.0), rng.integers(-2, 3, n)):
            x = x.astype(np.float32)
            errors = qsgd_errors(x, BITS, bucket, KINDS[kind])
            assert errors == pytest.approx(np.sqrt(squares(x, steps, bucket, kind)), rel=1e-9, abs=1e-12)


def test_what_lies_on_levels_is_not_lost_and_more_bits_lose_less():
    assert qsgd_errors(np.array([0, 1, 2, 3], np.float32), np.array([2, 4]))[0] == 0
    assert qsgd_errors(np.full(100, 7, np.float32), BITS).tolist() == [0] * 7
    x = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    for kind in KINDS:
        assert (np.diff(qsgd_errors(x, BITS, 1024, kind)) < 0).all()


def test_extremes():
    # a range that the codec gives up on; the largest numbers there are; a gradient that is not finite
    tiny = np.array([0, 1e-38], np.float32)
    assert qsgd_errors(tiny, np.array([4])) == pytest.approx([1e-38], rel=1e-6)
    large = np.array([-3e38, 0, 3e38], np.float32)
    assert np.isfinite(qsgd_errors(large, BITS)).all()
    assert np.isnan(qsgd_errors(np.array([1, np.inf], np.float32), BITS)).all()
    assert qsgd_errors(np.zeros(0, np.float32), BITS).tolist() == [0] * 7
    assert qsgd_bytes(0, BITS).tolist() == [8] * 7


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"levels": np.array([1, 4])}, "levels: expected bits from 2 to 8"),
        ({"bucket": 100}, "bucket: expected 0 or a multiple of 64, got 100"),
        ({"kind": "min"}, "kind: expected maxmin or l2 or max, got min"),
    ],
)
def test_what_the_codec_does_not_do_is_refused(more, said):
    x = np.ones(10, np.float32)
    with pytest.raises(TableError, match=said):
        qsgd_errors(x, **({"levels": BITS} | more))


def test_table():
    gradients = {"a": np.ones((10, 100), np.float32), "b": np.arange(50, dtype=np.float32)}
    table = qsgd_table(gradients, BITS, 4, bucket=64)
    assert table.names == ("a", "b") and table.errors.shape == (2, 7) and table.default.tolist() == [2, 2]
    assert table.sizes[0, 0] == 8 + 8 * 16 + 250 and table.errors[0].tolist() == [0] * 7
