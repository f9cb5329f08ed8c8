"""A machine of its own to install gradcomm on: a real systemd, booted in a container over this machine's /usr.

What may live here: what the machine is made of, booting it, a link to another one, running commands in it, turning it
off. What may not: what is installed from `deploy/`, assertions.

systemd-nspawn starts it from an empty root with /usr and this interpreter mounted read-only, so that a boot takes a
second and downloads nothing. gradcomm lies under /opt/gradcomm as `python -m venv` and `pip install` would lay it out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
from numba.core.caching import UserProvidedCacheLocator

from gcserver.codecs.warmup import kernels
from gcserver.planner.warmup import KERNELS
from tests.integration.forked import ends_with_parent

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = {"gcserver": "gcserver", "gcclient": "gcclient", "gcproto": "proto"}
BOOTS_WITHIN: Final = 120.0
#: from the end of its processes to that of its control groups, seconds
ENDS_WITHIN: Final = 30.0
#: how a machine calls its end of a link to another one
CABLE: Final = "cable"
needs_nspawn = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("systemd-nspawn") is None,
    reason="systemd-nspawn needs root, and to be installed (Debian: systemd-container)",
)


class Group:
    """A control group of version 2, below the one that this process is in, where there is version 2.

    A systemd takes everything below its group for its own: two machines in one would end each other's services.
    """

    def __init__(self, name: str) -> None:
        ours = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        #: by kind of hierarchy; systemd-nspawn makes the same one in those of version 1 that are systemd's
        self._paths = [(kind, Path(where + path) / name) for _, where, kind, *_ in mounts for path in ours]
        for path in self._version_2():
            path.mkdir()

    def _version_2(self) -> list[Path]:
        return [path for kind, path in self._paths if kind == "cgroup2"][:1]

    def enter(self) -> None:
        """The calling process becomes a member."""
        for path in self._version_2():
            (path / "cgroup.procs").write_text("0")

    def remove(self) -> None:
        """With all below it, once their processes have ended. Raises RuntimeError if they do not."""
        end = time.monotonic() + ENDS_WITHIN
        while left := [path for kind, path in self._paths if kind in ("cgroup", "cgroup2") and path.exists()]:
            if time.monotonic() > end:
                raise RuntimeError(f"{left[0]} still has processes")
            for folder, _, _ in (walked for path in left for walked in os.walk(path, topdown=False)):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            time.sleep(0.02)


class Machine:
    """Use as a context manager: prepared at once (``root`` may be written to), booted by :meth:`boot`."""

    def __init__(self, folder: Path, hostname: str = "trial") -> None:
        self.hostname = hostname
        self.root = folder / "root"
        self.console = folder / "console"
        #: no other machine's that runs at the same time
        self._name = f"trial-{os.getpid()}-{folder.name}"
        self._group: Group | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # names in /usr may lead to /etc/alternatives and back
        #: by where it is shown: a folder of this machine may be at two places, as /usr is where Python is the system's
        self._binds = {name: name for name in ("/usr", "/etc/alternatives") if Path(name).exists()}
        self._writable: dict[str, str] = {}
        self._prepare()

    def _prepare(self) -> None:
        for name in (
            "etc",
            "var",
            "opt/python",
            "opt/gradcomm/bin",
            "opt/gradcomm/src",
            "opt/gradcomm/site",
            "usr/lib",
        ):
            (self.root / name).mkdir(parents=True)
        self.root.chmod(0o755)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self.root / name).symlink_to(f"usr/{name}")
        # nspawn looks whether there is a system here before it mounts /usr
        shutil.copy("/usr/lib/os-release", self.root / "usr/lib")
        (self.root / "etc/os-release").symlink_to("../usr/lib/os-release")
        # not empty: a first boot would enable everything this machine has installed
        (self.root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
        shutil.copy("/etc/nsswitch.conf", self.root / "etc")
        (self.root / "etc/ld.so.conf").write_text("/opt/python/lib\n")
        self._environment()

    def _environment(self) -> None:
        """/opt/gradcomm, a virtual environment. Its interpreter lies where every user may read it."""
        gradcomm, python = self.root / "opt/gradcomm", f"python{sysconfig.get_python_version()}"
        self._binds |= {"/opt/python": sys.base_prefix, "/opt/gradcomm/site": sysconfig.get_path("purelib")}
        self._binds |= {f"/opt/gradcomm/src/{name}": str(ROOT / folder) for name, folder in PACKAGES.items()}
        site = gradcomm / "lib" / python / "site-packages"
        site.mkdir(parents=True)
        (site / "gradcomm.pth").write_text("/opt/gradcomm/src\n/opt/gradcomm/site\n")
        (gradcomm / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
        (gradcomm / "bin/python").symlink_to(f"/opt/python/bin/{python}")
        commands = {"gcserver": "gcserver.cli", "gcctl": "gcserver.admin.gcctl", "torchrun": "torch.distributed.run"}
        for command, module in commands.items():
            script = gradcomm / "bin" / command
            script.write_text(f"#!/opt/gradcomm/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
            script.chmod(0o755)

    def mount(self, outside: Path, inside: str, writable: bool = False) -> None:
        """Show a folder of this machine, not one below ``root``, there; before :meth:`boot`."""
        (self._writable if writable else self._binds)[inside] = str(outside)

    def fill_cache(self, folder: Path) -> None:
        """The kernels that are compiled here, as a daemon that compiled them there would have cached them."""
        for kernel in (*kernels(), *KERNELS):
            source = Path(kernel.py_func.__code__.co_filename)
            inside = f"/opt/gradcomm/src/{source.relative_to(ROOT)}"
            target = folder / UserProvidedCacheLocator.get_suitable_cache_subpath(inside)
            target.mkdir(parents=True, exist_ok=True)
            for file in Path(kernel._cache.cache_path).glob(f"{source.stem}.*.nb[ic]"):
                shutil.copy(file, target)

    def boot(self) -> None:
        """Until the system says that it runs. Raises RuntimeError with its console if it does not."""
        binds = [f"--bind-ro={outside}:{inside}" for inside, outside in self._binds.items()]
        binds += [f"--bind={outside}:{inside}" for inside, outside in self._writable.items()]
        argv = [
            "systemd-nspawn", "--quiet", f"--machine={self._name}", "--register=no", "--keep-unit", "--private-network",
            f"--directory={self.root}", *binds,
            f"--hostname={self.hostname}", "--boot", "systemd.unit=multi-user.target",
        ]  # fmt: skip
        self._group = group = Group(self._name)

        def begin() -> None:
            ends_with_parent()
            group.enter()

        with self.console.open("wb") as console:
            self._process = process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=console, stderr=console, preexec_fn=begin,
                # cgroup v2 also where this machine has v1: there the end of a unit's processes may go unnoticed
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )  # fmt: skip
        end = time.monotonic() + BOOTS_WITHIN
        while time.monotonic() < end and process.poll() is None:
            if self.leader() and "running" in self.run("systemctl", "is-system-running", check=False).split():
                self.run("ldconfig")
                return
            time.sleep(0.1)
        raise RuntimeError(f"the machine did not boot:\n{self.console.read_text(errors='replace')}")

    def leader(self) -> str:
        """The machine's first process, seen from here; "" before there is one."""
        assert self._process is not None
        pid = self._process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()

    def enter(self, argv: Sequence[str], user: str = "", environ: Mapping[str, str] | None = None) -> list[str]:
        """What runs ``argv`` in there as ``user`` (root)."""
        became = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        given = [f"{name}={value}" for name, value in ({"PATH": "/usr/bin:/usr/sbin"} | dict(environ or {})).items()]
        return ["nsenter", "--all", "--target", self.leader(), "--", *became, "env", "-i", *given, *argv]

    def run(self, *argv: str, user: str = "", check: bool = True) -> str:
        """Both outputs of a command in there. Raises RuntimeError if it fails, unless not ``check``."""
        done = subprocess.run(
            self.enter(argv, user), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout.strip()

    def off(self) -> None:
        """It ends at once, with all that runs in it."""
        if self._process is not None:
            # systemd-nspawn would leave it running; what is left without its first process is ended by the kernel
            for leader in self.leader().split() if self._process.poll() is None else ():
                os.kill(int(leader), signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        if self._group:
            self._group.remove()


def link(ends: Mapping[str, Machine]) -> None:
    """A cable between two machines that have booted, by ADDRESS/LENGTH. The interface is :data:`CABLE` in both."""
    one, other = (machine.leader() for machine in ends.values())
    made = ["ip", "link", "add", "name", CABLE, "netns", one, "type", "veth", "peer", "name", CABLE, "netns", other]
    subprocess.run(made, check=True)
    for address, machine in ends.items():
        machine.run("ip", "address", "add", address, "dev", CABLE)
        machine.run("ip", "link", "set", CABLE, "up")
