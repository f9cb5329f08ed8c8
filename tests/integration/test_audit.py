"""Audits of a model's steps through real daemons: what they find, what they change, and what they leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, Outcome, parts
from tests.integration.operators import ask, reachable, series, until

WORKERS = "tests.integration.audit_workers"
TOPK = "topk(ratio=0.01)"
#: codec, every, window, whether by the optimizer wrapper
AUDITS = {
    "none": ("none", 3, 1, False),
    "one step": (TOPK, 3, 1, False),
    "dense sums": ("none", 4, 3, False),
    "sums": (TOPK, 8, 8, False),
    "wrapper": (TOPK, 3, 2, True),
    "wrapper, none": ("none", 3, 1, True),
}
STEPS = 9


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, options = tmp_path_factory.mktemp("audit"), {"partition_bytes": str(256 << 10)}
    with reachable(Cluster(folder, nodes=2, lanes=2, options=options), metrics=True) as made:
        yield made


@pytest.fixture(scope="module")
def found(cluster: Cluster) -> dict[str, list[Outcome]]:
    """What the functions below came to on three ranks, two of them on one node."""
    functions: dict[str, tuple[str, dict[str, Any]]] = {
        name: (
            f"{WORKERS}:audited",
            {"compression": codec, "every": every, "steps": STEPS, "window": window, "wrapper": wrapper},
        )
        for name, (codec, every, window, wrapper) in AUDITS.items()
    }
    for name, wrapper in (("unchanged", False), ("wrapper unchanged", True)):
        functions[name] = (f"{WORKERS}:unchanged", {"compression": TOPK, "steps": 6, "wrapper": wrapper})
    functions["overflow"] = (f"{WORKERS}:overflow", {"bad": 3, "steps": 9})
    functions["on_one_rank_only"] = (f"{WORKERS}:on_one_rank_only", {})
    outcomes = cluster.run("tests.integration.cluster:several", [0, 0, 1], functions=list(functions.values()))
    return dict(zip(functions, parts(outcomes), strict=True))


@pytest.mark.parametrize("name", AUDITS)
def test_an_audit_finds_what_gradients_known_here_say(found: dict[str, list[Outcome]], name: str) -> None:
    codec, every, window, wrapper = AUDITS[name]
    # With DDP the audit of a step is made when the next one begins.
    late = 0 if wrapper else 1
    steps = [(step - late) // every * every for step in range(1, STEPS + 1)]
    for outcome in found[name]:
        value = outcome.ok()
        assert [r["step"] if r else 0 for r in value["found"]] == steps
        assert [r["audits"] if r else 0 for r in value["found"]] == [step // every for step in steps]
        for report in value["found"][every - 1 + late :: every]:
            error, cosine, ratio = value["expected"][report["step"] - 1]
            assert (report["window"], report["domain"]) == (window, "optimizer.0" if wrapper else "ddp.0")
            if codec == "none":
                assert (report["error"], report["ratio"]) == (0.0, 1.0) and report["cosine"] == pytest.approx(1.0)
                continue
            assert 0.3 < report["error"] == pytest.approx(error, rel=1e-3)
            assert report["cosine"] == pytest.approx(cosine, rel=1e-3)
            assert report["ratio"] == pytest.approx(ratio, rel=1e-3)
            tensors = value["tensors"][report["step"] - 1]
            # Of some nothing was sent: their errors are equal, and their order says nothing.
            worst = sorted((error for error, _, _ in tensors.values()), reverse=True)
            assert [t["error"] for t in report["worst"]] == pytest.approx(worst[:8], rel=1e-3)
            assert len({t["name"] for t in report["worst"]}) == 8
            for t in report["worst"]:
                assert [t["error"], t["cosine"], t["ratio"]] == pytest.approx(tensors[t["name"]], rel=1e-3, abs=1e-6)


def test_what_error_feedback_postpones_is_in_the_sums(found: dict[str, list[Outcome]]) -> None:
    sums, single = (found[name][0].ok()["found"][-1] for name in ("sums", "one step"))
    assert sums["error"] < 0.9 * single["error"]


def test_every_rank_finds_the_same(found: dict[str, list[Outcome]]) -> None:
    first, *others = (o.ok()["found"] for o in found["one step"])
    for other in others:
        assert other == first


@pytest.mark.parametrize("name", ["unchanged", "wrapper unchanged"])
def test_training_is_the_same_bits_with_and_without(found: dict[str, list[Outcome]], name: str) -> None:
    for outcome in found[name]:
        without, audited = outcome.ok()
        assert without == audited


def test_a_void_step_is_skipped(found: dict[str, list[Outcome]]) -> None:
    for outcome in found["overflow"]:
        *before, last = outcome.ok()
        assert before == [None] * 8, "step 3 was void, and steps 3 and 4 are audited together"
        assert (last["step"], last["error"], last["audits"], last["skipped"]) == (8, 0.0, 1, 1)


def test_audits_on_some_ranks_only_are_an_error_on_all(found: dict[str, list[Outcome]]) -> None:
    for outcome in found["on_one_rank_only"]:
        assert "audit=5" in outcome.ok() and "audit=0" in outcome.ok()


@pytest.mark.slow
def test_too_large_an_error_makes_the_job_dense(cluster: Cluster, tmp_path: Path) -> None:
    a, b = cluster.daemons
    job = cluster.start(
        f"{WORKERS}:until_stopped",
        [1, 0],  # who decides is not on the node that is asked first
        job="audited",
        environ={"GC_AUDIT": "every=2, limit=0.3, action=dense"},
        compression=TOPK,
        stop=str(tmp_path / "stop"),
    )
    job.wait_mark("dense")
    plans = []
    for daemon in (a, b):
        plan = ask(daemon, "plan", "--job", "audited")
        assert [(r["pattern"], r["codec"]) for r in plan["rules"]] == [("*", "none")]
        (domain,) = [d for d in plan["domains"] if d["label"] == "ddp.0"]
        assert {g["codec"] for g in domain["groups"]} == {"none"}
        assert {t["codec"] for t in ask(daemon, "tensors", "--domain", "ddp.0")["tensors"]} == {"none"}
        plans.append((domain["plan_version"], domain["since_step"]))
        numbers = until("the audits' numbers", lambda daemon=daemon: _if_audited(series(daemon)))
        assert numbers["audit_error{training_job=audited}"] == 0 and numbers["audit_total{training_job=audited}"] > 3
    (tmp_path / "stop").touch()
    first, second = job.wait()
    assert plans[0] == plans[1] == (1, first.ok()["dense_from"])
    assert first.ok()["hash"] == second.ok()["hash"] and first.ok()["errors"] == second.ok()["errors"]
    for step, error in first.ok()["errors"]:
        # The first dense step also delivers what was held back before.
        assert error == 0 if step > first.ok()["dense_from"] else error > 0.3
    assert first.ok()["errors"][0][0] == 2 < first.ok()["dense_from"] < 10
    assert f"uncompressed from step {first.ok()['dense_from']} on (plan 1)" in first.log
    assert "above the limit of 0.3; asking the daemon" in first.log and "audit of ddp.0" not in second.log
    assert b.text().count("asking for an uncompressed plan") == 1 and "asking for" not in a.text()
    until("its series to go", lambda: not any("training_job=audited" in name for name in series(b)))


def _if_audited(numbers: dict[str, float]) -> dict[str, float]:
    return numbers if numbers.get("audit_error{training_job=audited}") == 0 else {}
