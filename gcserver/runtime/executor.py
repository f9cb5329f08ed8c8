"""Carries out the lane machine's arithmetic, over its memory of each domain.

What may live here: putting the parts together, what concerns a block before and after a round. What may not: the
arithmetic of a round (`encoding.py`, `averaging.py`, `exchanges.py`), decisions of the protocol (`gcserver.core`),
sockets.
"""

from __future__ import annotations

from collections.abc import Iterator

from gcproto import slots
from gcproto.dtypes import DType
from gcproto.wire import Flag, Header
from gcserver.codecs import CodecError, by_id
from gcserver.core.effects import CommitOutput
from gcserver.core.events import DomainKey, Retained
from gcserver.core.plan import COMPRESSIBLE
from gcserver.runtime.averaging import Averager
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.buffers import Workspace, as_bytes
from gcserver.runtime.encoding import Encoder
from gcserver.runtime.exchanges import Exchanges, two_rounds
from gcserver.runtime.norms import gradient_square
from gcserver.runtime.states import NONE_ID


class Executor:
    """Arithmetic of one lane. Methods raise MemoryShort where memory must be had first."""

    def __init__(self) -> None:
        self._work = Workspace()
        self.domains, self.handles = self._work.domains, self._work.handles
        self.exchanges = Exchanges(self._work)
        self.averager = Averager(self._work, self.exchanges)
        # The parts' own methods: a call for every block that only passes on would cost what a small block costs.
        self.encode = Encoder(self._work, self.exchanges).encode
        self.accumulate = self.averager.accumulate
        self.finalise = self.averager.finalise
        self.decode = self.averager.decode

    def commit_output(self, e: CommitOutput) -> None:
        """Make the output slot count, and drop what the round worked with."""
        state = self.domains[e.domain].blocks[e.key]
        flags = int(Flag.NONFINITE) if e.nonfinite else 0
        slots.commit_output(state.arena, state.slot, e.step, flags, e.proposal)
        # What a round that ended early, or again after a restart, left behind.
        self.exchanges.between.pop((e.domain, e.key, e.step), None)
        for stage in (0, 1):
            self.averager.sums.pop((e.domain, e.key, e.step, stage), None)

    def check(self, h: Header, payload: memoryview | None) -> None:
        """Whether a frame's payload will decode. Raises CodecError; afterwards decoding cannot fail."""
        codec = by_id(h.codec, h.level)
        if codec.rounds > 1 and not h.flags & Flag.NONFINITE:
            self.exchanges.check(h, two_rounds(codec), payload)
            return
        if h.flags & Flag.SECOND and codec.rounds == 1:
            raise CodecError("flags", f"no second exchange ({codec.name} takes one)", f"{h.flags:#x}")
        if payload is None or not len(payload):
            if h.elements and not h.flags & Flag.NONFINITE:
                raise CodecError("payload.nbytes", "some", 0)
            return
        if h.codec == NONE_ID:
            size = h.elements * DType(h.dtype).itemsize
            if len(payload) != size:
                raise CodecError("payload.nbytes", size, len(payload))
        else:
            if h.dtype not in COMPRESSIBLE:
                raise CodecError("dtype", [d.name for d in COMPRESSIBLE], h.dtype)
            codec.check(as_bytes(payload), h.elements)

    def retained_handle(self, memory: DomainMemory, key: int, kept: Retained) -> int | None:
        """A handle for a payload that an earlier life retained."""
        if not kept.nbytes:
            return None
        if kept.codec == NONE_ID and not kept.flags & Flag.ALL:
            return self.handles.add(memory.blocks[key].output)
        return self.handles.add(memory.kept(key, kept.slot, kept.nbytes))

    def facts(self, domain: DomainKey, gradients: bool) -> Iterator[tuple[int, int, float, float]]:
        """(key, payload bytes of the newest contribution, squared norms of settled residual and newest gradient) of
        each block. The latter only where ``gradients`` are asked for and something is held back; else 0.

        Reads both at every step, so the caller may do other things in between; ends when the domain does.
        """
        memory = self.domains.get(domain)
        sizes = self._work.wire_bytes.get(domain, {})
        for key in tuple(memory.blocks) if memory is not None else ():
            if memory is None or self.domains.get(domain) is not memory:
                return
            residual = memory.residual_square(key)
            gradient = gradient_square(memory.blocks[key]) if gradients and residual else 0.0
            yield key, sizes.get(key, 0), residual, gradient

    def close(self, domain: DomainKey) -> None:
        self.domains.pop(domain, None)
        self._work.wire_bytes.pop(domain, None)
        self.averager.close(domain)
        self.exchanges.close(domain)
