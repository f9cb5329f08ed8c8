"""push_pull and broadcasts through real daemons: values, places of ranks, errors on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gcclient.places import SHAPES
from tests.integration.cluster import Cluster, Outcome, parts

WORKERS = "tests.integration.client_workers"
SEVERAL = "tests.integration.cluster:several"
#: What rank 1 does differently, and words that every rank's error must contain.
MISMATCHES = {
    "shape": ["layer.weight", "[4]", "[5]", "rank 1"],
    "dtype": ["layer.weight", "F32", "F64", "rank 1"],
    "order": ["first", "second", "rank 1"],
    "known order": ["step 3", "pushed by some ranks and not by others"],
    "asynchronous order": ["pushed by some ranks and not by others"],
    "another shape": ["before", "[4]", "[5]"],
    "known shape": ["before", "[4]", "[5]", "rank 1"],
    "unnamed shape": ["push_pull.noname.1", "[2, 3]", "[3, 2]", "rank 1"],
    "shared place": ["push_pull.noname.any.", "[2, 3]", "[3, 2]", "rank 1"],
    "average": ["before", "mean", "sum"],
    "model": ["bias", "[4]", "[5]", "rank 1"],
    "broadcast": ["'w'", "[4]", "[3]", "rank 1"],
    "root": ["root"],
    "gather": ["[2, 4]", "[2, 5]", "rank 1"],
}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("trio"), nodes=3, lanes=2) as cluster:
        yield cluster


def _check_sums(outcomes: list[Outcome], ranks: list[int]) -> None:
    values = [o.ok() for o in outcomes]
    assert [v["wrong"] for v in values] == [[]] * len(ranks)
    assert len({v["digest"] for v in values}) == 1
    for rank, value in enumerate(values):
        local = [r for r, n in enumerate(ranks) if n == ranks[rank]]
        assert value["place"] == [rank, len(ranks), local.index(rank), len(local)]
        assert "average=False" in value["refused"][0] and "int32" in value["refused"][0]
        assert "view_as_real" in value["refused"][1]
        assert value["stats"]["calls"] > 600


def test_values_and_broadcasts_on_three_nodes_with_unequal_numbers_of_ranks(trio: Cluster) -> None:
    ranks = [0, 1, 2, 2]
    names = [f"{WORKERS}:sums", f"{WORKERS}:broadcasts", "tests.integration.collective_workers:collectives"]
    sums, broadcasts, collectives = parts(trio.run(SEVERAL, ranks, functions=[(name, {}) for name in names]))
    _check_sums(sums, ranks)
    values = [o.ok() for o in broadcasts]
    assert values[0] == values[1] == values[2] == values[3]
    assert len(values[0]["hashes"]) == 8
    assert "0.1" in values[0]["options"] and "(0.5, 0.6)" in values[0]["options"]
    assert "object" in values[0]["refused"]
    for outcome in collectives:
        value = outcome.ok()
        assert value["wrong"] == []
        assert value["refused"][0].startswith("rank 1: a object") and value["refused"][1].startswith("rank 3: a set")
        assert value["refused"][2].startswith("rank 1: a value cannot be sent to other ranks")
        assert value["refused"][3].startswith(
            "'(unnamed)' on rank 1 cannot be broadcast: its layout is torch.sparse_coo"
        )


def test_gcclients_own_tensors_are_on_the_host_whatever_the_default_device_is(trio: Cluster) -> None:
    values = [o.ok() for o in trio.run(f"{WORKERS}:with_default_device", [0, 1, 2])]
    assert len({v.pop("net") for v in values}) == 1
    rows = [[1.0, 1.0]] * 3
    wanted = {"total": [[3.0, 3.0]] * 3, "told": [[1.0] * 5, rows, [rows] * 3], "rows": 6, "resident": [[3.0] * 3, 3]}
    assert values == [wanted] * 3


def test_unnamed_calls_meet_whenever_their_results_are_fetched(trio: Cluster) -> None:
    assert [o.ok()["wrong"] for o in trio.run(f"{WORKERS}:unnamed", [0, 1, 2])] == [[], [], []]


def test_unnamed_tensors_of_many_shapes_share_memory_by_size(trio: Cluster) -> None:
    values = [o.ok() for o in trio.run(f"{WORKERS}:lengths", [0, 1, 2, 2])]
    assert [v["wrong"] for v in values] == [[]] * 4
    assert len({v["sections"] for v in values}) == 1
    assert {v["own"] for v in values} == {SHAPES}
    assert max(v["arena"] for v in values) < 64 << 20


def test_two_jobs_at_once_do_not_meet(trio: Cluster) -> None:
    one = trio.start(f"{WORKERS}:counting", [0, 1], job="one", steps=40, elements=50_000)
    two = trio.start(f"{WORKERS}:counting", [1, 0], job="two", steps=40, elements=70_000)
    for outcome in one.wait() + two.wait():
        assert outcome.ok()["wrong"] == 0


def test_a_mismatch_is_named_on_every_rank_and_the_next_job_is_unharmed(trio: Cluster) -> None:
    kinds = [*MISMATCHES, "codec"]
    functions = [(f"{WORKERS}:mismatch", {"kind": kind}) for kind in kinds]
    for kind, outcomes in zip(kinds, parts(trio.run(SEVERAL, [0, 1], functions=functions)), strict=True):
        for outcome in outcomes:
            expected = "CodecError" if kind == "codec" else "TensorMismatch"
            assert outcome.error == expected, f"{kind}: {outcome.error}: {outcome.message}\n{outcome.log}"
            words = MISMATCHES.get(kind, ["nosuchcodec"])
            assert all(word in outcome.message for word in words), f"{kind}: {outcome.message}"


def test_the_others_hear_of_a_worker_that_ends_by_an_exception(trio: Cluster) -> None:
    outcomes = trio.run(f"{WORKERS}:vanish", [0, 1, 0], timeout=40)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "WorkerLost", f"{outcome.error}: {outcome.message}\n{outcome.log}"
        assert "rank 1" in outcome.message
