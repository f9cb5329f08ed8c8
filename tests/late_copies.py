"""Copies into the arena that are only queued when a worker asks for them, as those of a GPU are, on the CPU.

What may live here: such a device, and running something with it. What may not: what is tested with it.

Copies are made one after the other by a thread, each some time after it was queued, so that a doorbell that does not
wait for what it tells of is heard before that is in the arena.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from gcclient import device
from gcclient.bell import Wait
from gcclient.device import Bytes
from tests.integration.cluster import call


class Stream:
    """Does what it is given in order, each ``seconds`` after what came before; nothing while it is ``held``."""

    def __init__(self, seconds: float) -> None:
        self.going = threading.Event()
        self.going.set()
        self.copies = 0
        #: how often somebody waited for all of them
        self.settled = 0
        self._seconds = seconds
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def mark(self) -> threading.Event:
        """Set once all that was put before is done."""
        passed = threading.Event()
        self.put(passed.set)
        return passed

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            time.sleep(self._seconds)
            self.going.wait()
            job()


class LateMemory(device.HostMemory):
    """A CPU tensor whose copies are made by a stream."""

    __slots__ = ("_stream",)

    def __init__(self, flat: torch.Tensor, stream: Stream) -> None:
        super().__init__(flat)
        self._stream = stream

    def load(self, lo: int, hi: int, target: Bytes) -> None:
        self._stream.copies += 1
        now = super().load
        self._stream.put(lambda: now(lo, hi, target))

    def store(self, lo: int, hi: int, source: Bytes) -> None:
        self._stream.mark().wait()
        super().store(lo, hi, source)

    def settle(self) -> None:
        self._stream.settled += 1
        self._stream.mark().wait()

    def queued(self) -> Wait | None:
        return self._stream.mark().wait


@contextmanager
def late_copies(seconds: float = 0.0005) -> Iterator[Stream]:
    """Within it whatever is pushed is copied so, but for tensors that live in the arena."""
    stream = Stream(seconds)
    with mock.patch.object(device, "memory_of", lambda flat: LateMemory(flat, stream)):
        yield stream


def under(function: str, args: Mapping[str, Any]) -> Any:
    """In a worker: a function (see `tests.integration.cluster.call`) with such copies."""
    with late_copies() as stream:
        found = call(function, args)
    assert stream.copies, "nothing was copied so"
    return found
