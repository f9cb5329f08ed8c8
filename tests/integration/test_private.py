"""Private daemons, by `gcrun` and by GC_AUTOSTART: nobody starts them, and nothing is left of them."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from gcserver import copies
from gcserver.admin import gcctl
from gcserver.admin.exits import Exit
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT
from tests.integration.forked import ends_with_parent
from tests.integration.operators import until

WORKERS = "tests.integration.private_workers"
#: What gcrun runs: says where the daemon is, and ends by SIGUSR1 with status 7.
COMMAND = """
import json, os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
with open(sys.argv[1] + ".new", "w") as file:
    json.dump({"pid": os.getpid(), "socket": os.environ["GC_NODE_SOCKET"], "admin": os.environ["GC_NODE_ADMIN"]}, file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
while True:
    signal.pause()
"""


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Gcrun:
    """One `gcrun`, whose command has begun once this is made."""

    def __init__(self, folder: Path, **variables: str) -> None:
        said = folder / "said"
        folder.mkdir()
        environ = {k: v for k, v in os.environ.items() if not k.startswith("GC_")} | variables
        argv = [sys.executable, "-m", "gcserver.gcrun", "--plan.profiles", "", "--", sys.executable, "-c", COMMAND]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*argv, str(said)], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=ends_with_parent,
            )  # fmt: skip
        try:
            until("the command", lambda: said.exists() or self.process.poll() is not None)
            self.said = json.loads(said.read_text())
        except BaseException:
            self.process.kill()
            raise
        self.socket = Path(self.said["socket"])

    def daemon(self) -> int:
        """The daemon's process: its keeper's child."""
        (keeper,) = [p for p in _children(self.process.pid) if p != self.said["pid"]]
        (daemon,) = _children(keeper)
        return daemon


def test_two_machines_a_killed_daemon_and_both_ends_of_gcrun(tmp_path: Path) -> None:
    """Each gcrun is a machine; the ranks of the second share its daemon. One daemon is killed while they exchange; in
    the end one command leaves by itself, and the other's gcrun is killed."""
    runs = [Gcrun(tmp_path / name) for name in "ab"]
    cluster = Cluster(tmp_path / "workers", nodes=2)  # of its workers; its own daemons are never started
    try:
        for daemon, run in zip(cluster.daemons, runs, strict=True):
            daemon.socket = run.socket
            assert stat.S_IMODE(run.socket.parent.stat().st_mode) == 0o700
            assert run.said["admin"] == f"unix:{run.socket.parent}/admin.sock"
            assert _peers(run.said["admin"])[0] == Exit.OK, "operators are taken when the command begins"
        job = cluster.start(f"{WORKERS}:counting", [0, 1, 1], steps=30)
        job.wait_mark("step 10")
        os.kill(runs[0].daemon(), signal.SIGKILL)
        values = [outcome.ok() for outcome in job.wait(60)]
        assert [v["wrong"] for v in values] == [0, 0, 0]
        assert values[0]["reconnects"] >= 1

        runs[0].process.send_signal(signal.SIGUSR1)
        assert runs[0].process.wait(30) == 7, runs[0].log.read_text()
        assert not runs[0].socket.parent.exists()

        daemon = runs[1].daemon()
        runs[1].process.kill()
        until("the command to end with its gcrun", lambda: not _lives(runs[1].said["pid"]))
        until("the folder to go", lambda: not runs[1].socket.parent.exists())
        assert not _lives(daemon)
    finally:
        cluster.close()
        for run in runs:
            run.process.kill()
            run.process.wait()


def test_gcrun_ends_with_its_command_where_standard_streams_are_closed(tmp_path: Path) -> None:
    said = tmp_path / "said"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    gcrun = [sys.executable, "-m", "gcserver.gcrun", "--plan.profiles", "", "--"]
    command = ["sh", "-c", 'echo "$GC_NODE_SOCKET" > "$0"; exit 5', str(said)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GC_")}
    process = subprocess.Popen([*closed, *gcrun, *command], cwd=ROOT, env=environ, preexec_fn=ends_with_parent)
    try:
        assert process.wait(60) == 5
    finally:
        process.kill()
        process.wait()
    assert not Path(said.read_text().strip()).parent.exists()


def test_one_secret_is_all_that_machines_need_for_keys(tmp_path: Path) -> None:
    """Two that have it train encrypted, also after one daemon was killed; one with another secret and one without any
    are refused. Whoever looks at processes, logs and files finds keys at most, and those for the user alone."""
    secret, wrong = (letters * 20 for letters in ("5ec", "0dd"))
    given = {name: {"GC_JOB_SECRET": text} for name, text in zip("abc", (secret, secret, wrong), strict=True)}
    runs: list[Gcrun] = []
    cluster = Cluster(tmp_path / "workers", nodes=4)
    try:
        for name, daemon in zip("abcd", cluster.daemons, strict=True):
            runs.append(Gcrun(tmp_path / name, GC_LOG_LEVEL="debug", **given.get(name, {})))
            daemon.socket = runs[-1].socket
        job = cluster.start(f"{WORKERS}:counting", [0, 1], steps=30, pause=0.1)
        job.wait_mark("step 10")
        # Whoever knew of the job first was refused by the other; that it is not any more is told within a second.
        until("an encrypted connection", lambda: _peers(runs[0].said["admin"]) == (Exit.OK, [("up", True)]))
        os.kill(runs[0].daemon(), signal.SIGKILL)
        assert [outcome.ok()["wrong"] for outcome in job.wait(60)] == [0, 0]

        for other, words in ((2, "another key than this job's secret"), (3, "keys")):
            refused = cluster.run(f"{WORKERS}:counting", [0, other], steps=1)
            assert {o.error for o in refused} == {"NotAuthorised"}
            assert all(words in o.message and "GC_JOB_SECRET" in o.message for o in refused)

        folder = runs[0].socket.parent
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended
                assert secret.encode() not in path.read_bytes()
        for file in [runs[0].log, *(f for f in folder.rglob("*") if f.is_file())]:
            assert secret.encode() not in file.read_bytes(), file
        for lane in _children(runs[0].daemon()):
            variables = Path(f"/proc/{lane}/environ").read_bytes()
            assert secret.encode() not in variables
            is_lane = b"gcserver.runtime.lane" in Path(f"/proc/{lane}/cmdline").read_bytes()
            if is_lane and copies.around_caches(os.environ):  # glibc writes over the colon between two settings
                assert copies.SETTING.encode() in variables
        assert secret.encode() not in Path(f"/proc/{runs[0].said['pid']}/environ").read_bytes(), "nor has the command"
        assert [stat.S_IMODE(key.stat().st_mode) for key in folder.glob("*.key")] == [0o600]
    finally:
        cluster.close()
        for run in runs:
            run.process.kill()
            run.process.wait()


def _peers(admin: str) -> tuple[int, list[Any]]:
    """How gcctl ended, and (state, encrypted) of each peer."""
    said = io.StringIO()
    with redirect_stdout(said):
        status = gcctl.main(["--address", admin, "--timeout", "60s", "--json", "peers"])
    peers = json.loads(said.getvalue())["peers"] if status == Exit.OK else []
    return status, [(p["state"], p["encrypted"]) for p in peers]


def test_ranks_of_a_machine_share_the_daemon_that_one_of_them_starts(tmp_path: Path) -> None:
    """And a rank that is killed leaves nothing behind: neither the job, nor the daemon."""
    cluster = Cluster(tmp_path, nodes=1)
    environ = {"GC_AUTOSTART": "1", "GC_NODE_SOCKET": "", "GC_PLAN_PROFILES": ""}
    try:
        job = cluster.start(f"{WORKERS}:abandoned", [0, 0], environ=environ)
        left, killed = job.wait(60)
        value = left.ok()
        assert (value["total"], value["local"], value["error"]) == (3.0, 2, "WorkerLost")
        assert killed.status == -signal.SIGKILL
        assert job.workers[1].marks() == [value["socket"]]
        until("the folder to go", lambda: not Path(value["socket"]).parent.exists())
    finally:
        cluster.close()


def test_machines_that_start_their_own_daemons_meet_with_the_jobs_secret(tmp_path: Path) -> None:
    cluster, seen = Cluster(tmp_path, nodes=1), tmp_path / "seen"
    environ = {
        "GC_AUTOSTART": "1", "GC_NODE_SOCKET": "", "GC_PLAN_PROFILES": "", "GC_NODE_LISTEN": "tcp://127.0.0.1:0",
        "GC_JOB_SECRET": "5ec" * 20, "GC_TEST_SEEN": str(seen),
    }  # fmt: skip
    try:
        job = cluster.start(f"{WORKERS}:on_machines_of_their_own", [0, 0], environ=environ)
        until("both daemons", lambda: all(worker.marks() for worker in job.workers))
        folders = [Path(worker.marks()[0]).parent for worker in job.workers]
        assert folders[0] != folders[1]
        for admin in [f"unix:{folder}/admin.sock" for folder in folders]:
            # Who knew of the job first was refused by the other for a moment.
            until("an encrypted connection", lambda admin=admin: _peers(admin) == (0, [("up", True)]))
        seen.touch()
        assert [outcome.ok()["total"] for outcome in job.wait(60)] == [3.0, 3.0]
        until("the folders to go", lambda: not any(folder.exists() for folder in folders))
    finally:
        seen.touch()
        cluster.close()
