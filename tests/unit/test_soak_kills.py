"""The drawing of kills: shared among codecs, within the training, the same for a seed."""

from __future__ import annotations

import pytest

from gcserver.codecs import names, parse
from tests.integration.codec_rates import RATES
from tests.soak.kills import EDGE, NODES, SPREAD, WHAT, draw


def test_every_codec_of_the_registry_gets_its_share() -> None:
    trials = draw(1, 200, list(RATES))
    assert {parse(t.spec).name for t in trials} == set(names())
    assert sum(len(t.kills) for t in trials) == 200
    assert {len(t.kills) for t in trials} <= {200 // len(RATES), 200 // len(RATES) + 1}


def test_kills_are_spread_over_the_training() -> None:
    kills = []
    for t in draw(5, 300, list(RATES)):
        steps = [k.step for k in t.kills]
        assert steps == sorted(set(steps)) and steps[0] >= EDGE and steps[-1] < t.steps - EDGE
        kills += t.kills
    assert {k.what for k in kills} == set(WHAT)
    assert {k.node for k in kills} == set(range(NODES))
    assert all(0.0 <= k.delay <= SPREAD for k in kills)
    assert len({k.delay for k in kills}) == len(kills)


def test_a_seed_gives_the_same_kills() -> None:
    def plan(seed: int) -> list[object]:
        return [(t.spec, t.kills, t.steps) for t in draw(seed, 40, ["none", "onebit"])]

    assert plan(3) == plan(3) != plan(4)


def test_fewer_kills_than_codecs_leave_some_out() -> None:
    some = [[t.spec for t in draw(seed, 2, ["none", "fp16", "onebit"])] for seed in range(20)]
    assert {tuple(specs) for specs in some} == {("none", "fp16"), ("none", "onebit"), ("fp16", "onebit")}
    assert all(len(t.kills) == 1 for t in draw(1, 2, ["none", "fp16", "onebit"]))
    for kills, specs in ((0, ["none"]), (3, [])):
        with pytest.raises(ValueError, match="at least one"):
            draw(1, kills, specs)
