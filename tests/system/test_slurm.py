"""`deploy/slurm` under a real Slurm: a controller, and two slurmd as two nodes with addresses of their own.

What may live here: a job from sbatch to epilog. What may not: the machine (`machine.py`), keys and ports
(tests/unit/test_slurm_daemon.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.system.machine import ROOT, Machine, needs_nspawn

pytestmark = [
    pytest.mark.system,
    needs_nspawn,
    pytest.mark.skipif(
        any(shutil.which(name) is None for name in ("slurmd", "slurmctld", "munged", "sbatch")),
        reason="Slurm is not installed (Debian: slurmd slurmctld slurm-client munge)",
    ),
    pytest.mark.timeout(400),
]
SLURM: Final = ROOT / "deploy/slurm"
ALICE: Final = 2001
NODES: Final = {"n1": "127.0.1.1", "n2": "127.0.1.2"}
#: What is trained without torch.distributed.
BARE: Final = """
import torch
import gcclient

gcclient.init(deadline=60)
total = gcclient.push_pull(torch.tensor([gcclient.rank() + 1.0]), average=False)
print(f"rank {gcclient.rank()} of {gcclient.size()}: {float(total)}", flush=True)
"""
CONF: Final = """
ClusterName=trial
SlurmctldHost=trial(127.0.0.1)
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdSpoolDir=/var/spool/slurmd.%n
SlurmdPidFile=/run/slurmd.%n.pid
SlurmdLogFile=/var/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
Prolog=/etc/slurm/prolog.sh
Epilog=/etc/slurm/epilog.sh
TaskProlog=/etc/slurm/task_prolog.sh
PrologFlags=Alloc
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def install(machine: Machine) -> None:
    """As docs/deploy/slurm.md says."""
    root = machine.root
    slurm, gradcomm, share = root / "etc/slurm", root / "etc/gradcomm", root / "opt/gradcomm/share/slurm"
    for folder in (slurm, gradcomm, share, root / "etc/munge", root / "etc/sysusers.d"):
        folder.mkdir(parents=True)
    (root / "etc/sysusers.d/alice.conf").write_text(f"u alice {ALICE}\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost trial\n" + "".join(f"{a} {n}\n" for n, a in NODES.items()))
    lines = [
        f"NodeName={name} NodeHostname=trial NodeAddr={address} Port={port} CPUs=1 State=UNKNOWN"
        for port, (name, address) in enumerate(NODES.items(), 17001)
    ]
    (slurm / "slurm.conf").write_text("\n".join([CONF, *lines, ""]))
    # cgroups are not used; only looking which there are would fail where this machine has both kinds
    (slurm / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for name in ("prolog.sh", "epilog.sh", "task_prolog.sh"):
        shutil.copy(SLURM / name, slurm)
    shutil.copy(SLURM / "job_daemon.py", share)
    shutil.copy(SLURM / "gradcomm.conf", gradcomm / "slurm.conf")
    for path, size in ((gradcomm / "slurm.secret", 32), (root / "etc/munge/munge.key", 128)):
        path.write_bytes(os.urandom(size))
        path.chmod(0o400)
    cache = root / f"var/cache/gradcomm/slurm/{ALICE}"
    machine.fill_cache(cache / "kernels")
    for path in (cache, *cache.rglob("*")):
        os.chown(path, ALICE, ALICE)
    shutil.copy(SLURM / "train.sbatch", root / "opt")
    (root / "opt/job").mkdir()
    os.chown(root / "opt/job", ALICE, ALICE)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine"))
    install(made)
    made.mount(ROOT / "tests/system", "/opt/trial")
    try:
        made.boot()
        made.run("mkdir", "-p", "/run/munge", "/var/spool/slurmctld", "/var/log/munge", "/var/lib/munge")
        for address in NODES.values():
            made.run("ip", "address", "add", f"{address}/8", "dev", "lo")
        made.run("munged", "--force", "--key-file=/etc/munge/munge.key")
        made.run("slurmctld")
        for node in NODES:
            assert not made.run("slurmd", "-N", node, check=False), said(made)
        end = time.monotonic() + 90
        while made.run("sinfo", "--noheader", "--format=%T %D", check=False) != "idle 2":
            assert time.monotonic() < end, said(made)
            time.sleep(0.2)
        yield made
    finally:
        made.off()


def said(machine: Machine) -> str:
    """What Slurm wrote, for a failing test."""
    logs = sorted((machine.root / "var/log").glob("slurm*.log"))
    return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')}" for log in logs)


def run_job(machine: Machine, script: str, *arguments: str) -> str:
    """A job of alice's, from sbatch to its end and that of the epilog on both nodes; what it printed."""
    where = ["--chdir=/opt/job", "--output=/opt/job/out", "--export=ALL,PATH=/opt/gradcomm/bin:/usr/bin"]
    machine.run("sbatch", *where, script, *arguments, user="alice")
    end = time.monotonic() + 180
    while machine.run("squeue", "--noheader") or machine.run("sinfo", "--noheader", "--format=%T %D") != "idle 2":
        assert time.monotonic() < end, said(machine)
        time.sleep(0.1)
    return (machine.root / "opt/job/out").read_text()


def left(machine: Machine) -> list[str]:
    """What a job's end must not leave on any node."""
    folders = machine.run("find", "/run/gradcomm/slurm", "/dev/shm", "-mindepth", "1", "-name", "*.n[12]*")
    return [*folders.split(), *machine.run("pgrep", "-u", "alice", check=False).split()]


def test_a_job_has_daemons_with_keys_of_its_own_and_leaves_nothing(machine: Machine) -> None:
    printed = run_job(machine, "/opt/train.sbatch", "/opt/trial/slurm_worker.py", "/opt/job")
    files = [machine.root / f"opt/job/{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), printed + said(machine)
    found: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    for ours, theirs, result in zip(NODES, reversed(NODES), found, strict=True):
        assert result["sums"] == [3.0, 6.0, 9.0, 12.0] and result["user"] == "alice"
        (peer,) = result["peers"]
        assert (peer["name"], peer["encrypted"]) == (theirs, True), f"{ours} talks to {theirs}"
        assert peer["address"].startswith(f"tcp://{NODES[theirs]}:")
    changed = [len(set(result["lives"])) > 1 for result in found]
    assert changed == [False, True], "rank 1 killed its daemon after the first sum"
    assert left(machine) == []


def test_srun_alone_starts_ranks_that_meet(machine: Machine) -> None:
    """The commands of docs/deploy/slurm.md in a job of two tasks, without torchrun and without torch.distributed."""
    commands = re.findall(r"^```\n(.*?)^```", (ROOT / "docs/deploy/slurm.md").read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in commands if "srun python" in block]
    (machine.root / "opt/srun.sbatch").write_text(f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n{block}")
    (machine.root / "opt/job/train.py").write_text(BARE)
    printed = run_job(machine, "/opt/srun.sbatch")
    assert sorted(re.findall(r"rank \d of 2: .*", printed)) == [f"rank {r} of 2: 3.0" for r in range(2)], printed
    assert left(machine) == []


def test_two_trainings_of_one_job_can_have_names_of_their_own(machine: Machine) -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\nGC_JOB=mine srun -N1 -n1 printenv GC_JOB\n"
    (machine.root / "opt/names.sbatch").write_text(script + "srun -N1 -n1 printenv GC_JOB GC_NODE_SOCKET\n")
    mine, theirs, socket = run_job(machine, "/opt/names.sbatch").split()
    assert mine == "mine" and re.fullmatch(r"slurm-\d+", theirs)
    assert socket.startswith(f"/run/gradcomm/slurm/{theirs.removeprefix('slurm-')}.n")


def test_without_a_daemon_the_node_stays_in_service(machine: Machine) -> None:
    """A prolog that fails would have Slurm drain the node."""
    secret = machine.root / "etc/gradcomm/slurm.secret"
    secret.write_bytes(b"short")
    printed = run_job(machine, "/opt/train.sbatch", "/opt/trial/slurm_worker.py", "/opt/job")
    assert "NoDaemon" in printed, printed
    assert left(machine) == []
