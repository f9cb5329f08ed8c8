"""The examples within other people's frameworks, which `make test-long` installs: Lightning, the Hugging Face Trainer,
TensorBoard, Weights & Biases. And all examples as the pages say to start them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.ports import free_ports
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT
from tests.integration.torchruns import torchruns

pytestmark = pytest.mark.long
#: nothing asks another host for anything
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = {"min_compress_bytes": "0"}
    with Cluster(tmp_path_factory.mktemp("frameworks"), nodes=2, options=options, know_peers=False) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said)]


def trained(cluster: Cluster, folder: Path, script: str, *arguments: str) -> list[dict[str, Any]]:
    """What each rank of an example came to, under one torchrun a node."""
    said = torchruns(
        cluster, folder, ROOT / "tests" / "integration" / "example_workers.py", (1, 1), (script, *arguments)
    )
    found = [json.loads((folder / f"found.{rank}").read_text()) for rank in (0, 1)]
    first, *_, last = losses(said)
    assert last < first < 6
    assert found[0]["weights"] == found[1]["weights"] and found[0]["finite"]
    assert [value["stats"]["node"] for value in found] == [daemon.name for daemon in cluster.daemons]
    return found


def test_lightning_trains_by_the_strategy(cluster: Cluster, tmp_path: Path) -> None:
    found = trained(cluster, tmp_path, "lightning_digits.py", "--steps=21")
    assert [value["stats"]["steps"] for value in found] == [21, 21]


def test_the_hugging_face_trainer_trains_by_the_callback(cluster: Cluster, tmp_path: Path) -> None:
    found = trained(cluster, tmp_path, "hf_trainer.py", "--steps=21", "--passes=2")
    assert [value["stats"]["steps"] for value in found] == [21, 21], "exchanges, not backward passes"


def test_tensorboard_gets_every_step(cluster: Cluster, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(cluster, tmp_path, "trackers.py", "--steps=21", f"--folder={tmp_path / 'runs'}")
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(1, 22))
    assert min(e.value for e in events.Scalars("gradcomm/gradient_bytes")) >= 4.0 * (256 * 256 + 256 + 256 * 10 + 10)
    assert sum(e.value for e in events.Scalars("gradcomm/wait_seconds")) > 0
    assert [e.step for e in events.Scalars("gradcomm/error")] == [10, 20]
    assert all(0 < e.value < 5 for e in events.Scalars("gradcomm/error"))


def test_weights_and_biases_gets_every_step(cluster: Cluster, tmp_path: Path) -> None:
    trained(cluster, tmp_path, "trackers.py", "--to=wandb", "--steps=21", f"--folder={tmp_path / 'runs'}")
    (run,) = (tmp_path / "runs" / "wandb").glob("offline-run-*/run-*.wandb")
    raw = run.read_bytes()
    for name in ("loss", "gradcomm/wait_seconds", "gradcomm/error"):
        assert name.encode() in raw


def ends_well(argv: list[str], timeout: float) -> str:
    """What a command printed, which ends with status 0."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GC_")}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        argv, env=clean, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


PAGES = (ROOT / "docs" / "examples.md").read_text()
COMMANDS = re.findall(r"^gcrun -- torchrun .* (examples/\w+\.py)(.*)$", PAGES, re.MULTILINE)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("script", "rest"), COMMANDS, ids=[script for script, _ in COMMANDS])
def test_a_private_daemon_serves_it_as_the_page_says(script: str, rest: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "gcclient.run", "--", sys.executable, "-m", "torch.distributed.run"]
    argv += ["--nproc-per-node=2", f"--master-port={free_ports(1)}", script, *rest.split(), "--steps=11"]
    found = losses(ends_well(argv, 200))
    assert len(found) >= 2 and found[-1] < found[0]
