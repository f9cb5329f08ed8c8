"""Shares of a core: given where the system can, refused with the reason where it cannot, and taken back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import quotas


def test_a_process_gets_its_share_and_is_let_go() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        group = quotas.CPU / f"gclab-{os.getpid()}-{child.pid}"
        if os.access(quotas.CPU, os.W_OK):
            with quotas.slow([child.pid], 0.25):
                assert (group / "cpu.cfs_quota_us").read_text().split() == ["2500"]
                assert (group / quotas.PROCESSES).read_text().split() == [str(child.pid)]
            assert str(child.pid) in (quotas.CPU / quotas.PROCESSES).read_text().split()
        else:
            with pytest.raises(quotas.QuotaError), quotas.slow([child.pid], 0.25):
                pass
        assert not group.exists()
        child.communicate(b"\n", timeout=60)


def test_where_there_is_no_such_group_it_says_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(quotas.QuotaError, match="cgroups of version 1"), quotas.slow([1], 0.5, tmp_path / "none"):
        pass
