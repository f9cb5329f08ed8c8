"""Arenas that a worker cannot take in: what it is told.

What may live here: tests of `gcclient/arena.py`. What may not: what becomes of the session (`test_session.py`).
"""

from __future__ import annotations

import errno
import os

import pytest

import gcclient
from gcclient import arena
from gcclient.arena import ArenaError, ArenaShort, LaneArena, failure
from gcproto.manifest import AddressSpace, Section, TensorSpec


def an_arena() -> LaneArena:
    made = LaneArena(1, 0)
    made.plan.append(AddressSpace(1, 1, 1 << 20).append(Section(0, (TensorSpec("w", (4,), 0),))))
    return made


def test_descriptors_that_the_system_dropped_are_missed() -> None:
    made = an_arena()
    with pytest.raises(ArenaShort) as short:
        made.map(0, made.plan.chunks, [])
    error = failure(short.value, "gpt")
    assert type(error) is gcclient.OutOfDescriptors and error.job == "gpt" and error.phase == "declare"
    assert "Too many open files" in str(error) and "ulimit -n" in error.advice


@pytest.mark.parametrize(
    ("number", "kind", "word"),
    [(errno.ENOMEM, "OutOfMemory", "ulimit -v"), (errno.EMFILE, "OutOfDescriptors", "ulimit -n")],
)
def test_a_chunk_that_cannot_be_mapped(number: int, kind: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(arena.mmap, "mmap", refuse)
    made = an_arena()
    file = os.memfd_create("chunk")
    os.ftruncate(file, made.plan.chunks[0])
    with pytest.raises(ArenaShort, match="1 MiB of the daemon's arena") as short:
        made.map(0, made.plan.chunks, [file])
    error = failure(short.value, "gpt")
    assert type(error).__name__ == kind and word in error.advice
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_another_layout_is_another_release() -> None:
    error = failure(ArenaError("chunks differ"), "gpt")
    assert type(error) is gcclient.GradcommError and "same version" in error.advice
