"""DC2's laws step by step, Table I, guards, state, and the order of mean ratios the paper measured."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from benchmarks import dc2 as bench
from gcserver.planner.dc2 import LAWS, Controller, ControllerState, Dc2Config, Law, next_ratio
from gcserver.planner.dc2_link import Played, RateProfile
from gcserver.planner.dc2_monitor import Dc2Error, Delays

#: DA1's and DA2's band is 0.05 of d - m; DA5's slack is 1.25
HIGH = Delays(last=3.0, least=1.0, mean=2.0, rise=0.1, samples=99)
LOW = Delays(last=1.5, least=1.0, mean=2.0, rise=-0.1, samples=99)
EVEN = Delays(last=2.0, least=1.0, mean=2.0, rise=0.0, samples=99)


def test_the_defaults_are_table_i() -> None:
    c = Dc2Config()
    assert (c.dvar, c.k_inc, c.k_dec, c.k_max, c.k_min, c.alpha, c.beta) == (0.05, 0.005, 0.005, 0.3, 0.005, 1.25, 0.8)
    assert c.window == 50


@pytest.mark.parametrize(
    ("law", "delays", "ratio"),
    [
        ("DA1", HIGH, 0.1 * (1 - 1 / 2)),
        ("DA1", LOW, 0.1 * (1 + 0.5 / 0.5)),
        ("DA1", EVEN, 0.1),
        ("DA2", HIGH, 0.05),
        ("DA2", LOW, 0.105),
        ("DA2", EVEN, 0.1),
        ("DA3", HIGH, 0.095),
        ("DA3", LOW, 0.105),
        ("DA3", EVEN, 0.1),
        ("DA4", HIGH, 0.1 * (1 - 0.8 * 0.1)),
        ("DA4", LOW, 0.105),
        ("DA4", EVEN, 0.1),
        ("DA5", dataclasses.replace(HIGH, last=1.2), 0.105),  # under alpha * m
        ("DA5", HIGH, 0.1 * (1 - 0.8 * 0.5 / 1.75)),  # over alpha * a
        ("DA5", LOW, 0.105),  # between, falling
        ("DA5", dataclasses.replace(EVEN, rise=0.05), 0.1 * (1 - 0.8 * 0.05)),  # between, rising
    ],
)
def test_each_law_by_hand(law: Law, delays: Delays, ratio: float) -> None:
    assert next_ratio(law, 0.1, delays, Dc2Config()) == pytest.approx(ratio)


@pytest.mark.parametrize("law", ["DA2", "DA3"])
def test_inside_the_band_nothing_changes_and_far_below_it_the_ratio_rises(law: Law) -> None:
    """As printed, (a - d) / (d - m) < dvar would do the opposite of both."""
    inside = dataclasses.replace(EVEN, last=1.98)
    assert next_ratio(law, 0.1, inside, Dc2Config()) == 0.1
    assert next_ratio(law, 0.1, dataclasses.replace(EVEN, last=1.01), Dc2Config()) > 0.1


@pytest.mark.parametrize("law", LAWS)
def test_a_first_sample_and_a_network_without_delay_hold_the_ratio(law: Law) -> None:
    controller = Controller(law)
    assert controller.on_step(3.0, 0.0, 100) == 0.1
    silent = Controller(law)
    assert [silent.on_step(0.5, 0.5, 100) for _ in range(5)] == [0.1] * 5
    assert silent.on_step(2.0, 0.0, 100) == 0.1, "the first delay there is"
    assert next_ratio(law, 0.1, dataclasses.replace(LOW, last=0.0), Dc2Config()) == 0.1


@pytest.mark.parametrize("law", LAWS)
def test_a_new_least_delay_divides_by_nothing(law: Law) -> None:
    controller = Controller(law)
    for delay in (2.0, 2.0, 1.0, 0.5):
        ratio = controller.on_step(delay, 0.0, 100)
    assert 0.1 < ratio <= 0.3


@pytest.mark.parametrize("law", ["DA4", "DA5"])
def test_a_steep_rise_ends_at_the_lower_bound(law: Law) -> None:
    steep = Delays(last=2.0, least=1.0, mean=2.0, rise=5.0, samples=99)
    assert next_ratio(law, 0.1, steep, Dc2Config()) == 0.005


def test_nodes_decide_apart() -> None:
    slow, fast = Controller("DA2"), Controller("DA2")
    for step in range(60):
        slow.on_step(0.1 if step < 50 else 1.0, 0.0, 100)
        fast.on_step(0.1, 0.0, 100)
    assert slow.ratio < fast.ratio == 0.1


@pytest.mark.parametrize("law", LAWS)
def test_a_slow_worker_is_not_taken_for_a_slow_network(law: Law) -> None:
    rng = np.random.default_rng(3)
    delays = rng.integers(1, 64, 300) / 64
    skews = rng.integers(0, 640, 300) / 64  # up to ten times the delay, and exact in binary
    calm, disturbed = Controller(law), Controller(law)
    for delay, skew in zip(delays.tolist(), skews.tolist(), strict=True):
        assert disturbed.on_step(delay + skew, skew, 1000) == calm.on_step(delay, 0.0, 1000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k_min": 0.0}, "k_min must be in"),
        ({"k_max": 0.001}, "k_max must be in .k_min = 0.005"),
        ({"start": 0.5}, "start must be in .*0.3.*got 0.5"),
        ({"alpha": 0.9}, "alpha must be at least 1, got 0.9"),
        ({"beta": 0.0}, "beta"),
        ({"window": 0}, "window"),
        ({"age": 50}, "age must be at least window . 1 = 51"),
        ({"dvar": -1.0}, "dvar"),
        ({"k_inc": 0.0}, "k_inc"),
        ({"k_dec": 2.0}, "k_dec"),
        ({"gain": float("nan")}, "gain"),
        ({"floor": 0.0}, "floor"),
    ],
)
def test_bad_parameters_are_refused_by_name(change: dict[str, float], said: str) -> None:
    with pytest.raises(Dc2Error, match=said):
        Dc2Config(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("law", LAWS)
def test_a_saved_controller_goes_on_where_it_was(law: Law) -> None:
    delays = np.random.default_rng(5).uniform(0.1, 2.0, 400).tolist()
    whole, first = Controller(law), Controller(law)
    for delay in delays[:200]:
        first.on_step(delay, 0.01, 1000)
    saved = msgspec.msgpack.encode(first.state)
    second = Controller(law, state=msgspec.msgpack.decode(saved, type=ControllerState))
    assert [second.on_step(d, 0.01, 1000) for d in delays[200:]] == [whole.on_step(d, 0.01, 1000) for d in delays][200:]


def test_another_laws_state_is_refused() -> None:
    with pytest.raises(Dc2Error, match="that of DA2"):
        Controller("DA3", state=Controller("DA2").state)
    with pytest.raises(Dc2Error, match=r"with 0\.1"):
        Controller("DA2", Dc2Config(k_max=0.05, start=0.05), Controller("DA2").state)
    with pytest.raises(Dc2Error, match=r"one of DA1, DA2.*got 'DA9'"):
        Controller("DA9")  # type: ignore[arg-type]


def in_bounds(played: Played) -> bool:
    return bool(((played.ratios >= 0.005) & (played.ratios <= 0.3)).all())


@pytest.fixture(scope="module")
def runs() -> dict[str, Played]:
    """All laws on one seeded profile, as many steps as the paper's CIFAR-10 runs have."""
    return {law: bench.run(law, bench.profiles(1, 2, apart=False), 2700, 1) for law in LAWS}


