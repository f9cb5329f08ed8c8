"""Fitted costs: exact without noise, near with it, unmoved by outliers, never negative; what cannot be fitted."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.planner.fit import AffineCost, FitError, fit_affine

SIZES = np.repeat([1e3, 3e4, 1e5, 7e5, 2e6, 1e7], 12)


def test_a_cost_is_a_base_and_a_slope() -> None:
    cost = AffineCost(0.002, 1e-9)
    assert cost(1_000_000) == pytest.approx(0.003)


@pytest.mark.parametrize("parts", [(-1e-9, 0.0), (0.0, -1.0), (float("nan"), 0.0), (0.0, float("inf"))])
def test_a_cost_is_never_negative(parts: tuple[float, float]) -> None:
    with pytest.raises(FitError, match="from 0 on"):
        AffineCost(*parts)


def test_without_noise_the_fit_is_exact() -> None:
    fit = fit_affine(SIZES, 3e-4 + 2e-9 * SIZES)
    assert fit.cost.base == pytest.approx(3e-4, rel=1e-9) and fit.cost.per_element == pytest.approx(2e-9, rel=1e-9)
    assert fit.samples == SIZES.size and fit.noise < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_averaged_out_and_measured(seed: int) -> None:
    noise = 1.0 + 0.05 * np.random.default_rng(seed).standard_normal(SIZES.size)
    fit = fit_affine(SIZES, (3e-4 + 2e-9 * SIZES) * noise)
    assert fit.cost.base == pytest.approx(3e-4, rel=0.05) and fit.cost.per_element == pytest.approx(2e-9, rel=0.05)
    assert 0.03 < fit.noise < 0.07


@pytest.mark.parametrize("seed", range(5))
def test_a_quarter_of_disturbed_samples_changes_little(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = (3e-4 + 2e-9 * SIZES) * (1.0 + 0.02 * rng.standard_normal(SIZES.size))
    seconds[rng.permutation(SIZES.size)[: SIZES.size // 4]] *= rng.uniform(5, 50, SIZES.size // 4)
    fit = fit_affine(SIZES, seconds)
    assert fit.cost.base == pytest.approx(3e-4, rel=0.05) and fit.cost.per_element == pytest.approx(2e-9, rel=0.05)


def test_what_would_fall_with_size_is_constant_and_what_would_begin_below_zero_begins_at_zero() -> None:
    falling = fit_affine([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]).cost
    assert falling.per_element == 0.0 and 1.0 <= falling.base <= 3.0
    below = fit_affine([1.0, 2.0, 3.0], [0.5, 3.0, 5.5]).cost
    assert below.base == 0.0 and 0.5 <= below.per_element <= 2.0


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ([1.0, 2.0], [1.0], "2 sizes and 1 times"),
        ([5.0, 5.0], [1.0, 1.1], "measure groups of other sizes"),
        ([], [], "two different sizes"),
        ([0.0, 1.0], [1.0, 1.0], "sizes that are finite"),
        ([1.0, 2.0], [1.0, float("nan")], "times that are finite"),
    ],
)
def test_what_cannot_be_fitted_is_refused(sizes: list[float], seconds: list[float], said: str) -> None:
    with pytest.raises(FitError, match=said):
        fit_affine(sizes, seconds)
