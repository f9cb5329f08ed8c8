"""Images built and run by buildah, from a Debian base that debootstrap makes: no Docker engine, no registry of images.

What may live here: making the base, building, running. What may not: what is expected of an image
(`test_images_built.py`).

pip in a build is told what pip is told on this machine: where packages come from, certificates, folders of wheels.
"""

from __future__ import annotations

import configparser
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

#: What the base has that `python:3.11-slim-bookworm` has, too.
_PACKAGES: Final = "python3,python3-venv,python3-pip,ca-certificates"
_SUITE: Final = "bookworm"
_CERTIFICATES: Final = Path("/etc/ssl/certs")


def mirror() -> str:
    """Where this machine's Debian packages come from. Skips the test where they do not."""
    said = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", f"Codename: {_SUITE}"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    if not said:
        pytest.skip(f"needs a source of Debian {_SUITE}'s packages")
    return said[0]


def _pip() -> dict[str, str]:
    """What pip is told here, by its options' names."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    told = dict(line.split("=", 1) for line in said.stdout.splitlines())
    return {key.rpartition(".")[2]: value.strip("'") for key, value in told.items()}


def _paths(value: str) -> list[Path]:
    """What pip reads on this machine: files and folders, and of an index in a folder what lies beside it as well."""
    urls = [Path(word.removeprefix("file://")).parent for word in value.split() if word.startswith("file:///")]
    plain = [Path(word) for word in value.split() if word.startswith("/")]
    return [path for path in [*urls, *plain] if path.exists()]


@dataclass(frozen=True)
class Buildah:
    """Images and containers in a folder of its own."""

    folder: Path

    def command(self, verb: str, *arguments: str) -> list[str]:
        """What a shell would be told."""
        where = ["--root", str(self.folder / "root"), "--runroot", str(self.folder / "run"), "--storage-driver", "vfs"]
        return ["buildah", *where, verb, *arguments]

    def __call__(self, verb: str, *arguments: str) -> str:
        """Raises AssertionError with what it said."""
        done = subprocess.run(self.command(verb, *arguments), capture_output=True, text=True, check=False)
        assert done.returncode == 0, (verb, arguments, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout.strip()

    def base(self, name: str) -> None:
        """Debian with Python, as the image ``name``. Skips the test where Debian's packages cannot be had."""
        tree = self.folder / "debian"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(tree), mirror()],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            pytest.skip(f"debootstrap: {made.stdout[-300:]}{made.stderr[-300:]}")
        container = self("from", "scratch")
        self("add", container, str(tree), "/")
        self("commit", container, name)
        self("rm", container)
        shutil.rmtree(tree)

    def build(self, name: str, file: Path, root: Path, **arguments: str) -> None:
        """`docker build -f file -t name --build-arg ... root`."""
        told = {key: value for key, value in _pip().items() if key != "constraint"}
        config = configparser.ConfigParser(interpolation=None)
        config["global"] = told
        settings = self.folder / "pip.conf"
        with settings.open("w") as out:
            config.write(out)
        shown = {path for value in told.values() for path in _paths(value)} | {_CERTIFICATES}
        volumes = [f"--volume={path}:{path}:ro" for path in sorted(shown)]
        self(
            "build",
            "--isolation=chroot",
            f"--volume={settings}:/etc/pip.conf:ro",
            *volumes,
            *(f"--build-arg={key}={value}" for key, value in arguments.items()),
            f"--file={file}",
            f"--tag={name}",
            str(root),
        )

    def inside(self, container: str, volumes: Sequence[str], command: Sequence[str]) -> list[str]:
        """What runs ``command`` in a container, as its user."""
        mounts = [f"--volume={volume}" for volume in volumes]
        # An engine makes the container's name known in it; chroot does not.
        return self.command("run", "--isolation=chroot", "--hostname=localhost", *mounts, container, "--", *command)

    @contextmanager
    def running(
        self, image: str, volumes: Sequence[str], command: Sequence[str], log: Path
    ) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
        """(container, process): ``command`` in a container of ``image``, its output in ``log``; both go."""
        container = self("from", image)
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.inside(container, volumes, command), stdout=out, stderr=out, start_new_session=True
            )
        try:
            yield container, process
        finally:
            with suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self("rm", container)

    def run(self, image: str, volumes: Sequence[str], command: Sequence[str], log: Path, timeout: float) -> str:
        """What ``command`` said in a container of ``image``. Raises AssertionError where it failed."""
        with self.running(image, volumes, command, log) as (_, process):
            status = process.wait(timeout)
        said = log.read_text()
        assert status == 0, (command, said[-3000:])
        return said

    def inspect(self, image: str, what: str) -> str:
        """A field of the image, as a template of Go."""
        return self("inspect", "--type", "image", "--format", what, image)


def needs(*commands: str) -> pytest.MarkDecorator:
    missing = [command for command in commands if shutil.which(command) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)} (Debian's packages of these names)")
