"""Foreign tools that a test installs for itself, apart from the environment.

What may live here: installing from PyPI. What may not: using the tools.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def from_pip(folder: Path, *packages: str) -> Path:
    """``packages`` with fixed versions, and what they need, in ``folder``. Skips the test where they cannot be had."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(folder), *packages]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("PyPI does not answer")
    if result.returncode != 0:
        pytest.skip(f"pip could not install {' and '.join(packages)}: {result.stderr.strip()[-300:]}")
    return folder
