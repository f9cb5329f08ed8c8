"""The worker's view of one lane's arena: chunk files mapped into this process.

What may live here: mapping descriptors, views of slots. What may not: sockets, steps, copies.
The layout is computed here by the same rules as in the lane (`gcproto.manifest`), so only descriptors cross
the process boundary; a mapping stays valid when the daemon is killed, because the file does.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from gcclient import device
from gcclient.device import Bytes
from gcclient.errors import GradcommError, OutOfDescriptors, OutOfMemory
from gcproto import slots
from gcproto.manifest import ArenaPlan, Block, Slot


class ArenaError(RuntimeError):
    """The lane's arena is not what this worker computed: two versions of gradcomm, most likely."""


class ArenaShort(ArenaError):
    """This worker has no descriptor or no address space left for an arena; ``errno`` says which."""

    def __init__(self, number: int, what: str) -> None:
        self.errno = number
        super().__init__(f"{what}: {os.strerror(number)}")


def failure(error: Exception, job: str) -> GradcommError:
    """What a worker is told whose daemon and itself do not agree about memory, or that cannot map it."""
    if not isinstance(error, ArenaShort):
        return GradcommError(str(error), job=job, advice="install the same version on both sides")
    if error.errno == errno.EMFILE:
        advice = "raise the limit on open files of the training process (ulimit -n), or close some in the script"
        return OutOfDescriptors(str(error), job=job, phase="declare", advice=advice)
    advice = "let the training process have more address space (ulimit -v) or memory, or make the model smaller"
    return OutOfMemory(str(error), job=job, phase="declare", advice=advice)


class BlockPlace:
    """One block in the arena, and what this worker knows of its newest round.

    ``step`` is the newest step pushed, ``done`` whether its result was announced, ``nonfinite`` whether that
    is not finite, ``skipped`` whether there is none, ``epoch`` the one whose members it was made with (0: not known).
    ``op`` is who waits for the result: ``op.deliver(places)`` is called once.
    """

    __slots__ = (
        "block", "slot", "memory", "input", "output", "index", "step", "done", "nonfinite", "skipped", "epoch", "op",
    )  # fmt: skip

    def __init__(self, block: Block, slot: Slot, memory: memoryview, chunk: Bytes, index: int) -> None:
        self.block = block
        self.slot = slot
        self.memory = memory
        self.index = index
        at = slot.inputs[index]
        self.input: Bytes = chunk[at : at + block.nbytes]
        self.output: Bytes = chunk[slot.output : slot.output + block.nbytes]
        self.step = 0
        self.done = True
        self.nonfinite = False
        self.skipped = False
        self.epoch = 0
        self.op: Any = None

    def expect(self, step: int) -> None:
        """The input becomes the push of ``step``. Raises RuntimeError where the result of the one before is not there:
        a daemon that restarts would ask for what that brought, and find it overwritten."""
        if not self.done:
            raise RuntimeError(
                f"a defect of gradcomm: block {self.block.key} is pushed in step {step} before step {self.step} is over"
            )
        self.step, self.done = step, False

    def commit(self, step: int, flags: int, grad_scale: float) -> None:
        """The input is written: make it the push of ``step``, which was expected."""
        slots.commit_push(self.memory, self.slot, self.index, step, flags, grad_scale)

    def result(self) -> tuple[int, int]:
        """(step, flags) of the newest result in the output slot."""
        step, flags, _ = slots.output(self.memory, self.slot)
        return step, flags


class LaneArena:
    """The chunks of one domain on one lane. ``index`` is this rank's place among the domain's local ranks."""

    def __init__(self, local_ranks: int, index: int) -> None:
        self.plan = ArenaPlan(local_ranks)
        self.index = index
        self.maps: list[mmap.mmap] = []
        self.chunks: list[Bytes] = []
        self._pinned: list[bool] = []

    def map(self, first: int, sizes: Sequence[int], descriptors: Sequence[int]) -> None:
        """Map new chunks and close their descriptors.

        Raises :class:`ArenaError` if they are not the expected ones, :class:`ArenaShort` if they cannot be mapped here.
        """
        try:
            if len(descriptors) < len(sizes):
                # The system drops descriptors that a process has no room for.
                raise ArenaShort(errno.EMFILE, "the daemon's arena cannot be taken into this worker")
            expected = tuple(self.plan.chunks[first:])
            if first != len(self.maps) or tuple(sizes) != expected or len(descriptors) != len(sizes):
                raise ArenaError(
                    f"the lane offers chunks {first}.. of {list(sizes)} bytes with {len(descriptors)} descriptors, "
                    f"this worker computed chunks {len(self.maps)}.. of {list(expected)} bytes"
                )
            for size, descriptor in zip(sizes, descriptors, strict=True):
                if os.fstat(descriptor).st_size < size:
                    raise ArenaError(f"an arena chunk has {os.fstat(descriptor).st_size} bytes, expected {size}")
                try:
                    mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
                except OSError as error:
                    what = f"{size >> 20} MiB of the daemon's arena cannot be mapped into this worker"
                    raise ArenaShort(error.errno or errno.ENOMEM, what) from error
                chunk = np.frombuffer(mapped, np.uint8)
                self.maps.append(mapped)
                self.chunks.append(chunk)
                self._pinned.append(device.pin(chunk))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def place(self, block: Block) -> BlockPlace:
        """The block in mapped memory. Raises :class:`ArenaError` if the lane did not prepare it there."""
        slot = self.plan.slots[block.key]
        memory = memoryview(self.maps[slot.chunk])
        found = slots.magic(memory, slot)
        if found != (slots.MAGIC, slots.VERSION, len(slot.inputs), block.key):
            raise ArenaError(f"no slot of block {block.key} where this worker expects it, found {found}")
        return BlockPlace(block, slot, memory, self.chunks[slot.chunk], self.index)

    @property
    def pinned_bytes(self) -> int:
        """How much of it is registered with CUDA."""
        return sum(chunk.nbytes for chunk, pinned in zip(self.chunks, self._pinned, strict=True) if pinned)

    def close(self) -> None:
        """Unpin and forget the chunks; the memory goes when the last view of it does."""
        for chunk, pinned in zip(self.chunks, self._pinned, strict=True):
            if pinned:
                device.unpin(chunk)
        self.maps.clear()
        self.chunks.clear()
        self._pinned.clear()
