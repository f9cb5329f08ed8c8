"""Compare-and-swap in a real etcd.

What may live here: `gcserver/runtime/etcd.py` against etcd. What may not: daemons (`test_losses.py`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gcproto.messages import EpochDecided, MemberInfo
from gcserver.runtime.etcd import EtcdArbiter, EtcdError
from tests.system.etcd import Etcd, needs_etcd

pytestmark = [pytest.mark.system, needs_etcd]


def record(epoch: int, node: str, job: bytes = b"j" * 16) -> EpochDecided:
    return EpochDecided("train", job, epoch, 1, (MemberInfo(node, f"tcp://{node}:1", (0,)),), (1,))


def test_one_of_many_wins_each_epoch_and_a_restart_forgets_none(tmp_path: Path) -> None:
    nodes = [f"n{i}" for i in range(8)]
    with Etcd(tmp_path) as etcd, ThreadPoolExecutor(len(nodes)) as pool:
        arbiter = EtcdArbiter((etcd.url,), timeout=20.0)
        for epoch in (1, 2, 3):
            asked = [record(epoch, node) for node in nodes]
            won = set(pool.map(lambda r, e=epoch: arbiter.compare_and_swap(e - 1, r), asked))
            assert len(won) == 1 and won <= set(asked)
        assert arbiter.compare_and_swap(0, record(1, "x", b"k" * 16)).job == b"k" * 16, "jobs do not meet"
        etcd.stop()
        with pytest.raises(EtcdError, match=r"127\.0\.0\.1"):
            arbiter.compare_and_swap(3, record(4, "late"))
        etcd.start()
        assert arbiter.compare_and_swap(0, record(1, "late")) == won.pop()
