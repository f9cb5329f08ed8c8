"""The second half of docs/start.md as it stands, on two machines with systemd and a link: keys, daemons, training.

What may live here: the page's commands in their order, and what they have to lead to. What may not: what the unit does
when it is disturbed (`test_systemd.py`), the page's script by itself (`integration/test_client_torchrun.py`).

Environments are those of `machine.py`, since pip would need the network; all else is done as the page has it. The
machines give their own names to 127.0.1.1, as Debian's installer does.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.system.machine import CABLE, ROOT, Machine, link, needs_nspawn

pytestmark = [pytest.mark.system, needs_nspawn, pytest.mark.timeout(600)]
ADDRESSES: Final = {"a": "10.9.0.1", "b": "10.9.0.2"}
ALICE: Final = 2001
PAGE: Final = (ROOT / "docs/start.md").read_text()
#: "1" to "7", and what is below that heading
STEPS: Final = dict(re.findall(r"^### (\d)\. (.*?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL))
#: commands that the machines cannot run, and do not need to
INSTALLS: Final = re.compile(r"^(python3 -m venv /opt/gradcomm|(/opt/gradcomm/bin/)?pip install .*)\n", re.MULTILINE)
WITHIN: Final = 240.0


def blocks(step: str, node: str, kind: str = "") -> list[str]:
    """The blocks of a step with what is in capitals filled in, and on b with what the page says of it."""
    found = []
    for block in re.findall(rf"^```{kind}\n(.*?)^```", STEPS[step], re.MULTILINE | re.DOTALL):
        text = INSTALLS.sub("", block).replace("--node-rank=RANK", f"--node-rank={'ab'.index(node)}")
        if node == "b":
            text = text.replace("--name a", "--name b").replace("a.key", "b.key").replace('name = "a"', 'name = "b"')
            text = text.replace("tcp://ADDRESS_A", "tcp://ADDRESS_B")
        text = text.replace("ADDRESS_A", ADDRESSES["a"]).replace("ADDRESS_B", ADDRESSES["b"])
        found.append(text.replace("INTERFACE", CABLE))
    return found


class Nodes:
    """a and b."""

    def __init__(self, folder: Path) -> None:
        self.machines = {}
        for name in ADDRESSES:
            (folder / name / "local").mkdir(parents=True)
            machine = self.machines[name] = Machine(folder / name, name)
            machine.mount(folder / name / "local", "/usr/local", writable=True)
            machine.mount(ROOT, "/root/gradcomm")
            etc, home = machine.root / "etc", machine.root / "home/alice"
            (etc / "sysusers.d").mkdir()
            (etc / "sysusers.d/users.conf").write_text(f"u alice {ALICE} - /home/alice\n")
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
            # a file of somebody else's with which systemd is not content, as there may be on any machine
            (etc / "tmpfiles.d").mkdir()
            (etc / "tmpfiles.d/other.conf").write_text("d /run/other 0755 nobody-here - -\n")
            home.mkdir(parents=True)
            kernels = machine.root / "var/cache/gradcomm/alice/kernels"
            machine.fill_cache(kernels)
            own = [home, kernels.parent, *kernels.parent.rglob("*")]
            subprocess.run(["chown", f"{ALICE}:{ALICE}", *own], check=True)

    def boot(self) -> None:
        for machine in self.machines.values():
            machine.boot()
        link({f"{ADDRESSES[name]}/24": machine for name, machine in self.machines.items()})

    def as_root(self, name: str, block: str) -> str:
        """What a block printed. Every line of it has to succeed."""
        return self.machines[name].run("bash", "-ec", f"cd /root/gradcomm\n{block}")

    def as_alice(self, name: str, block: str) -> list[str]:
        """What runs a block as alice, in the environment that she trains in. Every line has to succeed."""
        environ = {"PATH": "/opt/gradcomm/bin:/usr/bin", "HOME": "/home/alice", "OMP_NUM_THREADS": "1"}
        return self.machines[name].enter(["bash", "-ec", f"cd ~\n{block}"], "alice", environ)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("start"))
    try:
        made.boot()
        yield made
    finally:
        for machine in made.machines.values():
            machine.off()


def until(what: str, holds: Callable[[], bool], said: Callable[[], str]) -> None:
    end = time.monotonic() + WITHIN
    while not holds():
        assert time.monotonic() < end, f"still not after {WITHIN:g} s: {what}\n{said()}"
        time.sleep(0.2)


def test_the_page_leads_to_a_cluster_that_trains(nodes: Nodes, tmp_path: Path) -> None:
    for name in ADDRESSES:
        (install,), (keygen, peers) = blocks("1", name), blocks("2", name)
        nodes.as_root(name, install)
        assert f"/etc/gradcomm/{name}.key" in nodes.as_root(name, keygen)
    etc = {name: machine.root / "etc/gradcomm" for name, machine in nodes.machines.items()}
    (etc["b"] / "a.pub").write_text((etc["a"] / "a.pub").read_text())
    (etc["a"] / "b.pub").write_text((etc["b"] / "b.pub").read_text())
    export = blocks("4", "a")[1].partition("/opt")[0]
    for name in ADDRESSES:
        nodes.as_root(name, peers)
        (etc[name] / "alice.toml").write_text(*blocks("3", name, "toml"))
        start, ask = blocks("4", name)
        assert f"node {name}: serving" in nodes.as_root(name, start)
        asked = subprocess.run(nodes.as_alice(name, ask), capture_output=True, text=True, timeout=WITHIN)
        assert asked.returncode == 0 and "ok    keys           " in asked.stdout, asked.stdout + asked.stderr
        assert "ok    logout" in asked.stdout, "alice's memory outlives her sessions"
    assert (etc["a"] / "peers").read_text() == (etc["b"] / "peers").read_text()

    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    logs = {name: tmp_path / name for name in ADDRESSES}
    training = []
    for name, machine in nodes.machines.items():
        (machine.root / "home/alice/train.py").write_text(script.replace("range(300)", "range(30_000)"))
        (train,) = blocks("5", name)
        with logs[name].open("wb") as log:
            argv = nodes.as_alice(name, train)
            training.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def said() -> str:
        return "".join(log.read_text() for log in logs.values())

    ended = [None, None]
    until("step 100", lambda: "step 100: loss" in said() or [one.poll() for one in training] != ended, said)
    assert [one.poll() for one in training] == ended, said()
    (look,) = blocks("6", "b")
    seen = subprocess.run(nodes.as_alice("b", export + look), capture_output=True, text=True, timeout=WITHIN)
    assert seen.returncode == 0, seen.stdout + seen.stderr
    (peer,) = re.findall(r"^a .*", seen.stdout, re.MULTILINE)
    assert " up " in peer and " yes " in peer
    assert re.search(r"^state +running$", seen.stdout, re.MULTILINE) and "2 (a: 0; b: 1)" in seen.stdout
    for one in training:
        one.kill()
        one.wait()
