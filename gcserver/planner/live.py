"""The step of a running job as a timeline: what a plan for its blocks comes to on the cluster that was measured.

What may live here: what a block costs under an option, the step's seconds, bytes and jobs. What may not: the timeline
itself (`live_kernels.py`), layouts (`live_layout.py`), decisions (`auto*.py`).

Resources of a node: the worker (copies into and out of the arena), the link in either direction, and one core a lane.
Computing is no job: the times at which gradients are ready were measured in the running worker, with whatever its hooks
did in between. All nodes are taken to be alike. Up to `NODES` of them are simulated one by one, with the blocks that
each owns, as long as these are not too many; else one that stands for the mean.

What each scheme asks of the lanes:

    owner, dense        contributions leave from the arena as they are; the owner adds n-1 times, the last time into
                        its output; the others copy the aggregate into theirs
    owner, compressed   all encode; the owner decodes one contribution, adds n-1 more, encodes and decodes the
                        aggregate; the others decode it
    all                 all encode, send to n-1 others, decode one and add n-1, and scale the sum into the output
    two exchanges       as the owner's, with half a contribution each time, and a second encoding in between; the
                        owner decodes its own result before it sends the second sum

The model leaves out: credit, frame headers, lost frames, priorities, nodes that differ, and what copies and computing
take from each other beyond what was measured. Where workers, lanes and the network stack share cores, a step grows by
``profile.interference`` seconds for each second of CPU time that lanes and network take, stretched by ``busy`` as
kernels are; `auto_informed.py` finds it in the difference between a measured step and its prediction, and in ``busy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from gcproto.dtypes import DType
from gcserver.planner import live_kernels as kernels
from gcserver.planner.errors import F64, I64
from gcserver.planner.families import CASTS, DENSE, TWO_EXCHANGES, Spec, parse
from gcserver.planner.live_layout import DDP_BUCKETS, LiveBlock, Portions, dtype_of, lay_out, portions
from gcserver.planner.payload import segment_bytes
from gcserver.planner.profile import CodecCost, Curve, Profile, ProfileError

OWNER, ALL = "owner", "all"
#: Seconds of CPU time that sending or receiving a byte over TCP takes outside the lanes' loops, on cores of its own.
NETWORK: Final = 0.3e-9
#: up to so many nodes are simulated one by one, and so many blocks of all nodes together
NODES: Final = 8
NODE_BLOCKS: Final = 512
#: bytes of a connection's turn on a link that several share
QUANTUM: Final = 1 << 20
#: Dense blocks go to everyone at once where so many members would send no more than so many bytes each, as the daemon
#: has it (gcserver.core.plan).
SMALL_MEMBERS: Final = 8
SMALL_BYTES: Final = 32 << 10

_KINDS: Final = ("copy in", "encode", "send", "receive", "add", "finish", "decode", "copy out")


class BlockOption(msgspec.Struct, frozen=True):
    """What one block uses. ``nbytes``: of a contribution, of both exchanges together; below 0: what ``spec`` says."""

    spec: str = DENSE
    scheme: str = OWNER
    nbytes: float = -1.0


class LiveJob(msgspec.Struct, frozen=True):
    """Something that happens in a step, seconds since the step began.

    what: forward, compute, copy in, encode, send, receive, add, finish, decode, copy out, or wait for cores (at the
    end, all that lanes and network take from a worker in the step together). resource: worker, link out, link in or
    "lane 0" and on. index: of a tensor in the profile (compute), of a portion (copy in), else of a block.
    """

    what: str
    resource: str
    node: int
    index: int
    start: float
    end: float


class LiveStep(msgspec.Struct, frozen=True):
    """A predicted step: ``seconds`` from one to the next, ``bytes`` the mean node sends, all that happens in it."""

    seconds: float
    bytes: float
    jobs: tuple[LiveJob, ...]


def cost_of(profile: Profile, spec: str) -> CodecCost:
    """What a spec costs on this machine; of ``none``, if not measured, what copying costs. Raises ProfileError."""
    if spec in profile.codecs:
        return profile.codecs[spec]
    key = parse(spec).key
    for text, cost in profile.codecs.items():
        if parse(text).key == key:
            return cost
    if near := _next_rank(profile, parse(spec)):
        return profile.codecs[near]
    if spec == DENSE:
        line = Curve(((0, 0.0), (1 << 20, 4 * (1 << 20) / profile.copy)))
        return CodecCost(line, line, line, 1.0)
    known = ", ".join(sorted(profile.codecs)) or "nothing"
    raise ProfileError(f"the cost of {spec} is not known on this machine; measured: {known}")


def _next_rank(profile: Profile, wanted: Spec) -> str:
    """Of a codec of ranks: the measured spec with the least rank not below ``wanted``'s, else with the highest.

    Of those with factors of as many bits, if there are any: rules of a plan with levels name the highest rank that a
    tensor has, while on average ranks are the family's, which that tells.
    """
    if wanted.name not in TWO_EXCHANGES:
        return ""
    ranked = [s for s in map(parse, profile.codecs) if s.name == wanted.name]
    known = sorted((s.level, s.text) for s in [s for s in ranked if s.width == wanted.width] or ranked)
    return next((t for rank, t in known if rank >= wanted.level), known[-1][1] if known else "")


class Live:
    """A profile ready to be asked what plans come to.

    ``brought``: the portions in which the worker brings tensors; unless told otherwise DDP's buckets, as it was seen to
    bring them or by torch's default. Raises ProfileError for a profile that makes no cluster.
    """

    def __init__(self, profile: Profile, brought: Portions | None = None) -> None:
        if profile.nodes < 1 or profile.lanes < 1 or not (profile.link.bandwidth > 0 and profile.copy > 0):
            raise ProfileError(
                "expected nodes, lanes, bandwidth and copy above 0, "
                f"got {profile.nodes}, {profile.lanes}, {profile.link.bandwidth}, {profile.copy}"
            )
        self.profile = profile
        self.layout = lay_out(profile)
        self.blocks: tuple[LiveBlock, ...] = self.layout.blocks
        self.brought = portions(profile, DDP_BUCKETS) if brought is None else brought
        portion_of = {t: p for p, held in enumerate(self.brought) for t in held}
        last = [max(portion_of[t] for t, _ in b.parts) for b in self.blocks]
        #: blocks as they become available; of those that come together the highest address first, as lanes send them
        self.order = sorted(range(len(self.blocks)), key=lambda b: (last[b], -b))
        each = profile.nodes <= NODES and profile.nodes * len(self.blocks) <= NODE_BLOCKS
        self.nodes = profile.nodes if each else 1
        self.width = kernels.FIRST_LANE + profile.lanes
        # A node with one connection, or one that stands for all, has nothing to share its link among.
        self.quantum = QUANTUM / profile.link.bandwidth if self.nodes > 2 else float("inf")
        tensors = profile.tensors
        sizes = [sum(tensors[t].elements * dtype_of(tensors[t]).itemsize for t in held) for held in self.brought]
        ready = np.maximum.accumulate([max((tensors[t].ready for t in held), default=0.0) for held in self.brought])
        self._portion: F64 = np.array([[r, n / profile.copy] for r, n in zip(ready, sizes, strict=True)]).reshape(-1, 2)
        rows = [(last[b], self.blocks[b].owner, self.blocks[b].lane) for b in self.order]
        self._place: I64 = np.array(rows, np.int64).reshape(-1, 3)
        self._backward = profile.backward
        self._position = np.argsort(self.order)
        self._rows = np.arange(len(self.order))
        self._back: F64 = np.array([self.blocks[b].nbytes / profile.copy for b in self.order])

    def usable(self, block: int, spec: str) -> str:
        """Why a block cannot have a spec, as the daemon sees it; empty if it can."""
        b, name = self.blocks[block], parse(spec).name
        if name == DENSE:
            return ""
        if not b.compressible:
            return f"{b.dtype.label} or a section below min_compress_bytes travels as it is"
        if name in CASTS and b.dtype is not DType.F32:
            return f"a cast would not shrink {b.dtype.label}"
        return "blocks may cut matrices" if name in TWO_EXCHANGES and not self.layout.whole else ""

    def nbytes(self, block: int, spec: str) -> float:
        """Bytes of a contribution of a block at a spec's own level."""
        b, parsed = self.blocks[block], parse(spec)
        cost = cost_of(self.profile, spec) if parsed.name != DENSE else None
        return sum(
            segment_bytes(parsed, cost, self.profile.tensors[t].shape, n, 0, b.dtype.itemsize) for t, n in b.parts
        )

    def settled(self, block: int, option: BlockOption) -> BlockOption:
        """The option as the daemon carries it out, its bytes filled in: what cannot be compressed goes dense."""
        spec, scheme, nbytes = option.spec, option.scheme, option.nbytes
        if spec == DENSE or self.usable(block, spec):
            spec, nbytes = DENSE, float(self.blocks[block].nbytes)
            small = self.profile.nodes <= SMALL_MEMBERS and nbytes * (self.profile.nodes - 1) <= SMALL_BYTES
            scheme = ALL if small else scheme
        elif parse(spec).name in TWO_EXCHANGES:
            scheme = OWNER
        return BlockOption(spec, scheme, self.nbytes(block, spec) if nbytes < 0 else nbytes)

    def price(self, block: int, option: BlockOption) -> list[float]:
        """The columns of `live_kernels` of one block."""
        option, n = self.settled(block, option), self.blocks[block].elements
        profile, busy = self.profile, self.profile.busy
        dense = cost_of(profile, DENSE)
        cost = dense if option.spec == DENSE else cost_of(profile, option.spec)
        stages = 2 if parse(option.spec).name in TWO_EXCHANGES else 1
        send = option.nbytes / stages / profile.link.bandwidth
        # several workers of a node are summed before anything else
        local = (profile.local_ranks - 1) * dense.decode_add(n)
        add, decode = cost.decode_add(n), cost.decode(n)
        scheme = kernels.ALL if option.scheme == ALL else kernels.OWNER
        if option.spec == DENSE:
            row = [local, 0.0, 0.0, add, dense.decode(n) if profile.nodes == 1 else 0.0, decode]
        elif option.scheme == ALL:
            row = [local + cost.encode(n), 0.0, decode, add, dense.decode(n), 0.0]
        elif stages == 2:
            half = cost.encode(n) / 2
            row = [local + half, half, add / 2, add / 2, decode, decode]
        else:
            row = [local + cost.encode(n), 0.0, decode, add, cost.encode(n) + decode, decode]
        others = profile.nodes - 1
        if option.scheme == ALL:
            lane = row[0] + row[2] + others * row[3] + row[4]
        else:
            adding = stages * (row[2] + others * row[3])
            lane = row[0] + row[1] + (adding + row[4] + others * row[5]) / profile.nodes
        # a turn more on every lane for the exchange in between
        turns = profile.round_seconds * (1 + stages) / 2
        cpu = busy * (lane + 2 * NETWORK * self.sent(block, option)) + turns
        return [float(scheme), float(stages), *(busy * seconds for seconds in row), send, cpu]

    def table(self, columns: Sequence[Sequence[BlockOption]]) -> F64:
        """Prices of several options for every block, float64[B, K, 10]; columns[k][b]: option k of block b.

        Raises ProfileError for a cost that is not known, or another number of options.
        """
        if odd := [len(column) for column in columns if len(column) != len(self.blocks)]:
            raise ProfileError(f"expected an option for each of {len(self.blocks)} blocks, got {odd[0]}")
        return np.array([[self.price(b, column[b]) for column in columns] for b in self.order]).reshape(
            len(self.order), len(columns), kernels.COLUMNS
        )

    def cpu(self, options: Sequence[BlockOption]) -> float:
        """Seconds that the mean node's lanes and network stack compute for a step with these options, as much longer as
        kernels take in the job."""
        return float(self.table([options])[:, 0, kernels.CPU].sum())

    def run(self, table: F64, choice: I64) -> tuple[float, F64]:
        """(seconds of a step, float64[B, 2] when each block was available and back) with column choice[b] for block b.

        Times of blocks are seconds since the first gradient, in block order.
        """
        end, spans, _, _ = self._simulate(table, choice)
        taken = self.profile.interference
        if taken:
            taken *= float(table[self._rows, choice[self.order], kernels.CPU].sum())
        return self.profile.forward + max(end, self._backward) + taken, spans[self._position]

    def seconds(self, options: Sequence[BlockOption]) -> float:
        """Seconds of a step with these options, one a block in address order."""
        return self.run(self.table([options]), np.zeros(len(self.blocks), np.int64))[0]

    def step(self, options: Sequence[BlockOption]) -> LiveStep:
        """The same with all that happens."""
        _, _, ints, floats = self._simulate(self.table([options]), np.zeros(len(self.blocks), np.int64))
        forward = self.profile.forward
        jobs = self._computing()
        for (resource, _, _, kind, what), (_, _, start, stop, _) in zip(ints.tolist(), floats.tolist(), strict=True):
            node, at = divmod(resource, self.width)
            name = ("worker", "link out", "link in")[at] if at < 3 else f"lane {at - 3}"
            index = what if kind == kernels.COPY_IN else self.order[what]
            jobs.append(LiveJob(_KINDS[kind], name, node, index, forward + start, forward + stop))
        seconds, taken = self.seconds(options), self.profile.interference * self.cpu(options)
        if taken:
            jobs += [LiveJob("wait for cores", "worker", n, -1, seconds - taken, seconds) for n in range(self.nodes)]
        jobs.sort(key=lambda j: (j.start, j.end, j.node))
        sent = sum(self.sent(b, option) for b, option in enumerate(options))
        return LiveStep(seconds, sent, tuple(jobs))

    def sent(self, block: int, option: BlockOption) -> float:
        """Bytes that the mean node sends of a block: contributions and aggregates."""
        settled, others = self.settled(block, option), self.profile.nodes - 1
        return settled.nbytes * others * (1.0 if settled.scheme == ALL else 2.0 / self.profile.nodes)

    def _simulate(self, table: F64, choice: I64) -> tuple[float, F64, I64, F64]:
        p = self.profile
        picked = choice[self.order] if len(self.order) else choice
        found: tuple[float, F64, I64, F64] = kernels.simulate(
            p.nodes, self.nodes, self.width, p.link.latency, self.quantum, p.round_seconds / 2, self._portion,
            self._place, self._back, table, picked,
        )  # fmt: skip
        return found

    def _computing(self) -> list[LiveJob]:
        """What the workers compute: the forward pass, then one gradient after the other."""
        jobs, forward = [], self.profile.forward
        for node in range(self.nodes):
            jobs.append(LiveJob("forward", "worker", node, -1, 0.0, forward))
            before = 0.0
            for i, t in enumerate(self.profile.tensors):
                jobs.append(LiveJob("compute", "worker", node, i, forward + before, forward + max(before, t.ready)))
                before = max(before, t.ready)
        return jobs
