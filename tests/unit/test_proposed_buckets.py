"""MergeComp's buckets of benchmarks, from profiles that daemons keep."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import proposed_buckets
from gcserver.planner.auto import Wish, compose
from gcserver.planner.profile import dump
from tests.unit.planner.live_profiles import GBIT10, MBIT100, gpt, plain


def test_the_cut_is_the_planners_and_of_the_whole_model() -> None:
    profile = gpt(4, GBIT10)
    caps = proposed_buckets.caps(profile, "none")
    assert len(caps) > 1
    assert sum(caps) * 2**20 == pytest.approx(4 * profile.elements)
    nbytes = tuple(round(cap * 2**20) for cap in caps)
    assert proposed_buckets.caps(replace(profile, buckets=nbytes), "none") == (), "once they are there"
    assert caps == compose(profile, Wish(parts=frozenset({"mergecomp"}), family="none")).caps
    assert proposed_buckets.caps(profile, "", "fast") == compose(profile, Wish("fast")).caps


def test_torchs_buckets_stay_where_no_cut_is_better() -> None:
    assert proposed_buckets.caps(plain([1000], [0.0]), "none") == ()


def test_what_a_codec_costs_is_measured_where_daemons_did_not() -> None:
    profile = gpt(2, MBIT100)
    assert "signsgd" not in profile.codecs
    assert sum(proposed_buckets.caps(profile, "signsgd")) * 2**20 in (0, pytest.approx(4 * profile.elements))


def test_the_profile_is_that_of_the_daemon_that_planned(tmp_path: Path) -> None:
    planned = gpt(2, MBIT100)
    for name, profile in {"j-1": replace(planned, codecs={}), "j-2": planned, "k-3": plain([8], [0.0])}.items():
        (tmp_path / f"{name}.json").write_bytes(dump(profile))
    (tmp_path / "codec-costs-4.json").write_text("{}")
    assert proposed_buckets.measured(tmp_path, "j") == planned
    with pytest.raises(ValueError, match="no daemon kept a profile of i"):
        proposed_buckets.measured(tmp_path, "i")