def test_the_mean_ratios_are_in_the_papers_order(runs: dict[str, Played]) -> None:
    mean = {law: float(played.ratios.mean()) for law, played in runs.items()}
    assert mean["DA2"] < min(mean["DA4"], mean["DA5"]) and max(mean["DA4"], mean["DA5"]) < mean["DA3"]


def test_the_benchmark_judges_the_order_of_each_seed() -> None:
    def rows(**ratios: float) -> list[bench.Row]:
        return [{"system": law, "seed": 1, "ratio_mean": ratio} for law, ratio in ratios.items()]

    good = rows(DA1=0.5, DA2=0.1, DA3=0.4, DA4=0.3, DA5=0.2)
    assert bench.verdict([*good, {"system": "DA2", "seed": 2, "ratio_mean": 9.0}], 1).met
    assert "DA2 < DA4 and DA5 < DA3" in str(bench.verdict(good, 1))
    assert not bench.verdict(rows(DA2=0.1, DA3=0.4, DA4=0.3, DA5=0.5), 1).met


def test_da1_oscillates(runs: dict[str, Played]) -> None:
    turned = {law: bench.turns(played.ratios) for law, played in runs.items()}
    assert turned.pop("DA1") > 1.5 * max(turned.values())


def test_all_stay_in_bounds_and_da2_and_da5_beat_the_moderate_uniform_ratio(runs: dict[str, Played]) -> None:
    assert all(in_bounds(played) for played in runs.values())
    uniform = bench.run("0.1", bench.profiles(1, 2, apart=False), 2700, 1)
    for law in ("DA2", "DA5"):
        assert runs[law].seconds < uniform.seconds
        assert np.quantile(runs[law].delays, 0.95) < np.quantile(uniform.delays, 0.95)


def test_on_a_static_link_no_law_leaves_its_bounds_or_waits_longer_than_no_compression() -> None:
    links = [RateProfile(0, bench.GIGABIT, levels=(1.0,))] * 2
    dense = bench.run("none", links, 600, 0)
    for law in LAWS:
        played = bench.run(law, links, 600, 0)
        assert in_bounds(played) and played.seconds < dense.seconds
