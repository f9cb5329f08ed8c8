"""`deploy/systemd` on a machine that systemd has booted: what `make install-systemd` puts there, and what it does.

What may live here: the unit's life with real daemons and real training. What may not: what the machine is made of
(`machine.py`), what a daemon says to the service manager (tests/unit/runtime/test_servicemanager.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from gcserver import keys
from tests.system.machine import ROOT, Machine, needs_nspawn

pytestmark = [pytest.mark.system, needs_nspawn, pytest.mark.timeout(400)]
UNIT: Final = ROOT / "deploy/systemd/gradcomm@.service"
#: the users of the machine, each with a daemon: uid and port
USERS: Final = {"alice": (2001, 7470), "bob": (2002, 7480)}
STEPS: Final = 600
EXPOSURE: Final = 3.0


def install(machine: Machine) -> None:
    """What an administrator does, for two users and their nodes."""
    installed = machine.root.with_name("installed")
    subprocess.run(["make", "-s", "install-systemd", f"DESTDIR={installed}"], cwd=ROOT, check=True)
    machine.mount(installed / "usr/local/lib", "/usr/local/lib")
    users = "".join(f"u {name} {uid} - /home/{name}\n" for name, (uid, _) in USERS.items())
    (machine.root / "etc/sysusers.d").mkdir()
    (machine.root / "etc/sysusers.d/users.conf").write_text(users)
    folder = machine.root / "etc/gradcomm"
    folder.mkdir()
    peers = [f"{name}=tcp://127.0.0.1:{port}" for name, (_, port) in USERS.items()]
    pairs = [keys.generate(name) for name in USERS]
    (folder / "peers").write_text("".join(keys.line(pair.name, pair.public) + "\n" for pair in pairs))
    for pair in pairs:
        uid, port = USERS[pair.name]
        secret, _ = keys.write(pair, folder)
        os.chown(secret, uid, uid)
        (folder / f"{pair.name}.toml").write_text(
            f'node.name = "{pair.name}"\nnode.listen = "tcp://127.0.0.1:{port}"\nnode.metrics = ""\n'
            f'node.admin = "unix:/run/gradcomm/{pair.name}/admin.sock"\ncluster.peers = {json.dumps(peers)}\n'
            f'security.key = "/etc/gradcomm/{pair.name}.key"\nsecurity.peers = "/etc/gradcomm/peers"\n'
        )
        cache = machine.root / f"var/cache/gradcomm/{pair.name}"
        machine.fill_cache(cache / "kernels")
        for path in (cache, *cache.rglob("*")):
            os.chown(path, uid, uid)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine"))
    install(made)
    made.mount(ROOT / "tests/system", "/opt/trial")
    # the watchdog of the unit allows half a minute; only bob's lane hangs on purpose, and a busy machine is late
    quick = made.root / "etc/systemd/system/gradcomm@bob.service.d"
    quick.mkdir(parents=True)
    (quick / "quick.conf").write_text("[Service]\nWatchdogSec=5\n")
    try:
        made.boot()
        yield made
    finally:
        made.off()


def shown(machine: Machine, user: str, *names: str) -> list[str]:
    """Properties of a user's unit."""
    text = machine.run("systemctl", "show", f"gradcomm@{user}", *(f"--property={name}" for name in names))
    found = dict(line.split("=", 1) for line in text.splitlines())
    return [found[name] for name in names]


def until(what: str, holds: Callable[[], bool], within: float = 120.0) -> None:
    end = time.monotonic() + within
    while not holds():
        assert time.monotonic() < end, f"still not after {within:g} s: {what}"
        time.sleep(0.05)


def journal(machine: Machine, user: str, output: str = "cat") -> str:
    return machine.run("journalctl", "--no-pager", f"--output={output}", f"--unit=gradcomm@{user}")


@pytest.fixture
def seen(machine: Machine) -> Iterator[None]:
    """What the daemons said, which pytest shows where the test fails."""
    yield
    for user in USERS:
        print(f"-- {user}: NRestarts, SubState {shown(machine, user, 'NRestarts', 'SubState')}")
        print(journal(machine, user, "short-precise"))


def test_the_unit_is_accepted_and_little_exposed(tmp_path: Path) -> None:
    """By systemd's own judgement. It ends with 0 for a key it does not know, and says so on stderr."""
    gcserver = tmp_path / "gcserver"
    gcserver.symlink_to("/bin/true")
    subprocess.run(
        ["make", "-s", "install-systemd", f"DESTDIR={tmp_path}", f"GCSERVER={gcserver}"], cwd=ROOT, check=True
    )
    unit = tmp_path / "usr/local/lib/systemd/system/gradcomm@.service"
    instance = shutil.copy(unit, tmp_path / "gradcomm@alice.service")
    done = subprocess.run(["systemd-analyze", "verify", instance], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=100", instance], capture_output=True, text=True
    )
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposure and float(exposure[1]) <= EXPOSURE, done.stdout + done.stderr


