"""buf, the tool of the field for Protobuf, which is a foreign gRPC client too.

What may live here: installing it (npm's @bufbuild/buf). What may not: what it is asked to do.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def buf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The buf executable, installed into a folder of its own."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not here; on Debian: apt-get install npm")
    folder = tmp_path_factory.mktemp("buf")
    command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), "@bufbuild/buf"]
    # it would wait for more than a minute before it asks a registry that does not answer for the last time
    command += ["--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm's registry does not answer")
    if result.returncode != 0:
        pytest.skip(f"npm could not install @bufbuild/buf: {(result.stderr or result.stdout).strip()[-300:]}")
    return folder / "node_modules" / ".bin" / "buf"
