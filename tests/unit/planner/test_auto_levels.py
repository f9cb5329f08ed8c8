"""L-GreCo on a profile: notches, budgets, what keeps the spec's level, what a sparsifier sends whole."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from gcserver.planner import auto_levels
from gcserver.planner.auto_levels import Levels, budgets, choose_levels, overspent
from gcserver.planner.errors_lowrank import lowrank_bytes
from gcserver.planner.families import parse
from gcserver.planner.payload import sparse_payload
from gcserver.planner.profile import Profile
from tests.unit.planner.live_profiles import gpt, with_errors

ALPHAS = budgets(0.6, 5)


def large(profile: Profile) -> list[int]:
    return [i for i, t in enumerate(profile.tensors) if t.elements >= 65_536]


def test_budgets() -> None:
    assert budgets(0.6, 5) == pytest.approx((0.6, 0.7, 0.8, 0.9, 1.0))
    assert budgets(0.6, 1) == (1.0,)


@pytest.mark.parametrize("spec", ["topk(ratio=0.05)", "sidco-e(ratio=0.01)", "qsgd(bits=4)", "powersgd(rank=4)"])
def test_every_notch_keeps_its_budget_and_sends_less_than_the_one_before(spec: str) -> None:
    profile = with_errors(gpt(), "topk", "qsgd", "powersgd")
    every = range(len(profile.tensors))
    found = choose_levels(profile, parse(spec), every, ALPHAS)
    family = {"topk": "topk", "sidco-e": "topk", "qsgd": "qsgd", "powersgd": "powersgd"}[parse(spec).name]
    rows = {row.name: row for row in profile.errors[family]}
    assert found.alphas == tuple(sorted(found.alphas))
    assert found.alphas[-1] == 1.0

    def total(notch: int, what: str) -> float:
        sums = 0.0
        for i in large(profile):
            row = rows[profile.tensors[i].name]
            sums += getattr(row, what)[row.levels.index(found.levels[i][notch])]
        return sums

    e_max = sum(
        rows[profile.tensors[i].name].errors[rows[profile.tensors[i].name].levels.index(parse(spec).level)]
        for i in large(profile)
    )
    sizes = [total(k, "sizes") for k in range(len(found.alphas))]
    assert sizes == sorted(sizes, reverse=True)
    for k, alpha in enumerate(found.alphas):
        assert total(k, "errors") <= alpha * e_max * (1 + 1e-9)


def test_small_tensors_keep_the_level_of_the_spec() -> None:
    profile = with_errors(gpt(), "topk")
    found = choose_levels(profile, parse("topk(ratio=0.01)"), range(len(profile.tensors)), ALPHAS)
    small = set(range(len(profile.tensors))) - set(large(profile))
    assert small
    assert {found.levels[i] for i in small} == {(10_000,) * len(found.alphas)}
    assert len({found.levels[i] for i in large(profile)}) > 1


def test_sizes_follow_the_spec_and_not_the_family() -> None:
    """The same errors and budget, priced by what the packed codec sends."""
    profile = with_errors(gpt(), "topk")
    every = range(len(profile.tensors))
    plain, packed = (
        choose_levels(profile, parse(f"sidco-e(ratio=0.01{form})"), every, (1.0,))
        for form in ("", ",packed=1,values=16")
    )

    def sent(levels: dict[int, tuple[int, ...]]) -> float:
        spec = parse("sidco-e(ratio=0.01,packed=1,values=16)")
        n = {i: profile.tensors[i].elements for i in large(profile)}
        return sum(float(sparse_payload(spec, n[i], np.array(levels[i]))[0]) for i in n)

    assert packed.levels != plain.levels
    # the programme rounds errors, hence the slack
    assert sent(packed.levels) <= sent(plain.levels) * 1.001


@pytest.mark.parametrize(
    ("spec", "least", "most"), [("powersgd(rank=4)", 1, 16), ("powersgd(rank=16,values=16)", 4, 32)]
)
def test_ranks_are_near_the_specs_own(spec: str, least: int, most: int) -> None:
    """Within four times of it, as far as errors are known."""
    profile = with_errors(gpt(), "powersgd")
    found = choose_levels(profile, parse(spec), range(len(profile.tensors)), ALPHAS)
    given = {level for i in large(profile) for level in found.levels[i]}
    assert least <= min(given) < parse(spec).level < max(given) <= most


def test_what_16_bits_save_of_a_rank_they_do_not_save_of_what_is_sent_whole() -> None:
    """From rank 8 on (64, 20) is sent as it is; plans are priced by what the spec sends."""
    shape, level = (64, 20), np.array([8, 16])
    assert [lowrank_bytes(shape, level, width).tolist() for width in (32, 16)] == [
        [4 * 1280, 4 * 1280], [4 * 1280, 4 * 1280]
    ]  # fmt: skip
    assert lowrank_bytes((640, 200), level, 16).tolist() == [2 * 8 * 840, 2 * 16 * 840]
    profile = with_errors(gpt(), "powersgd")
    every = range(len(profile.tensors))
    wide, narrow = (choose_levels(profile, parse(f"powersgd(rank=16{v})"), every, (1.0,)) for v in ("", ",values=16"))

    def sent(levels: dict[int, tuple[int, ...]]) -> float:
        shapes = {i: profile.tensors[i].shape for i in large(profile)}
        return sum(float(lowrank_bytes(shapes[i], np.array(levels[i]), 16)[0]) for i in shapes)

    assert sent(narrow.levels) <= sent(wide.levels) * 1.001


def test_without_errors_one_level_serves_all() -> None:
    found = choose_levels(gpt(), parse("topk(ratio=0.01)"), range(5), ALPHAS)
    assert (found.levels, found.alphas) == ({}, ())
    assert "no errors" in found.reason
    assert found.last(0) == 0
    found = choose_levels(with_errors(gpt(), "qsgd"), parse("fp16"), range(5), ALPHAS)
    assert (found.levels, "no levels" in found.reason) == ({}, True)
    assert choose_levels(with_errors(gpt(), "qsgd"), parse("qsgd(bits=4)"), range(5), ()).alphas == ()


def test_excluded_tensors_are_sent_whole_by_sparsifiers_at_every_notch() -> None:
    profile = with_errors(gpt(), "topk", "qsgd")
    rest = range(1, len(profile.tensors))
    found = choose_levels(profile, parse("sidco-e(ratio=0.01)"), rest, ALPHAS, exact=[0])
    assert found.levels[0] == (1_000_000,) * len(found.alphas)
    alone = choose_levels(gpt(), parse("sidco-e(ratio=0.01)"), rest, ALPHAS, exact=[0])
    assert (alone.levels, alone.alphas) == ({0: (1_000_000,)}, (1.0,))
    assert 0 not in choose_levels(profile, parse("qsgd(bits=4)"), rest, ALPHAS, exact=[0]).levels


def test_a_default_between_levels_counts_as_the_more_precise_one() -> None:
    profile = with_errors(gpt(), "qsgd")
    rows = profile.errors["qsgd"]
    even = tuple(
        msgspec.structs.replace(r, levels=(2, 5, 8), errors=tuple(np.array(r.errors)[[0, 3, 6]].tolist()),
                                sizes=tuple(np.array(r.sizes)[[0, 3, 6]].tolist()))
        for r in rows
    )  # fmt: skip
    found = choose_levels(
        msgspec.structs.replace(profile, errors={"qsgd": even}), parse("qsgd(bits=4)"), large(profile), (1.0,)
    )
    lost = {r.name: dict(zip(r.levels, r.errors, strict=True)) for r in even}
    names = [profile.tensors[i].name for i in large(profile)]
    spent = sum(lost[n][found.levels[i][0]] for n, i in zip(names, large(profile), strict=True))
    assert spent <= sum(lost[n][5] for n in names) * (1 + 1e-9)


def test_of_too_many_tensors_the_largest_have_levels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = with_errors(gpt(), "topk")
    spec, every = parse("topk(ratio=0.01)"), range(len(profile.tensors))
    monkeypatch.setattr(auto_levels, "MOST", 3)
    found = choose_levels(profile, spec, every, ALPHAS)
    by_size = sorted(every, key=lambda i: -profile.tensors[i].elements)
    assert "levels of 3 tensors" in found.reason or "no levels send less" in found.reason
    assert all(set(found.levels[i]) == {spec.level} for i in by_size[3:])
    assert any(set(found.levels[i]) != {spec.level} for i in by_size[:3])


def test_a_tensor_without_a_gradient_keeps_the_level_of_the_spec() -> None:
    """Its errors are zero at every level: that says nothing of the steps to come."""
    profile = with_errors(gpt(), "qsgd")
    quiet = large(profile)[0]
    name = profile.tensors[quiet].name
    rows = tuple(
        msgspec.structs.replace(row, errors=(0.0,) * len(row.errors)) if row.name == name else row
        for row in profile.errors["qsgd"]
    )
    blind = msgspec.structs.replace(profile, errors={"qsgd": rows})
    found = choose_levels(blind, parse("qsgd(bits=8)"), range(len(profile.tensors)), ALPHAS)
    assert set(found.levels[quiet]) == {8}


def test_what_levels_in_force_lose_by_the_errors_of_now() -> None:
    profile, spec = with_errors(gpt(), "topk"), parse("topk(ratio=0.01)")
    names = [profile.tensors[i].name for i in large(profile)]
    chosen = choose_levels(profile, spec, range(len(profile.tensors)), ALPHAS)
    in_force = {profile.tensors[i].name: levels[-1] for i, levels in chosen.levels.items()}
    every = range(len(profile.tensors))

    def lost(level: int, tensors: Sequence[int] = every, of: Sequence[str] = names) -> float:
        return overspent(profile, spec, tensors, dict.fromkeys(of, level))

    assert lost(spec.level) == pytest.approx(1.0)
    assert 0.9 < overspent(profile, spec, every, in_force) <= 1.0 + 1e-9
    assert lost(1_000) > 1.2
    assert lost(10_001) == pytest.approx(1.0), "as the next lower level"
    assert overspent(gpt(), spec, every, in_force) == 0.0
    # What travels dense loses nothing, and what it may lose is not taken from the others.
    assert lost(1_000, of=names[:-1]) < lost(1_000)
    # What may lose nothing is in neither sum.
    kept = [i for i in every if profile.tensors[i].name != names[0]]
    assert lost(spec.level, kept) == pytest.approx(1.0)
    one = [i for i in every if profile.tensors[i].name == names[1]]
    assert lost(1_000, one) == lost(1_000, one, of=names[1:2])


def test_what_levels_may_lose_is_what_they_were_chosen_by_where_the_default_is_no_level() -> None:
    """The budget was made with the next more precise level: so it is when it is looked at again."""
    profile, spec = with_errors(gpt(), "topk"), parse("topk(ratio=0.003)")
    rows = tuple(r for r in profile.errors["topk"] if r.name in {profile.tensors[i].name for i in large(profile)})
    assert spec.level not in rows[0].levels
    every = range(len(profile.tensors))
    chosen = choose_levels(profile, spec, every, (1.0,))
    in_force = {profile.tensors[i].name: levels[-1] for i, levels in chosen.levels.items()}
    assert 0.9 < overspent(profile, spec, every, in_force) <= 1.0 + 1e-9
    above = min(level for level in rows[0].levels if level > spec.level)
    below = max(level for level in rows[0].levels if level < spec.level)
    lost = {level: sum(row.errors[row.levels.index(level)] for row in rows) for level in (above, below)}
    lower = dict.fromkeys(in_force, below)
    assert overspent(profile, spec, every, lower) == pytest.approx(lost[below] / lost[above])
    assert overspent(profile, spec, every, dict.fromkeys(in_force, spec.level)) == pytest.approx(1.0)


def test_levels_are_as_low_as_they_may_be_and_no_lower() -> None:
    profile, spec = with_errors(gpt(), "qsgd"), parse("qsgd(bits=5)")
    free, bound = (choose_levels(profile, spec, large(profile), (0.8, 1.0), least=least) for least in (0, 4))
    lowest = [min(min(levels) for levels in found.levels.values()) for found in (free, bound)]
    assert lowest[0] < 4 == lowest[1] and bound.alphas == free.alphas
    none = choose_levels(profile, spec, large(profile), (1.0,), least=8)
    assert none == Levels({}, (), "one level for all: the quality takes none below 8")
