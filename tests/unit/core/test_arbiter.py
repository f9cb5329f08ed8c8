"""Compare-and-swap over epochs.

What may live here: tests of `gcserver/core/arbiter.py`. What may not: what an epoch is used for.
"""

from __future__ import annotations

import msgspec

from gcproto.messages import EpochDecided, MemberInfo
from gcserver.core.arbiter import Arbiter, MemoryArbiter


def record(epoch: int, node: str, job: bytes = b"j" * 16) -> EpochDecided:
    return EpochDecided("train", job, epoch, 1, (MemberInfo(node, f"tcp://{node}:1", (0,)),), (1,))


def test_the_first_to_swap_wins_and_the_others_read_it() -> None:
    arbiter: Arbiter = MemoryArbiter()
    won = arbiter.compare_and_swap(0, record(1, "a"))
    assert won == record(1, "a")
    assert arbiter.compare_and_swap(0, record(1, "b")) == won
    assert arbiter.compare_and_swap(1, record(2, "b")) == record(2, "b")
    assert arbiter.compare_and_swap(1, record(2, "a")) == record(2, "b")


def test_jobs_do_not_meet() -> None:
    arbiter = MemoryArbiter()
    arbiter.compare_and_swap(0, record(1, "a"))
    other = record(1, "b", b"k" * 16)
    assert arbiter.compare_and_swap(0, other) == other


def test_records_are_values() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record(1, "a")), type=EpochDecided) == record(1, "a")
