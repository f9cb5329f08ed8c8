"""admin.proto passes buf's lint: the rules of the field, by the tool of the field (npm's @bufbuild/buf)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.system.buf import buf

__all__ = ["buf"]  # a fixture

PROTO = Path(__file__).resolve().parents[2] / "proto"

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]


def lint(buf: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(buf), "lint", str(folder)], capture_output=True, text=True, timeout=60, check=False)


def test_admin_proto_is_clean(buf: Path, tmp_path: Path) -> None:
    for name in ("admin.proto", "buf.yaml"):
        shutil.copy(PROTO / name, tmp_path / name)
    result = lint(buf, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_breach_would_be_seen(buf: Path, tmp_path: Path) -> None:
    shutil.copy(PROTO / "buf.yaml", tmp_path / "buf.yaml")
    source = (PROTO / "admin.proto").read_text()
    (tmp_path / "admin.proto").write_text(source.replace("double uptime_seconds", "double uptimeSeconds"))
    result = lint(buf, tmp_path)
    assert result.returncode != 0
    assert "uptimeSeconds" in result.stdout
