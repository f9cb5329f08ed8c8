"""DistributedDataParallel through real daemons, against torch's own all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, Outcome, parts
from tests.integration.ddp_checks import (
    check_accumulation,
    check_branches,
    check_failing,
    check_groups,
    check_scaled,
    check_training,
    check_used_early,
)

WORKERS = "tests.integration.ddp_workers"
SEVERAL = "tests.integration.cluster:several"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two daemons that are not told of each other: workers publish them through torch's store."""
    options = {"partition_bytes": str(256 << 10)}
    with Cluster(tmp_path_factory.mktemp("ddp"), nodes=2, lanes=2, options=options, know_peers=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def found(pair: Cluster) -> dict[str, list[Outcome]]:
    """What the functions below came to on two ranks, one a node."""
    names = ["accumulation", "scaled", "branches", "used_early"]
    longer = {"against_gloo": {"steps": 50}, "layouts": {"steps": 12}}
    functions = [(f"{WORKERS}:{n}", longer.get(n, {})) for n in (*longer, *names)]
    outcomes = parts(pair.run(SEVERAL, [0, 1], functions=functions))
    return dict(zip([*longer, *names], outcomes, strict=True))


def test_training_equals_gloo(found: dict[str, list[Outcome]]) -> None:
    check_training(found["against_gloo"], 50)
    values = [o.ok() for o in found["against_gloo"]]
    assert sum(v["loss"][1] for v in values) < sum(v["first_loss"] for v in values)


def test_blocks_that_cut_no_tensor_change_no_bit(found: dict[str, list[Outcome]]) -> None:
    values = [o.ok() for o in found["layouts"]]
    assert len({h for v in values for h in v["hashes"]}) == 1
    for value in values:
        assert value["largest"][0] == 256 << 10
        assert value["largest"][1] >= 4 * 400 * 16 * 8 * 8, "the largest matrix is in one block"


def test_gradient_accumulation_with_no_sync(found: dict[str, list[Outcome]]) -> None:
    check_accumulation(found["accumulation"])


def test_an_overflow_on_one_rank_is_seen_by_every_scaler(found: dict[str, list[Outcome]]) -> None:
    check_scaled(found["scaled"])
    assert [o.ok()["nonfinite"] for o in found["scaled"]] == [1, 1]


def test_unused_sparse_and_mixed_parameters(found: dict[str, list[Outcome]]) -> None:
    check_branches(found["branches"])


def test_what_only_an_earlier_pass_used_is_averaged_with_no_sync(found: dict[str, list[Outcome]]) -> None:
    check_used_early([o.ok() for o in found["used_early"]])


def test_two_groups_and_unequal_numbers_of_ranks(pair: Cluster) -> None:
    """Three ranks on one node, one on the other; one of the two groups lives on a single node."""
    functions = [(f"{WORKERS}:groups", {}), (f"{WORKERS}:against_gloo", {"steps": 20})]
    groups, training = parts(pair.run(SEVERAL, [0, 0, 0, 1], functions=functions))
    check_groups(groups)
    check_training(training, 20)


def test_where_torch_spans_one_machine_nothing_is_averaged_within_it_alone(tmp_path: Path) -> None:
    """A torchrun for each machine: torch would average sparse gradients, and look for unused parameters, there only."""
    functions = [(f"{WORKERS}:a_world_each", {"ending": ending}) for ending in ("sparse", "unused")]
    with Cluster(tmp_path, nodes=2) as cluster:
        sparse, unused = parts(cluster.run(SEVERAL, [0, 1], functions=functions))
    for i, value in enumerate(o.ok() for o in (*sparse, *unused)):
        assert (value["average"], value["later"]) == ([2.0], "GradcommError")
        looking, plain, ended = value["refused"]
        assert looking.startswith("torch.distributed spans 1 of the job's 2 ranks, which does not go with find_unused")
        assert plain.startswith("torch.distributed spans 1 of the job's 2 ranks: expected the DistributedDataParallel")
        wanted = "sparse gradients are averaged by torch's own all-reduce, and torch.distributed spans 1 of 2 ranks"
        if i >= len(sparse):
            wanted = f"parameter '{3 - i}.weight' has no gradient here, and torch.distributed spans 1 of 2 ranks"
        assert wanted in ended and "gcclient.DistributedOptimizer" in ended


def test_a_lost_worker_comes_out_of_backward(pair: Cluster) -> None:
    check_failing(pair.run(f"{WORKERS}:failing", [0, 1])[0])
