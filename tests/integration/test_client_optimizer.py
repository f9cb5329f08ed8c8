"""The optimizer wrapper and groups through real daemons, against DDP with the hook."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.cluster import Cluster, parts

WORKERS = "tests.integration.optimizer_workers"
SEVERAL = "tests.integration.cluster:several"
LAYERS = ["7.bias", "7.weight", "5.bias", "5.weight", "2.bias", "2.weight", "0.bias", "0.weight"]
FUNCTIONS: dict[str, dict[str, Any]] = {
    "against_ddp": {"steps": 8, "groupings": [None, "layer-wise", 2, [LAYERS[:3], LAYERS[3:4], LAYERS[4:]]]},
    "accumulation": {},
    "clipped": {},
    "scaled": {},
    "branches": {"groupings": [None, "layer-wise", 2]},
    "conserved": {"groupings": ["layer-wise", [["rare"], ["often"]]], "compression": "topk(ratio=0.3)"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each function came to on two ranks, one a node."""
    options = {"partition_bytes": str(256 << 10), "min_compress_bytes": "4KiB"}
    with Cluster(tmp_path_factory.mktemp("optimizer"), nodes=2, lanes=2, options=options) as cluster:
        functions = [(f"{WORKERS}:{name}", arguments) for name, arguments in FUNCTIONS.items()]
        outcomes = parts(cluster.run(SEVERAL, [0, 1], functions=functions))
    return {name: [o.ok() for o in each] for name, each in zip(FUNCTIONS, outcomes, strict=True)}


def test_training_equals_ddps_for_every_grouping(found: dict[str, list[Any]]) -> None:
    for value in found["against_ddp"]:
        assert all(each["difference"] < 1e-6 for each in value["found"])
        assert value["moved"] > 1e-3
    hashes = [[each["hashes"] for each in value["found"]] for value in found["against_ddp"]]
    assert hashes[0] == hashes[1], "ranks hold the same bits"


def test_gradients_add_up_over_passes(found: dict[str, list[Any]]) -> None:
    for value in found["accumulation"]:
        assert value["difference"] < 1e-6
        assert value["steps"] == 6
    assert len({value["hash"] for value in found["accumulation"]}) == 1


def test_averages_are_clipped(found: dict[str, list[Any]]) -> None:
    for value in found["clipped"]:
        assert value["difference"] < 1e-6
        assert all(ours == pytest.approx(theirs, rel=1e-5) and ours > 0.1 for ours, theirs in value["norms"])
    assert len({value["hash"] for value in found["clipped"]}) == 1


def test_an_overflow_on_one_rank_is_seen_by_every_scaler(found: dict[str, list[Any]]) -> None:
    for value in found["scaled"]:
        assert value["scales"] == [1024.0, 512.0, 512.0, 512.0]
        assert value["hashes"][0] == value["hashes"][1] != value["hashes"][2]
    assert found["scaled"][0] == found["scaled"][1]


def test_parameters_that_not_every_rank_uses(found: dict[str, list[Any]]) -> None:
    for value in found["branches"]:
        assert all(value["close"])
        # rank 1 computed nothing in the last step, rank 0 no "right"
        nobody = ["right.weight", "right.bias", "never.weight", "never.bias"]
        assert value["missing"] == [nobody] * 3
    assert found["branches"][0]["alone"] == found["branches"][1]["alone"]


def test_nothing_is_lost_and_what_nobody_uses_keeps_its_residual(found: dict[str, list[Any]]) -> None:
    for value in found["conserved"]:
        for each in value["found"]:
            assert each["kept"]
            assert each["difference"] < 1e-5 < each["size"]
