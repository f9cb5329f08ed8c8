"""The example for Ray Train, on a real Ray, which `make test-long` installs: a daemon on each node, and nothing left of
them, whoever ends first."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.daemon import ROOT
from tests.integration.operators import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # a dozen processes, most of which import torch or more
SCRIPT = ROOT / "examples" / "ray_train.py"
#: In the environment of Ray's nodes, and so of all that is started there.
MARK = "GRADCOMM_TEST_RAY"


@dataclass(frozen=True, slots=True)
class Process:
    """One that gradcomm started on a node of Ray."""

    pid: int
    parent: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nodes:
    """A Ray cluster. ``environ``: by which a program finds it. ``mark``: the value of MARK there."""

    environ: dict[str, str]
    mark: str

    def processes(self) -> list[Process]:
        """Those of gradcomm: gcrun, what it runs and that runs, keepers, daemons, lanes."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                words = tuple(os.fsdecode(word) for word in (folder / "cmdline").read_bytes().split(b"\0"))
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended, or is another user's
                continue
            if any(word.startswith("gcserver.") or "gradcomm-ray-" in word for word in words):
                found.append(Process(int(folder.name), parent, words))
        return found

    @contextmanager
    def driver(self, folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """The example, started as a user would, and the file of what it prints."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("GC_")}
        environ |= {**self.environ, "RAY_DEDUP_LOGS": "0"}
        argv = [sys.executable, str(SCRIPT), "--results", str(folder / "results"), *arguments]
        said = folder / "said"
        with said.open("wb") as log:
            process = subprocess.Popen(argv, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield process, said
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    """What Ray's processes are started with."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # not tmp_path: paths of sockets are short
        yield {
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            MARK: secrets.token_hex(8),
        }


@contextmanager
def cluster(environ: dict[str, str]) -> Iterator[Nodes]:
    """Two nodes with room for two workers and for one. Each has a loopback address of its own: by addresses Ray Train
    tells which workers share a node."""
    from ray.cluster_utils import Cluster

    def node(number: int, workers: int) -> dict[str, object]:
        return {"node_ip_address": f"127.0.0.{number}", "num_cpus": workers, "object_store_memory": 100 << 20}

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        made = Cluster(initialize_head=True, head_node_args={**node(2, 2), "include_dashboard": False})
        try:
            made.add_node(**node(3, 1))
            yield Nodes({**environ, "RAY_ADDRESS": made.address}, environ[MARK])
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def nodes(environ: dict[str, str]) -> Iterator[Nodes]:
    with cluster(environ) as made:
        yield made


def training(said: Path) -> set[str]:
    """Which processes have printed a loss of the eleventh step: of each attempt rank 0."""
    return set(re.findall(r"pid=(\d+).*step 11: loss", said.read_text()))


def folders(processes: list[Process]) -> set[Path]:
    """What lies on disk for them: the folders of the daemons, and of their keys."""
    keepers = [p.words for p in processes if "gcserver.keeper" in p.words]
    keys = {Path(words[words.index("--security.key") + 1]).parent for words in keepers}
    return keys | {Path(words[words.index("gcserver.keeper") + 1]) for words in keepers}


def some_worker(processes: list[Process]) -> int:
    """A worker that started a daemon."""
    return next(p.parent for p in processes if "gcserver.gcrun" in p.words)


def trained(nodes: Nodes, folder: Path, *arguments: str) -> list[str]:
    """The daemon of each rank of a run in good order."""
    with nodes.driver(folder, *arguments, "--steps=51") as (driver, said):
        assert driver.wait(300) == 0, said.read_text()
    assert nodes.processes() == [], "the trainer returned before they had ended"
    said_last = r"^rank (\d): node (\S+), loss (\S+) to (\S+), weights (\w+)$"
    ranks = re.findall(said_last, said.read_text(), re.MULTILINE)
    assert [int(rank) for rank, *_ in ranks] == list(range(len(ranks))), said.read_text()
    assert all(float(last) < float(first) / 2 for _, _, first, last, _ in ranks), ranks
    assert len({weights for *_, weights in ranks}) == 1, ranks
    return [node for _, node, *_ in ranks]


def test_without_a_cluster_it_runs_as_the_page_says(environ: dict[str, str], tmp_path: Path) -> None:
    # Ray would leave a token of its own in the user's home.
    environ = {**environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    page = (ROOT / "docs" / "examples.md").read_text()
    (command,) = re.findall(r"^python examples/ray_train.py (.*)$", page, re.MULTILINE)
    first, second = trained(Nodes(environ, environ[MARK]), tmp_path, *command.split())
    assert first == second, "one node has one daemon"


def test_where_nodes_have_a_secret_keys_come_from_it(environ: dict[str, str], tmp_path: Path) -> None:
    """Before the other cluster is there: both have the same addresses."""
    secret = secrets.token_hex(32)
    with (
        cluster({**environ, "GC_JOB_SECRET": secret}) as nodes,
        nodes.driver(tmp_path, "--workers=3", "--steps=1000000") as (driver, said),
    ):
        until("training", lambda: driver.poll() is not None or training(said), 200)
        running = nodes.processes()
        left = folders(running)
        assert len(left) == 2, f"a daemon's key lies in its own folder; {said.read_text()}"
        lists = [folder / "peers" for folder in left]
        assert all(len(listed.read_text().splitlines()) == 2 for listed in lists), "each admits the other"
        assert secret not in str(running) and secret not in said.read_text()
        driver.kill()
        driver.wait()
        until("gradcomm's processes to end", lambda: not nodes.processes())
    assert not any(folder.exists() for folder in left)


def test_each_node_has_a_daemon_of_its_own(nodes: Nodes, tmp_path: Path) -> None:
    names = trained(nodes, tmp_path, "--workers=3")
    # which of the nodes is Ray's first is Ray's affair
    assert sorted(names.count(name) for name in set(names)) == [1, 2], names


def test_a_lost_worker_ends_all_daemons_and_a_retry_has_others(nodes: Nodes, tmp_path: Path) -> None:
    """Ray kills the other workers, of both nodes, and begins anew; when that is lost too, the trainer fails."""
    with nodes.driver(tmp_path, "--workers=3", "--steps=1000000", "--retries=1") as (driver, said):
        left = set()
        for attempt in (1, 2):
            until("training", lambda n=attempt: driver.poll() is not None or len(training(said)) == n, 200)
            running = nodes.processes()
            assert len(folders(running)) == 4, said.read_text()
            assert not any(folder.exists() for folder in left), "of the first attempt"
            left |= folders(running)
            os.kill(some_worker(running), signal.SIGKILL)
        assert driver.wait(120) != 0
    until("gradcomm's processes to end", lambda: not nodes.processes())
    assert len(left) == 8 and not any(folder.exists() for folder in left)


def test_nothing_is_left_of_a_killed_driver(nodes: Nodes, tmp_path: Path) -> None:
    with nodes.driver(tmp_path, "--workers=3", "--steps=1000000") as (driver, said):
        until("training", lambda: driver.poll() is not None or training(said), 200)
        left = folders(nodes.processes())
        assert len(left) == 4, said.read_text()
        driver.kill()
        driver.wait()
        until("gradcomm's processes to end", lambda: not nodes.processes())
    assert not any(folder.exists() for folder in left)
