"""GC_DISABLE: what scripts do with gcclient they do with torch's own collectives, without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, parts
from tests.integration.ddp_checks import check_used_early

WORKERS = "tests.integration"
FUNCTIONS: dict[str, dict[str, Any]] = {
    "client_workers:sums": {},
    "client_workers:broadcasts": {},
    "ddp_workers:against_gloo": {"steps": 4},
    "ddp_workers:branches": {},
    "ddp_workers:used_early": {},
    "optimizer_workers:clipped": {},
    "optimizer_workers:scaled": {},
    "optimizer_workers:branches": {"groupings": [None]},
    "group_workers:fsdp2": {},
    "collective_workers:collectives": {},
    "option_workers:compressed_in_part": {},
    "option_workers:accumulated": {},
    "option_workers:migrated": {},
    "overlap_workers:identical": {"steps": 2},
    "disabled_workers:looked_at": {},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each function came to on two ranks; no daemon is ever started."""
    cluster = Cluster(tmp_path_factory.mktemp("disabled"), nodes=2)
    try:
        functions = [(f"{WORKERS}.{name}", arguments) for name, arguments in FUNCTIONS.items()]
        environ = {"GC_DISABLE": "1"}
        outcomes = parts(cluster.run("tests.integration.cluster:several", [0, 1], functions=functions, environ=environ))
    finally:
        cluster.close()
    return {name: [o.ok() for o in each] for name, each in zip(FUNCTIONS, outcomes, strict=True)}


def test_every_dtype_shape_and_kind_of_call(found: dict[str, list[Any]]) -> None:
    values = found["client_workers:sums"]
    assert [v["wrong"] for v in values] == [[], []]
    assert values[0]["digest"] == values[1]["digest"]
    for rank, value in enumerate(values):
        assert value["place"][:2] == [rank, 2]
        assert "average is not exact" in value["refused"][0] and "complex64" in value["refused"][1]
        assert value["stats"]["node"] == "" and value["stats"]["calls"] > 600


def test_a_default_group_that_does_not_reach_the_cpu(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nodes=2)
    try:
        environ = {"GC_DISABLE": "1"}
        outcomes = cluster.run("tests.integration.disabled_workers:beyond_cpu", [0, 1], environ=environ)
    finally:
        cluster.close()
    ours, theirs = (outcome.ok() for outcome in outcomes)
    assert "cpu" in ours["refused"].lower(), "the library's own tensors are there"
    assert ours["total"] == [1.0] * 3 and ours["told"] == theirs["told"] == {"epoch": 7}
    assert ours["hash"] == theirs["hash"]


def test_broadcasts(found: dict[str, list[Any]]) -> None:
    ours, theirs = found["client_workers:broadcasts"]
    assert ours == theirs
    assert "a object cannot be sent" in ours["refused"]


def test_ddp(found: dict[str, list[Any]]) -> None:
    for value in found["ddp_workers:against_gloo"]:
        assert value["difference"] < 1e-6 and value["steps"] == 4
    for value in found["ddp_workers:branches"]:
        assert all(value["close"].values()), value["close"]
    check_used_early(found["ddp_workers:used_early"])


def test_the_optimizer_wrapper(found: dict[str, list[Any]]) -> None:
    for value in found["optimizer_workers:clipped"]:
        assert value["difference"] < 1e-6
    assert found["optimizer_workers:scaled"][0]["scales"] == [1024.0, 512.0, 512.0, 512.0]
    ours, theirs = found["optimizer_workers:branches"]
    assert ours == theirs


def test_the_calls_under_horovods_names(found: dict[str, list[Any]]) -> None:
    for value in found["collective_workers:collectives"]:
        assert value["wrong"] == []
        assert value["refused"][0].startswith("rank 1: a object") and value["refused"][1].startswith("rank 1: a set")


def test_options_that_only_daemons_heed_change_nothing(found: dict[str, list[Any]]) -> None:
    for value in found["option_workers:compressed_in_part"]:
        for way in ("wrapper", "ddp"):
            assert value["found"][way] == [value["names"]] * 5, way
        assert all(value["sums"])


def test_passes_are_added_up_before_they_are_exchanged(found: dict[str, list[Any]]) -> None:
    for value in found["option_workers:accumulated"]:
        assert value["difference"] < 1e-6 and value["steps"] == 9
    ours, theirs = found["option_workers:accumulated"]
    assert ours["hashes"] == theirs["hashes"]


def test_weights_are_the_same_where_forward_passes_are_to_overlap(found: dict[str, list[Any]]) -> None:
    ours, theirs = found["overlap_workers:identical"]
    assert ours == theirs
    for name in ours.keys() - {"compiled"}:
        assert len(set(ours[name])) == 1, name


def test_a_rank_may_wait_for_its_own_weights_where_forward_passes_are_to_overlap(found: dict[str, list[Any]]) -> None:
    """``synchronize()`` after ``step()`` is no call of all ranks, and what it is refused for is the same."""
    for value in found["disabled_workers:looked_at"]:
        assert value["weights"] == [-2.0, -6.0, -12.0, -20.0] and value["steps"] == 4
        assert value["refused"] == 4 * [
            "optimizer.synchronize() before optimizer.step()",
            "optimizer.step(closure)",
            "optimizer.skip_synchronize()",
        ]


def test_the_examples_of_the_migration_page(found: dict[str, list[Any]]) -> None:
    ours, theirs = found["option_workers:migrated"]
    assert [each["hash"] for each in ours] == [each["hash"] for each in theirs]
    assert ours[0]["losses"] == [value[0]["loss"] for value in found["option_workers:migrated"]]


def test_replicas_of_sharded_models(found: dict[str, list[Any]]) -> None:
    for value in found["group_workers:fsdp2"]:
        assert value["difference"] < 1e-6 and value["accumulated"] < 1e-6 and value["compressed"] < 1e-6
        assert value["ranks"] == [0, 1]
    assert len({tuple(value["hashes"]) for value in found["group_workers:fsdp2"]}) == 1
