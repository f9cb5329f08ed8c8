"""DDP models exchanged in shards through two real daemons: equal and unequal numbers of workers a node.

What may live here: what takes several workers of a node. What may not: what one shows (`tests/unit/client`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, Outcome
from tests.integration.ddp_checks import (
    check_accumulation,
    check_branches,
    check_failing,
    check_groups,
    check_scaled,
    check_training,
)
from tests.integration.operators import ask, reachable, until
from tests.integration.shards import EVEN, MORE, UNEVEN, check_a_kill_changes_no_bit, run_several, two_nodes

DDP = "tests.integration.ddp_workers"
WORKERS = "tests.integration.hierarchy_workers"
TRAIN = "tests.integration.planning_workers:train"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_nodes(tmp_path_factory.mktemp("hier")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def even(pair: Cluster) -> dict[str, list[Outcome]]:
    """What the functions below came to on two nodes of two ranks."""
    functions: dict[str, tuple[str, dict[str, Any]]] = {
        "lossless": (f"{WORKERS}:lossless", {}),
        "held_back": (f"{WORKERS}:held_back", {"compression": "topk(ratio=0.2)", "steps": 12}),
        "void": (f"{WORKERS}:void", {}),
        "options": (f"{WORKERS}:options", {}),
        "resumed": (f"{WORKERS}:resumed", {}),
        "gloo": (f"{DDP}:against_gloo", {"steps": 20, "hierarchy": True}),
        "accumulation": (f"{DDP}:accumulation", {"hierarchy": True}),
        "scaled": (f"{DDP}:scaled", {"hierarchy": True}),
        "branches": (f"{DDP}:branches", {"hierarchy": True}),
        "under_way": (f"{DDP}:under_way", {"steps": 3}),
    }
    return dict(zip(functions, run_several(pair, EVEN, list(functions.values())), strict=True))


@pytest.fixture(scope="module")
def uneven(pair: Cluster) -> list[list[Outcome]]:
    """``lossless`` and ``held_back`` on one and two ranks."""
    functions = [
        (f"{WORKERS}:lossless", {}),
        (f"{WORKERS}:held_back", {"compression": "onebit", "steps": 12}),
        (f"{DDP}:against_gloo", {"steps": 10, "hierarchy": True}),
    ]
    return run_several(pair, UNEVEN, functions)


@pytest.fixture(scope="module")
def more(pair: Cluster) -> list[list[Outcome]]:
    """The same on two and three ranks."""
    functions = [
        (f"{WORKERS}:lossless", {}),
        (f"{WORKERS}:held_back", {"compression": "topk(ratio=0.2)", "steps": 12}),
        (f"{WORKERS}:void", {}),
    ]
    return run_several(pair, MORE, functions)


def _check_lossless(outcomes: list[Outcome], shards: int, ranks: list[int]) -> None:
    values = [o.ok() for o in outcomes]
    assert len({tuple(v["hashes"]) for v in values}) == 1, "replicas differ"
    elements = values[0]["elements"]
    for rank, value in enumerate(values):
        assert value["wrong"] == {"torch.float32": 0, "torch.bfloat16": 0}
        assert value["error"] < 1e-6
        place = ranks[:rank].count(ranks[rank])
        pushed, pulled = value["bytes"]["torch.float32"]
        assert value["bytes"]["torch.bfloat16"] == [pushed, pulled] and pushed == pulled
        assert (pushed == 0) is (place >= shards)
        if pushed:
            # Parts of a parameter are as large as each other, but for an element.
            assert abs(pushed - 4 * elements / shards) <= 4 * 7
    for node in (0, 1):
        brought = sum(v["bytes"]["torch.float32"][0] for v, n in zip(values, ranks, strict=True) if n == node)
        assert brought == 4 * elements, "a node brings every element once"


def test_whole_numbers_average_exactly_and_a_node_brings_each_element_once(even: dict[str, list[Outcome]]) -> None:
    _check_lossless(even["lossless"], 2, EVEN)
    labels = [o.ok()["labels"] for o in even["lossless"]]
    assert labels[0][:2] == ["ddp.0 in 2 shards a node, codec none", "ddp.0 of ranks 0,2"]
    assert labels[1][:2] == ["ddp.0 in 2 shards a node, codec none", "ddp.0 of ranks 1,3"]


def test_one_worker_beside_two(uneven: list[list[Outcome]]) -> None:
    _check_lossless(uneven[0], 1, UNEVEN)


def test_two_workers_beside_three(more: list[list[Outcome]]) -> None:
    _check_lossless(more[0], 2, MORE)


def test_residuals_belong_to_elements(
    even: dict[str, list[Outcome]], uneven: list[list[Outcome]], more: list[list[Outcome]]
) -> None:
    """What a codec holds back of an element comes later: the sum of the averages stays as near as without shards."""
    for outcomes in (even["held_back"], uneven[1], more[1]):
        values = [o.ok() for o in outcomes]
        assert len({tuple(v["hashes"]) for v in values}) == 1, "replicas differ"
        flat, shards = values[0]["off"]
        assert flat[0] > 0.5 < shards[0], "the codec held nothing back"
        assert shards[-1] < max(2 * flat[-1], 8.0)
        assert shards[-1] < 0.75 * 12, "it never came"


def test_training_equals_gloo(even: dict[str, list[Outcome]], uneven: list[list[Outcome]]) -> None:
    for outcomes, steps in ((even["gloo"], 20), (uneven[2], 10)):
        check_training(outcomes, steps, within=1e-5)


@pytest.mark.parametrize("which", ["even", "more"])
def test_a_step_that_is_not_finite_in_one_shard_is_void_in_all(
    which: str, even: dict[str, list[Outcome]], more: list[list[Outcome]]
) -> None:
    """Else the other shards would have delivered what is lost with the step."""
    values = [o.ok() for o in (even["void"] if which == "even" else more[2])]
    for value in values:
        assert value["finite"] == [True, False, *[True] * 10]
        assert value["off"] == 0
    assert len({v["hash"] for v in values}) == 1
    with_shard = [v["nonfinite"] for v in (values if which == "even" else values[:4])]
    assert with_shard == [1, 1, 1, 1]


def test_an_overflow_on_one_rank_is_seen_by_every_scaler(even: dict[str, list[Outcome]]) -> None:
    check_scaled(even["scaled"])


def test_options_of_models_hold_for_shards(even: dict[str, list[Outcome]]) -> None:
    for outcome in even["options"]:
        value = outcome.ok()
        assert value["steps"] == 4
        assert value["exact"][:2] == [[True] * 7] * 2, "the warm-up"
        for exact in value["exact"][2:]:
            assert exact[1] and exact[4] and not exact[0], "what is left out, and what is not"


def test_accumulation_and_unused_sparse_and_mixed_parameters(even: dict[str, list[Outcome]]) -> None:
    check_accumulation(even["accumulation"])
    check_branches(even["branches"])


def test_a_checkpoint_has_every_shards_residuals(even: dict[str, list[Outcome]]) -> None:
    for outcome in even["resumed"]:
        value = outcome.ok()
        undisturbed, again = value["hashes"]
        assert undisturbed == again != value["fresh"]
        assert value["dropped"] == 0
        assert "saved it, ranks 0, 1, 2, 3 declare it" in value["flat"]


def test_groups_of_a_single_node(pair: Cluster) -> None:
    """Ranks 0, 1 and 2 share a node: of the groups 0, 2 and 1, 3 one has two shards, the other none."""
    (outcomes,) = run_several(pair, [0, 0, 0, 1], [(f"{DDP}:groups", {"hierarchy": True})])
    check_groups(outcomes)


@pytest.mark.parametrize(
    ("ranks", "odd", "what", "told"),
    [
        (EVEN, 1, "hierarchy", "in 2 shards a node"),
        (UNEVEN, 2, "compression", "codec fp16"),
        (UNEVEN, 2, "model", "shape of tensor"),
    ],
)
def test_ranks_that_are_in_no_domain_together_must_agree(
    pair: Cluster, ranks: list[int], odd: int, what: str, told: str
) -> None:
    """The last of three ranks on two nodes has no shard."""
    for outcome in pair.run(f"{WORKERS}:differing", ranks, what=what, odd=odd):
        assert told in outcome.ok()["told"]


def test_a_lost_worker_comes_out_of_backward(pair: Cluster) -> None:
    outcomes = pair.run(f"{DDP}:failing", EVEN, hierarchy=True)
    for rank in (0, 2, 3):
        check_failing(outcomes[rank])


def test_what_an_operator_says_holds_for_every_shard(tmp_path: Path) -> None:
    options, stop = {"min_compress_bytes": "0"}, tmp_path / "stop"
    with reachable(Cluster(tmp_path, nodes=2, options=options)) as cluster:
        daemon = cluster.daemons[0]
        job = cluster.start(TRAIN, EVEN, stop=str(stop), pause=0.02, width=200, hierarchy=True)
        job.wait_mark("step 3")
        (about,) = ask(daemon, "jobs")["jobs"]
        elements = {d["label"]: d["elements"] for d in about["domains"] if d["label"].startswith("ddp.")}
        model = 64 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10
        # a note beside each shard
        assert elements == {
            "ddp.0 in 2 shards a node, codec of the daemon": 0,
            "ddp.0 of ranks 0,2": model // 2 + 1,
            "ddp.0 of ranks 1,3": model // 2 + 1,
        }
        assert ask(daemon, "tensors", "--pattern", "*.weight")["tensors"]
        ask(daemon, "set-codec", "--pattern", "2.weight", "topk(ratio=0.05)")

        def codecs() -> set[tuple[str, str]]:
            found = ask(daemon, "tensors")["tensors"]
            return {(t["domain"], t["codec"]) for t in found if t["name"] == "2.weight" and t["shape"][0] > 0}

        until("both shards' codec", lambda: len(found := codecs()) == 2 and all("topk" in c for _, c in found))
        ask(daemon, "plan")
        stop.touch()
        values = [o.ok() for o in job.wait(60)]
    assert len({v["hash"] for v in values}) == 1


def test_a_backward_pass_leaves_no_average_under_way(even: dict[str, list[Outcome]]) -> None:
    """Not the note's either: a daemon that restarts is brought again what it had not used, which no later step may have
    overwritten."""
    assert [o.ok() for o in even["under_way"]] == 4 * [[0, 0, 0]]


def test_a_killed_daemon_changes_no_bit(tmp_path_factory: pytest.TempPathFactory) -> None:
    given = {"steps": 30, "compressions": ["topk(ratio=0.05)"], "hierarchy": True}
    check_a_kill_changes_no_bit(tmp_path_factory, f"{DDP}:training", "topk(ratio=0.05) 8", **given)