def test_a_configuration_that_is_wrong_is_not_tried_again(machine: Machine) -> None:
    (machine.root / "etc/gradcomm/gradcomm.toml").write_text("node.lanes = 0\n")
    machine.run("systemctl", "start", "gradcomm@gradcomm", check=False)
    assert shown(machine, "gradcomm", "ActiveState", "ExecMainStatus", "NRestarts") == ["failed", "2", "0"]
    assert "node.lanes" in journal(machine, "gradcomm")
    assert machine.run("id", "--user", "--name", "gradcomm") == "gradcomm", "sysusers.d made the user"


def test_it_starts_and_says_so_and_what_it_leaves_is_its_own(machine: Machine) -> None:
    machine.run("systemctl", "start", "gradcomm@alice", "gradcomm@bob")
    for user, (uid, _) in USERS.items():
        assert shown(machine, user, "ActiveState", "SubState", "StatusText", "NRestarts", "LimitMEMLOCK") == [
            "active", "running", f"node {user}: serving", "0", "infinity",
        ]  # fmt: skip
        assert "ready: node" in journal(machine, user)
        for path in (f"run/gradcomm/{user}", f"var/cache/gradcomm/{user}", f"var/log/gradcomm/{user}"):
            assert machine.run("stat", "--format=%u %a", f"/{path}") == f"{uid} 700"
        status = machine.run("/opt/gradcomm/bin/gcctl", "--address", f"unix:/run/gradcomm/{user}/admin.sock", "status")
        assert "ready" in status
    assert "ermission denied" in machine.run("ls", "/run/gradcomm/alice", user="bob", check=False)
    machine.run("systemctl", "stop", "gradcomm@alice", "gradcomm@bob")
    assert machine.run("ls", "/dev/shm/gradcomm-2001") == "", "nothing was left to take up"


class Training:
    """alice's and bob's workers, one rank each, beside their daemons."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._folder = machine, machine.root / "opt/training"
        self._folder.mkdir()
        self._folder.chmod(0o777)
        script = ["/opt/gradcomm/bin/python", "/opt/trial/systemd_worker.py", "/opt/training", str(STEPS)]
        self._workers = []
        for rank, user in enumerate(USERS):
            environ = {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "GC_JOB": "training",
                       "GC_NODE_SOCKET": f"/run/gradcomm/{user}/daemon.sock"}  # fmt: skip
            with (self._folder / f"log{rank}").open("wb") as log:
                argv = machine.enter(script, user, environ)
                self._workers.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def step(self) -> int:
        """The last step of the second training that both have made."""
        logs = [self._folder / str(rank) for rank in range(len(USERS))]
        return min(log.read_text().count("\n") if log.exists() else 0 for log in logs)

    def go_on(self) -> None:
        """Until some steps more have been made; there must be some left."""
        wanted = self.step() + 20
        until(f"step {wanted}", lambda: self.step() >= wanted or any(w.poll() is not None for w in self._workers))
        assert self.step() < STEPS - 20, self.said()

    def said(self) -> str:
        return "".join((self._folder / f"log{rank}").read_text() for rank in range(len(USERS)))

    def digests(self) -> list[list[str]]:
        """After the remaining steps, which need not wait for anything any more."""
        (self._folder / "undisturbed").touch()
        assert [worker.wait(180) for worker in self._workers] == [0, 0], self.said()
        return [json.loads((self._folder / f"{rank}.json").read_text()) for rank in range(len(USERS))]

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()


@pytest.mark.usefixtures("seen")
def test_training_survives_what_happens_to_the_unit(machine: Machine) -> None:
    """kill -9, a lane that hangs, a stop and a start, a reload; the weights are those of training left alone."""
    peers = machine.root / "etc/gradcomm/peers"
    machine.run("systemctl", "start", "gradcomm@alice", "gradcomm@bob")
    training = Training(machine)
    try:
        training.go_on()

        machine.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "gradcomm@alice")
        until("alice's daemon is back", lambda: shown(machine, "alice", "NRestarts", "SubState") == ["1", "running"])
        training.go_on()

        (lane,) = machine.run("pgrep", "-u", "bob", "-f", "gcserver.runtime.lane").split()
        machine.run("kill", "-STOP", lane)
        until("bob's watchdog", lambda: shown(machine, "bob", "NRestarts", "SubState") == ["1", "running"])
        said = journal(machine, "bob")
        assert "lane 0 does not answer" in said and "Watchdog timeout" in said
        assert "Fatal Python error: Aborted" in said, "where it was is in the journal"
        training.go_on()

        machine.run("systemctl", "stop", "gradcomm@bob")
        assert shown(machine, "bob", "Result", "ExecMainStatus") == ["success", "0"]
        assert "leaving 1 running job(s)" in journal(machine, "bob")
        machine.run("systemctl", "start", "gradcomm@bob")
        training.go_on()

        (before,) = shown(machine, "alice", "MainPID")
        new = peers.with_name("new")
        new.write_text(peers.read_text() + keys.line("carol", keys.generate("carol").public) + "\n")
        new.replace(peers)
        machine.run("systemctl", "reload", "gradcomm@alice")
        until("the reload", lambda: "security.peers changed: admitted: carol" in journal(machine, "alice"))
        assert shown(machine, "alice", "MainPID", "SubState") == [before, "running"]
        training.go_on()

        found = training.digests()
    finally:
        training.kill()
    assert len({digest for digests in found for digest in digests}) == 1, found
    assert shown(machine, "alice", "NRestarts") == ["1"]
