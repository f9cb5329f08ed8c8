"""The programs of examples/ that a user would begin from, each with its own options, small, on two nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.cluster import Cluster, Outcome

#: of each: the node of each rank, and what makes it small
EXAMPLES = {
    "digits_ddp.py": ([0, 1], ["--steps=11"]),
    "gpt_ddp.py": ([0, 1], ["--steps=11", "--layers=1", "--width=32"]),
    "gpt_hsdp.py": ([0, 0, 1, 1], ["--steps=11", "--layers=1", "--width=32"]),
    "lstm.py": ([0, 1], ["--steps=31", "--width=32"]),
    "accumulate_amp.py": ([0, 1], ["--steps=11", "--passes=2"]),
}


@dataclass(frozen=True, slots=True)
class Ran:
    """What an example came to: what its first rank printed of losses, and what its ranks returned."""

    losses: dict[int, float]
    values: Sequence[dict[str, Any]]
    log: str


def ran(outcomes: Sequence[Outcome]) -> Ran:
    values = [outcome.ok() for outcome in outcomes]
    losses = {int(s): float(loss) for s, loss in re.findall(r"step (\d+): loss (\S+)", outcomes[0].log)}
    return Ran(losses, values, outcomes[0].log)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two daemons that compress small tensors too."""
    options = {"min_compress_bytes": "0"}
    with Cluster(tmp_path_factory.mktemp("examples"), nodes=2, options=options) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=EXAMPLES)
def both(request: pytest.FixtureRequest, cluster: Cluster) -> tuple[str, Ran, Ran]:
    """An example's name, what it came to through daemons and what without them."""
    ranks, argv = EXAMPLES[request.param]
    job: dict[str, Any] = {"script": request.param, "argv": argv}
    function = "tests.integration.example_workers:example"
    through = cluster.start(function, ranks, **job)
    without = cluster.start(function, ranks, environ={"GC_DISABLE": "1"}, **job)
    return request.param, ran(through.wait()), ran(without.wait())


def test_it_learns_and_replicas_are_the_same(both: tuple[str, Ran, Ran]) -> None:
    for found in both[1:]:
        first, *_, last = found.losses.values()
        assert last < first < 5, found.losses
        assert all(value["finite"] for value in found.values)
        half = len(found.values) // 2
        weights = [value["weights"] for value in found.values]
        assert weights[:half] == weights[half:]
        assert len(set(weights)) == half, "shards of one model differ"


def test_daemons_carry_it_compressed_and_the_switch_does_without_them(both: tuple[str, Ran, Ran]) -> None:
    script, through, without = both
    nodes = [value["stats"]["node"] for value in through.values]
    assert len(set(nodes)) == 2 and nodes == sorted(nodes)
    assert {value["stats"]["node"] for value in without.values} == {""}
    for value in through.values:
        carried = value["stats"]["steps"] or value["stats"]["calls"] / 2  # of HSDP: two modules a step
        assert carried >= 11, script
    assert through.losses[1] == without.losses[1], "weights and data are the same at first"
    assert {v["weights"] for v in through.values}.isdisjoint(v["weights"] for v in without.values), "codecs are lossy"
