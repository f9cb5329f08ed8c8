"""What a job is told when the system refuses something.

What may live here: tests of `gcserver/runtime/shortage.py`. What may not: who is told (`test_endings.py`,
`test_knocking.py`).
"""

from __future__ import annotations

import errno
import os
import resource

import pytest

from gcserver.runtime import shortage
from gcserver.runtime.statefiles import MemoryShort


def refused(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "kind", "word"),
    [
        (refused(errno.EMFILE), "OutOfDescriptors", "LimitNOFILE="),
        (MemoryShort(errno.ENFILE, "a file"), "OutOfDescriptors", "ulimit -n"),
        (MemoryShort(errno.ENOSPC, "a file"), "OutOfMemory", "/dev/shm"),
        (MemoryShort(errno.ENOMEM, "a mapping"), "OutOfMemory", "cgroup"),
        (MemoryError("64 MiB"), "OutOfMemory", "cgroup"),
        (refused(errno.EFBIG), "OutOfMemory", "/dev/shm"),
    ],
)
def test_the_kind_and_the_advice_follow_what_is_short(error: OSError | MemoryError, kind: str, word: str) -> None:
    found, advice = shortage.kind_of(error)
    assert found == kind and word in advice and "gcserver doctor" in advice


def test_what_could_not_be_had_is_said() -> None:
    assert shortage.text_of(refused(errno.EMFILE)) == "Too many open files"
    assert shortage.text_of(MemoryError("64 MiB")) == "memory cannot be had: 64 MiB"
    assert shortage.text_of(MemoryError()) == "memory cannot be had"


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1024, 4096), 4096),
        ((1024, 1 << 20), shortage.DESCRIPTORS),
        ((1024, resource.RLIM_INFINITY), shortage.DESCRIPTORS),
        ((1 << 18, 1 << 20), 1 << 18),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), resource.RLIM_INFINITY),
    ],
)
def test_a_daemon_opens_as_many_files_as_it_may(
    limits: tuple[int, int], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr("gcserver.runtime.shortage.resource.getrlimit", lambda which: limits)
    monkeypatch.setattr("gcserver.runtime.shortage.resource.setrlimit", lambda which, new: set_to.append(new))
    shortage.raise_descriptors()
    assert set_to == [(wanted, limits[1])]
