"""The optimizer wrapper and groups through real daemons, against DDP with the hook."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.cluster import Cluster, parts

WORKERS = "tests.integration.optimizer_workers"
OPTIONS = "tests.integration.option_workers"
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
OPTION_FUNCTIONS: dict[str, dict[str, Any]] = {
    "compressed_in_part": {},
    "accumulated": {},
    "compiled": {"steps": 3},
    "steered": {},
}
OVERLAP = "tests.integration.overlap_workers"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each function came to on two ranks, one a node."""
    options = {"partition_bytes": str(256 << 10), "min_compress_bytes": "4KiB"}
    with Cluster(tmp_path_factory.mktemp("optimizer"), nodes=2, lanes=2, options=options) as cluster:
        functions = [(f"{WORKERS}:{name}", arguments) for name, arguments in FUNCTIONS.items()]
        functions += [(f"{OPTIONS}:{name}", arguments) for name, arguments in OPTION_FUNCTIONS.items()]
        functions += [(f"{OVERLAP}:early", {"path": str(cluster.folder / "begun")})]
        functions += [(f"{OVERLAP}:identical", {"steps": 3}), (f"{OPTIONS}:migrated", {})]
        outcomes = parts(cluster.run(SEVERAL, [0, 1], functions=functions))
    names = [*FUNCTIONS, *OPTION_FUNCTIONS, "early", "identical", "migrated"]
    return {name: [o.ok() for o in each] for name, each in zip(names, outcomes, strict=True)}


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


def test_what_is_excluded_and_what_is_warming_up_is_exact(found: dict[str, list[Any]]) -> None:
    for value in found["compressed_in_part"]:
        left_out = [n for n in value["names"] if n.endswith(".bias") or n in ("0.weight", "7.weight")]
        assert len(left_out) == 6 < len(value["names"])
        for by in ("wrapper", "ddp"):
            assert value["found"][by] == [value["names"]] * 2 + [left_out] * 3, by
        assert all(value["sums"])


def test_passes_add_up_however_that_is_asked_for(found: dict[str, list[Any]]) -> None:
    for value in found["accumulated"]:
        assert value["difference"] < 1e-6
        assert value["steps"] == 9
    assert found["accumulated"][0]["hashes"] == found["accumulated"][1]["hashes"]


def test_compiled_models_train_like_others(found: dict[str, list[Any]]) -> None:
    for value in found["compiled"]:
        assert value["compiled"] >= 2
        assert max(value["differences"]) < 1e-6 < 1e-3 < value["moved"]
    assert found["compiled"][0]["hashes"] == found["compiled"][1]["hashes"]


def test_a_scheduler_of_the_inner_optimizer_steers_every_rank(found: dict[str, list[Any]]) -> None:
    for value in found["steered"]:
        assert value["rates"] == [[0.025] * 2, [0.0125] * 2, [0.00625] * 2]
    assert found["steered"][0]["hash"] == found["steered"][1]["hash"]


def test_the_next_forward_pass_begins_before_the_last_average(found: dict[str, list[Any]]) -> None:
    first, second = found["early"]
    # Rank 1 had not computed that gradient, and rank 0 had used its first layer. Of the bias nothing is known.
    assert {"last.weight"} <= set(first["awaited"]) <= {"last.weight", "last.bias"}
    assert len({*first["hashes"], *second["hashes"]}) == 1, "with overlap and without, on both ranks"


def test_weights_are_the_same_bits_with_overlap_and_without(found: dict[str, list[Any]]) -> None:
    for name in found["identical"][0]:
        hashes = [h for value in found["identical"] for h in value[name]]
        if name != "compiled":
            assert len(set(hashes)) == 1, name
        else:
            assert hashes[1] == hashes[3], "on both ranks"


def test_the_examples_for_those_who_come_from_elsewhere_run(found: dict[str, list[Any]]) -> None:
    for i, (library, steps) in enumerate((("horovod", 10), ("byteps", 5))):
        one, other = (value[i] for value in found["migrated"])
        assert f"import {library}.torch" in one["line"]
        assert one["hash"] == other["hash"] and one["steps"] == steps
        assert one["average"] == other["average"] == pytest.approx((one["loss"] + other["loss"]) / 2)
    horovod, byteps = found["migrated"][0]
    assert horovod["losses"] == [value[0]["loss"] for value in found["migrated"]]
    assert byteps["losses"] == [2.0] * 4
