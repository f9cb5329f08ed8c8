"""Properties of DC2: bounds whatever is measured, no answer to scale, state that is all there is."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gcserver.planner.dc2 import LAWS, Controller, ControllerState, Dc2Config

#: zeros and repeated values for d = m, the rest anywhere a clock may put it
delays = st.sampled_from([0.0, 1e-9, 0.5, 0.5, 1.0]) | st.floats(0, 1e6)
grid = st.integers(0, 4096).map(lambda i: i / 1024)
samples = st.lists(st.tuples(delays, delays, st.integers(0, 1 << 40)), max_size=60)
laws = st.sampled_from(LAWS)
configs = st.builds(
    lambda window, more, by_payload, low, start, high: Dc2Config(
        window=window, age=window + 1 + more, by_payload=by_payload, k_min=low, start=low + start,
        k_max=low + start + high,
    ),
    st.integers(1, 10), st.integers(0, 30), st.booleans(), st.floats(1e-4, 0.1), st.floats(0, 0.1), st.floats(0, 0.5),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(law=laws, config=configs, measured=samples)
def test_the_ratio_stays_in_bounds_whatever_is_measured(law: str, config: Dc2Config, measured: list) -> None:
    controller = Controller(law, config)
    for sample in measured:
        assert config.k_min <= controller.on_step(*sample) <= config.k_max


@settings(max_examples=100, deadline=None)
@given(
    law=laws, config=configs, measured=st.lists(st.tuples(grid, grid, st.integers(0, 99))), power=st.integers(-10, 20)
)
def test_a_clock_of_another_unit_changes_nothing(law: str, config: Dc2Config, measured: list, power: int) -> None:
    """Powers of two, so that not even rounding differs, and nothing below a nanosecond."""
    unit = 2.0**power
    seconds, ticks = Controller(law, config), Controller(law, config)
    for delay, skew, payload in measured:
        assert seconds.on_step(delay, skew, payload) == ticks.on_step(delay * unit, skew * unit, payload)


@settings(max_examples=100, deadline=None)
@given(law=laws, config=configs, before=samples, after=samples)
def test_what_is_saved_is_all_there_is(law: str, config: Dc2Config, before: list, after: list) -> None:
    first = Controller(law, config)
    for sample in before:
        first.on_step(*sample)
    saved = msgspec.json.encode(first.state)
    second = Controller(law, config, msgspec.json.decode(saved, type=ControllerState))
    assert [first.on_step(*s) for s in after] == [second.on_step(*s) for s in after]
    assert first.state == second.state
