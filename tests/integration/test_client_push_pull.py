"""push_pull and broadcasts through real daemons: values, places of ranks, errors on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.cluster import Cluster

WORKERS = "tests.integration.client_workers"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("pair"), nodes=2, lanes=2) as cluster:
        yield cluster


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 1]], ids=["one each", "one and two"])
def test_every_dtype_and_shape_is_exact_and_alike_on_all_ranks(pair: Cluster, ranks: list[int]) -> None:
    values = [o.ok() for o in pair.run(f"{WORKERS}:sums", ranks)]
    assert [v["wrong"] for v in values] == [[]] * len(ranks)
    assert len({v["digest"] for v in values}) == 1
    for rank, value in enumerate(values):
        local = [r for r, n in enumerate(ranks) if n == ranks[rank]]
        assert value["place"] == [rank, len(ranks), local.index(rank), len(local)]
        assert "average=False" in value["refused"][0] and "int32" in value["refused"][0]
        assert "view_as_real" in value["refused"][1]
        assert value["stats"]["calls"] > 600


def test_three_nodes(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Cluster(tmp_path_factory.mktemp("three"), nodes=3) as cluster:
        values = [o.ok() for o in cluster.run(f"{WORKERS}:sums", [0, 1, 2])]
    assert [v["wrong"] for v in values] == [[]] * 3
    assert len({v["digest"] for v in values}) == 1


def test_two_jobs_at_once_do_not_meet(pair: Cluster) -> None:
    one = pair.start(f"{WORKERS}:counting", [0, 1], job="one", steps=40, elements=50_000)
    two = pair.start(f"{WORKERS}:counting", [1, 0], job="two", steps=40, elements=70_000)
    for outcome in one.wait() + two.wait():
        assert outcome.ok()["wrong"] == 0


def test_broadcast_is_bit_exact(pair: Cluster) -> None:
    values = [o.ok() for o in pair.run(f"{WORKERS}:broadcasts", [0, 1, 1])]
    assert values[0] == values[1] == values[2]
    assert len(values[0]["hashes"]) == 8
    assert "0.1" in values[0]["options"] and "(0.5, 0.6)" in values[0]["options"]
    assert "object" in values[0]["refused"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ["layer.weight", "[4]", "[5]", "rank 1"]),
        ("dtype", ["layer.weight", "F32", "F64", "rank 1"]),
        ("order", ["first", "second", "rank 1"]),
        ("known order", ["step 3", "pushed by some ranks and not by others"]),
        ("known shape", ["before", "[4]", "[5]", "rank 1"]),
        ("average", ["before", "mean", "sum"]),
        ("model", ["bias", "[4]", "[5]", "rank 1"]),
        ("broadcast", ["'w'", "[4]", "[3]", "rank 1"]),
        ("root", ["root"]),
    ],
)
def test_a_mismatch_is_named_on_every_rank(pair: Cluster, kind: str, words: list[str]) -> None:
    for outcome in pair.run(f"{WORKERS}:mismatch", [0, 1], kind=kind, timeout=40):
        assert outcome.error == "TensorMismatch", f"{outcome.error}: {outcome.message}\n{outcome.log}"
        assert all(word in outcome.message for word in words), outcome.message


def test_an_unknown_codec_is_refused_on_every_rank(pair: Cluster) -> None:
    for outcome in pair.run(f"{WORKERS}:mismatch", [0, 1], kind="codec", timeout=40):
        assert outcome.error == "CodecError" and "nosuchcodec" in outcome.message


@pytest.mark.parametrize("how", ["exit", "exception"])
def test_the_others_hear_of_a_worker_that_ends(pair: Cluster, how: str) -> None:
    outcomes = pair.run(f"{WORKERS}:vanish", [0, 1, 0], how=how, timeout=40)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "WorkerLost", f"{outcome.error}: {outcome.message}\n{outcome.log}"
        assert "rank 1" in outcome.message
