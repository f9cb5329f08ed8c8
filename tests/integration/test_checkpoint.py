"""A run that is saved, killed with all its daemons and resumed, beside one that is left alone: the same weights.

What may live here: checkpoints through real daemons and torch.distributed.checkpoint. What may not: what a checkpoint
holds (`tests/unit/client/test_saved.py`), what is refused (`test_checkpoint.py` there), what a lane believes of one
(`tests/unit/runtime/test_checkpoints.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster

TRAIN = "tests.integration.checkpoint_workers:train"
#: None: the daemon's default
CODECS = ["dgc(ratio=0.02,warmup=5)", "onebit", "qsgd(bits=2)+ef", "topk(ratio=0.02)+momentum", None]
#: two ranks share a node
RANKS = [0, 0, 1]
OPTIONS = {"min_compress_bytes": "4KiB", "partition_bytes": "256KiB"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Outcomes by rank: ``alone``, ``saved``, ``resumed``."""
    folder, found = str(tmp_path_factory.mktemp("saved")), {}
    first = {**OPTIONS, "codec.default": "topk(ratio=0.03)"}
    with Cluster(tmp_path_factory.mktemp("first"), nodes=2, lanes=2, options=first) as cluster:
        jobs = {"alone": {}, "saved": {"save": folder}}
        running = {
            k: cluster.start(TRAIN, RANKS, compressions=CODECS, steps=[1, 4], seed=5, **a) for k, a in jobs.items()
        }
        running["saved"].wait_mark("saving", rank=2)
        cluster.daemons[1].restart()
        found = {k: [o.ok() for o in job.wait()] for k, job in running.items()}
        for daemon in cluster.daemons:
            daemon.kill()
    # Other names, addresses and number of lanes, another default codec, another seed; and daemons that are killed while
    # it is brought to them, and with what was.
    with Cluster(tmp_path_factory.mktemp("second"), nodes=2, options=OPTIONS) as cluster:
        again = cluster.start(TRAIN, RANKS, compressions=CODECS, steps=[4, 7], load=folder)
        again.wait_mark("loaded")
        cluster.daemons[0].restart()
        again.wait_mark("declared", rank=2)
        cluster.daemons[1].restart()
        found["resumed"] = [o.ok() for o in again.wait()]
    return found


@pytest.mark.parametrize("codec", [*CODECS, "single"])
def test_a_resumed_run_ends_with_the_weights_of_one_left_alone(
    runs: dict[str, list[dict[str, Any]]], codec: str | None
) -> None:
    at = [*CODECS, "single"].index(codec)
    for alone, saved, resumed in zip(runs["alone"], runs["saved"], runs["resumed"], strict=True):
        assert alone["before"][at] == saved["before"][at], "the same so far"
        assert alone["after"][at] == saved["after"][at], "saving changes nothing"
        assert resumed["before"][at] == alone["after"][at]
    assert runs["alone"][0]["before"][at] != runs["alone"][0]["after"][at]


def test_the_first_rank_of_each_node_saves_what_its_node_held_back(runs: dict[str, list[dict[str, Any]]]) -> None:
    first, second, other = (r["held"] for r in runs["saved"])
    assert first > 100_000 and other > 100_000 and second == 0
    assert [r["dropped"] for r in runs["resumed"]] == [0, 0, 0]


@pytest.mark.slow
def test_what_a_mismatch_advises_can_be_done_in_the_same_job(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, options=OPTIONS) as cluster:
        found = [o.ok() for o in cluster.run("tests.integration.checkpoint_workers:advised", RANKS, codec="onebit")]
    for value in found:
        assert "optimizer.0: the checkpoint does not fit" in value["refused"]
        assert "What to do: load it with strict=False" in value["refused"]
        assert (value["labels"], value["steps"], value["new"]) == (["optimizer.0"], [3], [])
        assert value["held"] > 0 and value["lost"] < 1e-6 * value["held"], "what fits is brought"
    assert len({value["hash"] for value in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["topk(ratio=0.02)", "onebit"])
def test_what_is_held_back_outlives_another_cut_into_groups(tmp_path: Path, codec: str) -> None:
    """As MergeComp proposes them for a job's next run: residuals are of elements, whatever blocks they were in."""
    groups = [None, "layer-wise", 2]
    with Cluster(tmp_path, nodes=2, options=OPTIONS) as cluster:
        job = "tests.integration.checkpoint_workers:regrouped"
        found = [o.ok() for o in cluster.run(job, RANKS, codec=codec, groups=groups)]
    for value in found:
        assert len(set(value["blocks"])) == len(groups), "the cuts are other ones"
        assert all(held > 0 for held in value["held"])
        assert all(lost < 1e-6 * held for lost, held in zip(value["lost"], value["held"], strict=False))
    assert len({value["hash"] for value in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_torchs_functions_for_states_are_no_steps_and_bring_back_all_of_a_run(tmp_path: Path, overlap: bool) -> None:
    kinds = ["sgd", "adam"]
    by_torch = "tests.integration.checkpoint_workers:by_torch"
    with Cluster(tmp_path, nodes=2, options=OPTIONS) as cluster:
        for kind in kinds:
            how = {"kind": kind, "overlap": overlap}
            folder = str(tmp_path / f"saved-{kind}")
            saved = [o.ok() for o in cluster.run(by_torch, [0, 1], steps=[1, 4], save=folder, **how)]
            resumed = [o.ok() for o in cluster.run(by_torch, [0, 1], steps=[4, 7], load=folder, **how)]
            for first, again in zip(saved, resumed, strict=True):
                assert again["hashes"][0] == first["hashes"][1], kind
                assert first["hashes"][0] != first["hashes"][1]
                assert first["steps"] == again["steps"] == 6, "one for each step, whatever was saved meanwhile"
