"""DDP models in shards whose nodes' workers send each other encoded gradients, through two real daemons.

What may live here: what takes several workers of a node. What may not: messages and residuals by themselves
(`tests/unit/client/test_node_codec.py`), what is the same without a codec (`test_hierarchy.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.cluster import Cluster, Outcome
from tests.integration.shards import EVEN, MORE, UNEVEN, check_a_kill_changes_no_bit, run_several, two_nodes

WORKERS = "tests.integration.node_codec_workers"
CODECS = ["onebit", "topk(ratio=0.1)", "qsgd(bits=4)+ef", "randomk(ratio=0.2)"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_nodes(tmp_path_factory.mktemp("within")) as cluster:
        yield cluster


def _conserved(outcomes: list[Outcome], least: float = 0.1) -> list[dict[str, Any]]:
    values = [o.ok() for o in outcomes]
    assert len({v["hash"] for v in values}) == 1, "replicas differ"
    for value in values:
        assert value["off"] < 1e-3, "delivered and held back is not what was brought"
        assert value["held"] > least < value["first"], "nothing was held back"
    return values


def test_what_was_delivered_and_is_held_back_is_what_was_brought(pair: Cluster) -> None:
    functions = [(f"{WORKERS}:conserved", {"node_codec": codec, "steps": 6}) for codec in CODECS]
    functions += [(f"{WORKERS}:conserved", {"node_codec": "fp16", "steps": 2})]
    *found, half = run_several(pair, EVEN, functions)
    for outcomes, share in zip(found, [1 / 32, 0.2, 0.13, 0.2], strict=True):
        for value in _conserved(outcomes):
            dense = 4 * value["elements"] / 2
            assert value["sent"] < share * dense * 1.1 + 1000
    for outcome in half:  # holds nothing back
        value = outcome.ok()
        assert value["held"] == 0 and value["off"] < 1e-2 and value["sent"] < 0.51 * 4 * value["elements"] / 2 + 1000


@pytest.mark.parametrize("ranks", [UNEVEN, pytest.param(MORE, marks=pytest.mark.long)])
def test_nodes_with_unequal_numbers_of_workers(pair: Cluster, ranks: list[int]) -> None:
    functions = [(f"{WORKERS}:conserved", {"node_codec": codec, "steps": 4}) for codec in CODECS[:2]]
    functions.append((f"{WORKERS}:void", {"node_codec": "topk(ratio=0.1)"}))
    one, top, void = run_several(pair, ranks, functions)
    _conserved(one)
    _conserved(top)
    _check_void(void)


def test_halves(pair: Cluster) -> None:
    """What is delivered is rounded to a half in every step; so it is off by that much."""
    (found,) = run_several(
        pair, EVEN, [(f"{WORKERS}:conserved", {"node_codec": "onebit", "steps": 3, "dtype": "bfloat16"})]
    )
    values = [o.ok() for o in found]
    assert len({v["hash"] for v in values}) == 1
    for value in values:
        assert value["off"] < 0.05 and value["held"] > 0.5


def _check_void(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        value = outcome.ok()
        assert value["finite"] == [False]
        assert value["hashes"][0] == value["hashes"][1], "a void step left something behind"
    assert len({o.ok()["hashes"][0] for o in outcomes}) == 1


def test_a_void_step_leaves_no_residual_behind_on_any_worker(pair: Cluster) -> None:
    """The last rank's gradient is not finite: only its own node's other worker is sent that."""
    found = run_several(
        pair, EVEN, [(f"{WORKERS}:void", {"node_codec": codec}) for codec in ("onebit", "topk(ratio=0.1)")]
    )
    for outcomes in found:
        _check_void(outcomes)


def test_a_warm_up_and_what_is_left_out(pair: Cluster) -> None:
    (found,) = run_several(pair, EVEN, [(f"{WORKERS}:options", {})])
    for outcome in found:
        warm, other = outcome.ok()["exact"][:2], outcome.ok()["exact"][2:]
        assert warm == [[True] * 7] * 2
        # What is few goes as it is too; one part of "weights.5" is encoded, in two.
        assert other == [[False, True, True, True, True, False, True]] * 2


@pytest.mark.parametrize(
    ("ranks", "node_codec", "compression"),
    [
        (EVEN, "onebit", "topk(ratio=0.02)"),
        (EVEN, "qsgd(bits=4)+ef", "qsgd(bits=4)+ef"),
        (EVEN, "randomk(ratio=0.1)", "none"),
        (UNEVEN, "onebit", "topk(ratio=0.02)"),
        pytest.param(UNEVEN, "qsgd(bits=4)+ef", "qsgd(bits=4)+ef", marks=pytest.mark.long),
        pytest.param(UNEVEN, "randomk(ratio=0.1)", "none", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_goes_on_to_the_bit(pair: Cluster, ranks: list[int], node_codec: str, compression: str) -> None:
    (found,) = run_several(
        pair, ranks, [(f"{WORKERS}:resumed", {"node_codec": node_codec, "compression": compression})]
    )
    dropped = 0
    for rank, outcome in enumerate(found):
        value = outcome.ok()
        assert value["undisturbed"] == value["again"] != value["fresh"]
        assert value["lost"] != value["undisturbed"]
        assert value["kept"]
        assert value["later"] == value["keys"]
        assert all(key.startswith(f"rank {rank}/ddp.0/node") for key in value["keys"])
        if len(value["keys"]) > 1:
            assert f"node_codec={node_codec!r} held something back, and none is given now" in value["without"]
        assert value["dropped"][0]
        dropped += value["dropped"][1]
    assert dropped
    if ranks == EVEN:
        assert all(len(o.ok()["keys"]) == 4 for o in found), "three parameters have parts of other workers"


@pytest.mark.parametrize(("ranks", "odd"), [(EVEN, 3), (UNEVEN, 2)])
@pytest.mark.parametrize("other", ["onebit+ef(decay=0.9)", None])
def test_all_ranks_ask_for_the_same(pair: Cluster, ranks: list[int], odd: int, other: str | None) -> None:
    for outcome in pair.run(f"{WORKERS}:differing", ranks, odd=odd, other=other):
        assert "within nodes onebit" in outcome.ok()["told"]


@pytest.mark.long
def test_a_killed_daemon_changes_no_bit(tmp_path_factory: pytest.TempPathFactory) -> None:
    check_a_kill_changes_no_bit(tmp_path_factory, f"{WORKERS}:training", "step 8", node_codec="onebit", steps=20)
