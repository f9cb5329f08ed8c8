"""The optimizer wrapper with `hierarchy`, through two real daemons: equal and unequal numbers of workers a node.

What may live here: what takes several workers of a node. What may not: what one shows
(`tests/unit/client/test_sharded_exchange.py`), models of DDP (`test_hierarchy.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.cluster import Cluster
from tests.integration.shards import EVEN, MORE, UNEVEN, check_a_kill_changes_no_bit, run_several, two_nodes

OPTIMIZER = "tests.integration.optimizer_workers"
WORKERS = "tests.integration.sharded_optimizer_workers"
OF_OPTIMIZER: dict[str, dict[str, Any]] = {
    "against_ddp": {"steps": 4, "groupings": [None, 2]},
    "accumulation": {},
    "clipped": {},
    "scaled": {},
    "branches": {"groupings": [None, 2]},
    "conserved": {"groupings": ["layer-wise", [["rare"], ["often"]]], "compression": "topk(ratio=0.3)"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_nodes(tmp_path_factory.mktemp("wrapped")) as cluster:
        yield cluster


def _run(cluster: Cluster, ranks: list[int], functions: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    calls = [
        (f"{OPTIMIZER}:{name}", given | {"hierarchy": True}) if name in OF_OPTIMIZER else (f"{WORKERS}:{name}", given)
        for name, given in functions.items()
    ]
    found = run_several(cluster, ranks, calls)
    return {name: [o.ok() for o in each] for name, each in zip(functions, found, strict=True)}


@pytest.fixture(scope="module")
def even(pair: Cluster) -> dict[str, list[Any]]:
    """What the functions came to on two nodes of two ranks."""
    return _run(pair, EVEN, {"lossless": {}, "unused": {}, "void": {}, "options": {}, "resumed": {}, **OF_OPTIMIZER})


@pytest.fixture(scope="module")
def uneven(pair: Cluster) -> dict[str, list[Any]]:
    """Some of them on one and two ranks."""
    some = {name: OF_OPTIMIZER[name] for name in ("against_ddp", "branches", "conserved")}
    return _run(pair, UNEVEN, {"unused": {}, **some})


@pytest.fixture(scope="module")
def more(pair: Cluster) -> dict[str, list[Any]]:
    """Some of them on two and three ranks."""
    return _run(pair, MORE, {"lossless": {}, "unused": {}, "void": {}, "conserved": OF_OPTIMIZER["conserved"]})


@pytest.fixture(params=["even", "uneven"])
def each(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = request.getfixturevalue(request.param)
    return found


def test_whole_numbers_are_those_without_shards(even: dict[str, list[Any]], more: dict[str, list[Any]]) -> None:
    """Whatever the order in which gradients become ready, which is another one on every rank."""
    for values in (even["lossless"], more["lossless"]):
        for value in values:
            assert value["wrong"] == value["differ"] == 0
            assert value["bundles"] == [1, 1, 2, 2, 2, 2] * 2
            assert value["bytes"][1] >= 4 * value["elements"], "without shards"
        assert len({tuple(v["hashes"]) for v in values}) == 1, "ranks hold the same bits"


def test_a_node_brings_each_element_once(even: dict[str, list[Any]], more: dict[str, list[Any]]) -> None:
    for found, ranks in ((even, EVEN), (more, MORE)):
        values = found["lossless"]
        for node in (0, 1):
            brought = sum(v["bytes"][0] for v, n in zip(values, ranks, strict=True) if n == node)
            assert brought == 4 * values[0]["elements"]
    assert [v["bytes"][0] for v in more["lossless"]][-1] == 0, "there are two shards"
    labels = [v["labels"] for v in even["lossless"]]
    assert labels[0] == ["optimizer.0 in 2 shards a node, codec of the daemon", "optimizer.0 of ranks 0,2"]
    assert labels[1] == ["optimizer.0 in 2 shards a node, codec of the daemon", "optimizer.0 of ranks 1,3"]


def test_ranks_use_other_parameters_in_another_order(each: dict[str, list[Any]], more: dict[str, list[Any]]) -> None:
    for values in (each["unused"], more["unused"]):
        for value in values:
            assert value["wrong"] == 0
            assert value["steps"] == 24
            assert any(value["missing"]), "there are steps in which nobody uses some"
        assert len({tuple(v["hashes"]) for v in values}) == 1


def test_branches_and_a_rank_that_has_run_out_of_batches(each: dict[str, list[Any]]) -> None:
    for value in each["branches"]:
        assert all(value["close"])
        nobody = ["right.weight", "right.bias", "never.weight", "never.bias"]
        assert value["missing"] == [nobody] * 2
    assert len({tuple(v["alone"]) for v in each["branches"]}) == 1


def test_nothing_is_lost_and_what_nobody_uses_keeps_its_residual(
    each: dict[str, list[Any]], more: dict[str, list[Any]]
) -> None:
    for value in each["conserved"] + more["conserved"]:
        for found in value["found"]:
            assert found["kept"]
            assert found["difference"] < 1e-5 < found["size"]


def test_training_equals_ddps(even: dict[str, list[Any]], uneven: dict[str, list[Any]]) -> None:
    for found in (even, uneven):
        for value in found["against_ddp"]:
            assert all(each["difference"] < 1e-6 for each in value["found"])
            assert value["moved"] > 1e-3
        hashes = [[each["hashes"][0] for each in value["found"]] for value in found["against_ddp"]]
        assert all(each == hashes[0] for each in hashes), "ranks hold the same bits"


def test_accumulation_and_clipping(even: dict[str, list[Any]]) -> None:
    for value in even["accumulation"]:
        assert value["difference"] < 1e-6
        assert value["steps"] == 6
    for value in even["clipped"]:
        assert value["difference"] < 1e-6
        assert all(ours == pytest.approx(theirs, rel=1e-5) and ours > 0.1 for ours, theirs in value["norms"])
    for name in ("accumulation", "clipped"):
        assert len({value["hash"] for value in even[name]}) == 1


def test_an_overflow_on_one_rank_is_seen_by_every_scaler(even: dict[str, list[Any]]) -> None:
    for value in even["scaled"]:
        assert value["scales"] == [1024.0, 512.0, 512.0, 512.0]
        assert value["hashes"][0] == value["hashes"][1] != value["hashes"][2]
        assert value["hashes"] == even["scaled"][0]["hashes"]


def test_a_step_that_is_not_finite_in_one_shard_is_void_in_all(
    even: dict[str, list[Any]], more: dict[str, list[Any]]
) -> None:
    """Else the other shards would have delivered what is lost with the step."""
    for found in (even, more):
        values = found["void"]
        for rank, value in enumerate(values):
            assert [all(finite) for finite in value["finite"]] == [True, False, *[True] * 12]
            assert value["finite"][1][1:] == [True] * 6
            assert value["off"] == 0
            assert value["nonfinite"] == (1 if rank < 4 else 0)
        assert len({v["hash"] for v in values}) == 1


def test_options_hold_for_shards(even: dict[str, list[Any]]) -> None:
    for value in even["options"]:
        assert value["steps"] == 4
        assert value["quality"] == ["safe"]
        assert value["exact"][:2] == [[True] * 7] * 2, "the warm-up"
        for exact in value["exact"][2:]:
            assert exact[1] and exact[4] and not exact[0], "what is left out, and what is not"


def test_a_checkpoint_has_every_shards_residuals(even: dict[str, list[Any]]) -> None:
    for value in even["resumed"]:
        assert value["undisturbed"] == value["again"] != value["fresh"]
        assert value["dropped"] == 0


def test_ranks_that_do_not_agree_are_told(pair: Cluster) -> None:
    for outcome in pair.run(f"{WORKERS}:differing", EVEN, odd=1):
        assert "in 2 shards a node" in outcome.ok()["told"]


def test_a_lost_worker_is_told_of_by_name(pair: Cluster) -> None:
    outcomes = pair.run(f"{WORKERS}:failing", EVEN)
    for rank in (0, 2, 3):
        value = outcomes[rank].ok()
        assert value["kind"] == "WorkerLost" and "rank 1" in value["told"]


@pytest.mark.long
def test_a_killed_daemon_changes_no_bit(tmp_path_factory: pytest.TempPathFactory) -> None:
    given = {"steps": 25, "compression": "topk(ratio=0.05)", "groups": 2, "hierarchy": True}
    check_a_kill_changes_no_bit(tmp_path_factory, f"{OPTIMIZER}:training", "step 8", **given)
