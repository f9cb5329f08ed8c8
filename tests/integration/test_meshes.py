"""Models that are parallel in other ways too: real daemons carry the gradients of the data-parallel group alone.

What may live here: meshes of a data-parallel dimension and another one. What may not: shards of `fully_shard`
(`test_groups.py`), workers of a node that share a model (`test_hierarchy.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.cluster import Cluster, parts

WORKERS = "tests.integration.mesh_workers"
FUNCTIONS = ("tensor_parallel", "pipeline_parallel", "expert_parallel")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each function came to on four ranks, two a node."""
    with Cluster(tmp_path_factory.mktemp("meshes"), nodes=2) as cluster:
        functions = [(f"{WORKERS}:{name}", {}) for name in FUNCTIONS]
        outcomes = parts(cluster.run("tests.integration.cluster:several", [0, 0, 1, 1], functions=functions))
    return {name: [o.ok() for o in each] for name, each in zip(FUNCTIONS, outcomes, strict=True)}


def _replicas(rank: int) -> str:
    return f"ddp.0 of ranks {rank % 2},{rank % 2 + 2}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_the_averages_over_their_own_group_bit_by_bit(found: dict[str, list[Any]], name: str) -> None:
    values = found[name]
    assert [value["differ"] for value in values] == [[]] * 4
    hashes = [value["hash"] for value in values]
    assert hashes[:2] == hashes[2:] and hashes[0] != hashes[1], "replicas have the same, and others another part"


def test_of_a_tensor_parallel_model_each_rank_exchanges_its_part(found: dict[str, list[Any]]) -> None:
    for rank, value in enumerate(found["tensor_parallel"]):
        assert (value["labels"], value["steps"]) == ([_replicas(rank)], 3)
        assert value["shapes"] == {"up.weight": [32, 24], "up.bias": [32], "down.weight": [8, 32], "down.bias": [8]}
        assert value["far"] < 1e-7, "and the parts are those of the model as a whole"
        assert "tensor 'down.bias' cannot be exchanged: it is a DTensor" in value["refused"]
        assert "DistributedDataParallel(model, device_mesh=)" in value["refused"]


def test_of_a_pipeline_each_rank_exchanges_its_stage(found: dict[str, list[Any]]) -> None:
    for rank, value in enumerate(found["pipeline_parallel"]):
        assert (value["labels"], value["steps"]) == ([_replicas(rank)], 3)
        assert value["shapes"]["weight"] == ([5, 48] if rank % 2 else [48, 24])


def test_experts_are_averaged_over_their_ranks_and_what_is_shared_over_all(found: dict[str, list[Any]]) -> None:
    for rank, value in enumerate(found["expert_parallel"]):
        assert (value["labels"], value["steps"]) == (["ddp.0", _replicas(rank)], 6)
    assert len({value["common"] for value in found["expert_parallel"]}) == 1
