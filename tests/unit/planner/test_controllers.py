"""Controllers by name: texts that come back, what is refused, the bounds that notches give.

What may live here: tests of `gcserver/planner/controllers.py`. What may not: the laws (`test_dc2.py`).
"""

from __future__ import annotations

import pytest

from gcserver.planner import controllers
from gcserver.planner.dc2 import Dc2Config
from gcserver.planner.dc2_monitor import Dc2Error


@pytest.mark.parametrize("text", [*controllers.NAMES, "dc2-da5(k_min=0.001,k_max=0.123456789,start=0.1)"])
def test_a_text_reads_back_as_itself(text: str) -> None:
    assert controllers.read(text).text == text and not controllers.unusable(text)


def test_names_and_parameters_in_any_form_are_the_same_controller() -> None:
    asked = controllers.controlled("dc2-da2", {"start": 0.05, "k_max": 0.2})
    assert controllers.read(" dc2-da2( start = 5e-2 , k_max=.2) ") == asked
    assert (asked.text, asked.law) == ("dc2-da2(k_max=0.2,start=0.05)", "DA2")
    assert controllers.read("none").law is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("da2", "a controller is one of none, dc2-da1, dc2-da2, dc2-da3, dc2-da4, dc2-da5, got 'da2'"),
        ("", "a controller is one of none"),
        ("dc2-da2(k_max=0.2", "as dc2-da2(k_min=0.01,k_max=0.2), got"),
        ("dc2-da2(gain=2)", "dc2-da2 takes k_min, k_max, start, got 'gain'"),
        ("none(k_max=0.2)", "none takes no parameters, got 'k_max'"),
        ("dc2-da2(k_max=much)", "dc2-da2: expected parameter=number such as k_max=0.2, got 'k_max=much'"),
        ("dc2-da2(k_max=2)", "k_max must be in [k_min = 0.005, 1], got 2.0"),
        ("dc2-da2(k_max=nan)", "k_max must be"),
        ("dc2-da2(start=0.5)", "start must be in [k_min, k_max] = [0.005, 0.3], got 0.5"),
    ],
)
def test_what_is_accepted_is_said(text: str, said: str) -> None:
    with pytest.raises(Dc2Error) as refused:
        controllers.read(text)
    assert said in str(refused.value) and controllers.unusable(text) == str(refused.value)


def test_the_first_ratio_stays_within_bounds_that_leave_it_out() -> None:
    assert controllers.read("dc2-da1").config() == Dc2Config()
    assert controllers.read("dc2-da1(k_max=0.05)").config().start == 0.05
    assert controllers.read("dc2-da1(k_min=0.2)").config().start == 0.2


@pytest.mark.parametrize(
    ("text", "ratios", "bounds"),
    [
        ("dc2-da2", (0.5, 0.25, 0.02), (0.02, 0.5, 0.1)),
        ("dc2-da2(k_max=0.3,start=0.3)", (0.5, 0.25, 0.02), (0.02, 0.3, 0.3)),
        ("dc2-da2(k_min=0.2,k_max=0.3)", (0.05, 0.01), (0.05, 0.05, 0.05)),
        ("dc2-da2(k_min=0.001,k_max=0.002,start=0.001)", (0.05, 0.01), (0.01, 0.01, 0.01)),
        ("dc2-da2", (1.2, 0.4), (0.4, 1.0, 0.4)),
    ],
)
def test_notches_bound_the_ratio(text: str, ratios: tuple[float, ...], bounds: tuple[float, float, float]) -> None:
    config = controllers.read(text).config(ratios)
    assert (config.k_min, config.k_max, config.start) == bounds


@pytest.mark.parametrize(
    ("text", "least", "bounds"),
    [
        ("dc2-da2", 0.01, (0.01, 0.3, 0.1)),
        ("dc2-da2", 0.2, (0.2, 0.3, 0.2)),
        ("dc2-da2(k_min=0.05,k_max=0.1)", 0.01, (0.05, 0.1, 0.1)),
        ("dc2-da2(k_max=0.02)", 0.05, (0.05, 0.05, 0.05)),
    ],
)
def test_a_plan_without_notches_bounds_the_ratio_from_below(
    text: str, least: float, bounds: tuple[float, float, float]
) -> None:
    config = controllers.read(text).config((), least)
    assert (config.k_min, config.k_max, config.start) == bounds
