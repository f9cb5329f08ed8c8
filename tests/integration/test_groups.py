"""torch's own ways to train over the backend `gc`, through real daemons, against gloo."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gcclient.places import PLACES, SHAPES
from tests.integration.cluster import Cluster, parts

WORKERS = "tests.integration.group_workers"
FUNCTIONS = ("plain", "ddp", "hsdp", "hsdp_in_part", "fsdp1", "fsdp2", "lengths")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each function came to on four ranks, two a node."""
    options = {"min_compress_bytes": "0"}
    with Cluster(tmp_path_factory.mktemp("groups"), nodes=2, options=options, know_peers=False) as cluster:
        functions = [(f"{WORKERS}:{name}", {}) for name in FUNCTIONS]
        outcomes = parts(cluster.run("tests.integration.cluster:several", [0, 0, 1, 1], functions=functions))
    return {name: [o.ok() for o in each] for name, each in zip(FUNCTIONS, outcomes, strict=True)}


def test_sums_and_averages_are_carried_and_the_rest_is_gloos(found: dict[str, list[Any]]) -> None:
    for rank, value in enumerate(found["plain"]):
        assert value["wrong"] == []
        inside = rank in (0, 2)
        assert (value["carried"], value["behind"]) == (25 if inside else 24, 0)
        assert value["labels"] == ["group.1.0", "group.2.0 of ranks 0,2"][: 1 + inside]
        assert value["name"] == "gc"


def test_many_shapes_share_memory_by_size_and_ranks_still_find_that_theirs_differ(found: dict[str, list[Any]]) -> None:
    for value in found["lengths"]:
        assert value["wrong"] == []
        assert value["sections"] == 3 * SHAPES + PLACES, "of each shape the three that were under way at once"
        for words in ("all_reduce.noname.any.", "[10, 20]", "[10, 21]", "rank 3"):
            assert words in value["refused"]


def test_ddp_is_exact_and_compressed_only_where_it_is_attached(found: dict[str, list[Any]]) -> None:
    for value in found["ddp"]:
        assert value["difference"] < 1e-6
        assert value["carried"] > 0
        assert (value["calls"], value["steps"]) == (0, 4), "attached, it is the hook's"
        assert value["compressed"] > 1e-4
        assert value["labels"] == ["ddp.0", "group.3.0"]
    assert len({tuple(value["hashes"]) for value in found["ddp"]}) == 1, "ranks hold the same bits"


def test_hybrid_sharding_reduces_between_nodes_only(found: dict[str, list[Any]]) -> None:
    for rank, value in enumerate(found["hsdp"]):
        assert value["difference"] < 1e-6
        assert (value["carried"], value["accumulated"], value["attached"]) == (12, 6, 12), "three modules a step"
        assert value["compressed"] > 1e-4
        replicas = f"{rank % 2},{rank % 2 + 2}"
        attached, lossless = value["labels"]
        assert attached == f"fsdp.0 of ranks {replicas}"
        assert re.fullmatch(rf"group\.\w+\.0 of ranks {replicas}", lossless), "torch names the groups of a mesh"
        assert value["left"] == 0
        assert "not replicated through the backend 'gc'" in value["refused"]
    assert len({tuple(value["hashes"]) for value in found["hsdp"]}) == 1


def test_hybrid_sharding_compresses_what_it_is_told_to(found: dict[str, list[Any]]) -> None:
    for value in found["hsdp_in_part"]:
        assert "would split the fully_shard group '0'" in value["split"]
        assert value["declared"] == [["fsdp.0", "topk(ratio=0.05)"], ["fsdp.1", "fp16"]]
        for step, far in enumerate(value["far"]):
            assert far.keys() == {f"{layer}.{what}" for layer in (0, 2, 4) for what in ("weight", "bias")}
            for name, error in far.items():
                if step < 2 or name.startswith("4"):
                    assert error < 1e-6, (step, name)
            if step >= 2:
                assert far["0.weight"] > 0.1, "most of it is left for later"
                assert 1e-5 < far["2.weight"] < 1e-2, "rounded"


def test_fsdp1_reduces_between_nodes_through_the_group_it_is_given(found: dict[str, list[Any]]) -> None:
    for value in found["fsdp1"]:
        assert value["difference"] < 1e-6
        assert value["carried"] == 4
    assert len({value["hash"] for value in found["fsdp1"]}) == 1


def test_the_hook_of_fsdp2_averages_replicas_without_holding_up_backward(found: dict[str, list[Any]]) -> None:
    for rank, value in enumerate(found["fsdp2"]):
        assert value["difference"] < 1e-6 and value["accumulated"] < 1e-6
        assert value["compressed"] > 1e-4
        assert len(value["in_part"]) == 6 and max(value["in_part"][2:4]) > 1e-4, "the layer that has a codec"
        assert value["waited"] == [0, 6], "only where gradients are added to what is there: three modules, twice"
        assert value["calls"] == 13, "three modules in four steps, and who replicates whom"
        assert value["ranks"] == [rank % 2, rank % 2 + 2]
        assert "replicate dimension" in value["refused"][0] and "fully_shard" in value["refused"][1]
    assert len({tuple(value["hashes"]) for value in found["fsdp2"]}) == 1
