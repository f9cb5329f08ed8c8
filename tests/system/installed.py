"""Foreign tools that a test installs for itself, apart from the environment.

What may live here: installing from PyPI and npm's registry. What may not: using the tools.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def from_pip(folder: Path, *packages: str) -> Path:
    """``packages`` with fixed versions, and what they need, in ``folder``. Skips the test where they cannot be had."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(folder), *packages]
    _install("pip", "PyPI", command, packages, 240)
    return folder


def from_npm(folder: Path, *packages: str) -> Path:
    """The folder of the executables of ``packages``, installed in ``folder``. Skips the test where there are none."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not here; on Debian: apt-get install npm")
    command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
    # it would wait for more than a minute before it asks a registry that does not answer for the last time
    command += ["--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000"]
    _install("npm", "npm's registry", command, packages, 90)
    return folder / "node_modules" / ".bin"


def _install(by: str, source: str, command: Sequence[str], packages: Sequence[str], timeout: float) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{source} does not answer")
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip()[-300:]
        pytest.skip(f"{by} could not install {' and '.join(packages)}: {said}")
