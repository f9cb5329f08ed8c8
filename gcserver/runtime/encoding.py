"""A node's contribution to a round: its ranks' sum, encoded, with what stays behind in the residual.

What may live here: which kernel encodes which memory, and retaining the payload in the all scheme. What may not:
decisions of the protocol (`gcserver.core`), kernels themselves (`gcserver.codecs`).

Passes over memory are what counts: a dense contribution of a single local rank is sent straight from the arena.
"""

from __future__ import annotations

from gcproto import wire
from gcproto.wire import Flag
from gcserver.codecs import parse
from gcserver.core.effects import Encode
from gcserver.core.events import Encoded
from gcserver.runtime.blocks import F32, DomainMemory
from gcserver.runtime.buffers import Workspace, as_bytes
from gcserver.runtime.contributions import dense_contribution, node_sum, with_held
from gcserver.runtime.exchanges import Exchanges
from gcserver.runtime.results import retain
from gcserver.runtime.states import NONE_ID, codec_seed, levels_of, state_use, unscales


class Encoder:
    """Encoding on one lane. Raises MemoryShort where memory must be had first."""

    def __init__(self, work: Workspace, exchanges: Exchanges) -> None:
        self.domains, self.handles, self.pool, self.wire_bytes = work.domains, work.handles, work.pool, work.wire_bytes
        self.exchanges = exchanges

    def encode(self, e: Encode) -> Encoded:
        """The node's contribution: local ranks summed in rank order, then encoded."""
        if e.codec.rounds > 1:
            return self.exchanges.begin(e) if e.stage == 0 else self.exchanges.middle(e)
        memory = self.domains[e.domain]
        state = memory.blocks[e.key]
        retained = None
        held = drained(memory, e) if e.flush else []
        if e.codec.id == NONE_ID:
            payload, nonfinite = dense_contribution(self.pool, state, held)
            if e.retain is not None:
                kept = memory.make_kept(e.key, e.retain, len(payload))
                kept[:] = payload
                payload = retained = kept
        else:
            codec = parse(e.codec.spec)
            x = with_held(self.pool, state, held) if held else node_sum(self.pool, state)
            levels = levels_of(e)
            bound = codec.needed(state.bounds, levels)
            out = memory.make_kept(e.key, e.retain, bound) if e.retain is not None else self.pool.take(bound)
            before = after = None
            if (use := state_use(codec, state)) is not None:
                before, after = memory.begin_states(e.key, e.step, (e.read, e.write), False, use)
            scale = state.loss_scale() if unscales(codec) else 1.0
            seed = codec_seed(e.seed)
            result = codec.encode(x, before, after, as_bytes(out), state.bounds, 1.0 / scale, seed, levels)
            # A loss scaler must see that fp16 was not wide enough, or it never backs off.
            clipped = result.saturated > 0 and state.loss_scale() != 1.0
            nonfinite = result.nonfinite > 0 or clipped
            payload = out[: 0 if nonfinite else result.nbytes]
            retained = payload if e.retain is not None else None
        # What stays on this node is never hashed.
        stays = e.retain is None and state.block.owner == memory.config.me
        digest = 0 if stays else wire.digest(payload)
        self.wire_bytes.setdefault(e.domain, {})[e.key] = len(payload)
        handle = self.handles.add(payload) if len(payload) else None
        if e.retain is not None and retained is not None:
            flags = e.flags | Flag.ALL | (Flag.NONFINITE if nonfinite else 0)
            retain(memory, e, e.codec, e.retain, len(payload), digest, int(flags))
        return Encoded(e.domain, e.key, e.step, handle, len(payload), digest, nonfinite)


def drained(memory: DomainMemory, e: Encode) -> list[F32]:
    """The residuals that a dense contribution takes up; what the next step reads of them is zeros."""
    wanted = ((1, e.read, False), (2, e.owner_read, True))
    return [memory.drain(e.key, e.step, version, owner) for bit, version, owner in wanted if e.flush & bit]
