"""What the workers of a node send each other of gradients where that is encoded, and what is held back of it.

What may live here: which parts are encoded, how a bucket's messages are laid out, residuals and when they count. What
may not: collectives (`node_group.py`), threads and steps (`sharded.py`), the keys of checkpoints (`node_states.py`).

A bucket's message to another worker has the part of each of its parameters that is that worker's shard. Every part is a
payload of its own, so that neither bits nor residuals depend on torch's buckets. A worker's own part is not encoded.
The receiver decodes what comes and adds it up in rank order, its own part at its own place.

    message    [0, 4)  float32: 0, or NaN if something that is encoded was not finite; then parts, at multiples of 16
    part       a payload; or the elements as they are, where they are few or excluded or a payload would be no shorter

Residuals have two versions: one that counts, one that the step under way writes. It takes the place of the first once
the step is over and was not void (Design, 4: versions, not undo).
"""

from __future__ import annotations

import fnmatch
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash

from gcclient import arguments
from gcclient.device import HOST
from gcclient.gpu_codecs import GpuCodec, GpuCodecError, make, names
from gcclient.gpu_codecs.ops import get
from gcclient.hierarchy import Hierarchy, Nodes, Shards, part
from gcclient.node_group import Cut
from gcclient.node_states import Held, Piece, SavedNode
from gcclient.parameters import Options, Parameter, takes_matrices

log = logging.getLogger("gcclient")

#: Parts of fewer elements go as they are: they are quick to send and many to encode.
LEAST: Final = 1024
#: Where parts begin in a message, bytes; the first is the word about what was not finite.
ALIGNED: Final = 16
#: gradients that may be encoded, as in the daemon
_ENCODED: Final = (torch.float32, torch.float16, torch.bfloat16)
DENSE: Final = "none"


def read_node_codec(node_codec: object, hierarchy: Hierarchy) -> str:
    """A codec's spec; empty where nothing is to be encoded. Raises TypeError and ValueError that say what is taken."""
    if node_codec is None:
        return ""
    spec = arguments.read_text(node_codec, "node_codec").strip()
    if spec in ("", DENSE):
        return ""
    if hierarchy is False:
        raise ValueError(f"node_codec={spec!r}: only with hierarchy=True or 'auto', which sums within nodes")
    if takes_matrices(spec):
        raise ValueError(f"node_codec={spec!r}: shards cut matrices; expected one of {', '.join(names())}")
    try:
        codec = make(spec)
    except GpuCodecError as error:
        raise ValueError(f"node_codec={spec!r}: {error}") from None
    if codec.momentum:
        raise ValueError(
            f"node_codec={spec!r}: a momentum would be in what others sum up and not in a worker's own part; "
            "give it to compression"
        )
    if codec.exact_bytes(LEAST) < 0:
        raise ValueError(
            f"node_codec={spec!r}: how long its payloads are depends on the gradients, and workers of a node send each "
            "other messages of known length; topk(ratio=...) without packed=1 is what comes nearest"
        )
    return spec


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's part in a message to the worker with shard ``shard``.

    Elements ``lo:hi`` of the shard as it is packed; ``nbytes`` from byte ``at`` of the message.
    """

    name: str
    shard: int
    lo: int
    hi: int
    at: int
    nbytes: int
    encoded: bool


class Layout:
    """Where everything lies in the messages of one bucket: ``slots`` and ``sizes`` (bytes) by shard. ``encodes``:
    whether anything is encoded at all, by whichever worker."""

    def __init__(self, codec: NodeCodec, known: Sequence[Parameter], cut: Cut) -> None:
        self.slots: list[tuple[Slot, ...]] = []
        self.sizes: list[int] = []
        self.dtype = cut.packed.dtype
        itemsize = self.dtype.itemsize
        for shard, lengths in enumerate(cut.parts):
            slots, lo, at = [], 0, ALIGNED
            for parameter, n in zip(known, lengths, strict=True):
                short = codec.payload(parameter.name, n, self.dtype)
                size = short or n * itemsize
                if n:
                    slots.append(Slot(parameter.name, shard, lo, lo + n, at, size, bool(short)))
                lo, at = lo + n, at + -(-size // ALIGNED) * ALIGNED
            self.slots.append(tuple(slots))
            self.sizes.append(at)
        self.encodes = any(slot.encoded for slots in self.slots for slot in slots)


@dataclass(frozen=True, slots=True)
class Message:
    """One bucket in one step. ``number``: of the model's exchange (the first is 0), ``scale``: the loss scale of its
    gradients, ``after``: what has to be over before it is encoded."""

    codec: NodeCodec
    layout: Layout
    number: int
    scale: float
    after: threading.Event

    @property
    def expected(self) -> int:
        """Bytes that each of the other ranks sends this one."""
        nodes = self.codec.nodes
        return self.layout.sizes[nodes.place] if nodes.has_shard else 0

    def encode(self, cut: Cut) -> tuple[torch.Tensor, list[int]]:
        """See `NodeCodec.encode`."""
        return self.codec.encode(self, cut)

    def add(self, cut: Cut, received: torch.Tensor) -> None:
        """See `NodeCodec.add`."""
        self.codec.add(self, cut, received)


@dataclass(slots=True)
class _Residual:
    """float32, of a part that is another worker's: what counts (None: zeros), and what the step under way writes."""

    settled: torch.Tensor | None = None
    written: torch.Tensor | None = None

    def flip(self) -> None:
        self.settled, self.written = self.written, self.settled


class NodeCodec:
    """A model's codec between the workers of its nodes, as one of them sees it.

    ``elements``: of the model's parameters, by name. ``steps``: exchanges so far, those before a checkpoint too;
    ``origin``: what chance draws from. ``settled``: set unless a step is under way whose end decides what counts.
    `encode` and `add` are called by one thread, `settle` while neither is under way.
    """

    def __init__(self, spec: str, label: str, nodes: Nodes, rank: int, elements: Mapping[str, int]) -> None:
        self.spec, self.label, self.nodes, self.rank = spec, label, nodes, rank
        self.elements = dict(elements)
        self.codec: GpuCodec = make(spec)
        self.origin = b""
        self.steps = 0
        self.warmup = 0
        self.settled = threading.Event()
        self.settled.set()
        self._plain: set[str] = set()
        self._held: dict[tuple[str, int], _Residual] = {}
        self._written: list[_Residual] = []
        self._room = torch.empty(0, dtype=torch.uint8, device=HOST)
        self._host = torch.empty(0, dtype=torch.uint8, device=HOST)
        self._decoded = torch.empty(0, device=HOST)

    def leave_out(self, exclude: Iterable[str], warmup: int) -> None:
        """What goes as it is: tensors with names that match these globs, and all of the first ``warmup`` exchanges."""
        self._plain = {name for pattern in exclude for name in fnmatch.filter(self.elements, pattern)}
        self.warmup = warmup

    def payload(self, name: str, n: int, dtype: torch.dtype) -> int:
        """Bytes of the payload of n elements of a parameter; 0 where they go as they are."""
        if n < LEAST or name in self._plain or dtype not in _ENCODED:
            return 0
        size = self.codec.exact_bytes(n)
        return size if size < n * dtype.itemsize else 0

    def encodes(self, dtypes: Mapping[str, torch.dtype]) -> bool:
        """Whether anything of the model is encoded at all."""
        shards = range(self.nodes.shards)
        return any(
            self.payload(name, hi - lo, dtypes[name])
            for name, n in self.elements.items()
            for lo, hi in (part(n, self.nodes.shards, k) for k in shards)
        )

    # ------------------------------------------------------------------------------------------- one bucket
    def encode(self, message: Message, cut: Cut) -> tuple[torch.Tensor, list[int]]:
        """What a packed bucket has for others, as uint8, and how many of these bytes are for each rank of the node."""
        layout, others = message.layout, self._others()
        sizes = [layout.sizes[k] if k in others else 0 for k in range(len(self.nodes.local))]
        most = max((s.hi - s.lo for k in others for s in layout.slots[k] if s.encoded), default=0)
        # A codec wants room for the longest payload of so many elements; what it writes is exactly as long as the slot.
        room = self._bytes(sum(sizes) + self.codec.max_bytes(most), cut.packed.device)
        begin = 0
        for k in others:
            self._write(message, layout.slots[k], cut.rows[k], room[begin:])
            begin += sizes[k]
        return room[:begin], sizes

    def _write(self, message: Message, slots: Iterable[Slot], row: torch.Tensor, out: torch.Tensor) -> None:
        bad = []
        for slot in slots:
            values = row[slot.lo : slot.hi]
            if not slot.encoded:
                out[slot.at : slot.at + slot.nbytes].copy_(values.view(torch.uint8))
                continue
            held = self._residual(slot.name, slot.shard)
            if self.codec.state_floats(values.numel()) and held.written is None:
                held.written = torch.empty(values.numel(), device=values.device)
            pending = self.codec.encode(
                values.float(), held.settled, held.written, out[slot.at :],
                scale=1.0 / message.scale, seed=self._seed(message.number, slot),
            )  # fmt: skip
            if pending.nbytes != slot.nbytes:
                raise GpuCodecError(f"{self.spec}: expected a payload of {slot.nbytes} bytes, got {pending.nbytes}")
            self._written.append(held)
            bad.append(pending.nonfinite)
        word = out[:4].view(torch.float32)
        word.zero_()
        if bad:
            word.masked_fill_(torch.stack(bad).any(), torch.nan)

    def add(self, message: Message, cut: Cut, received: torch.Tensor) -> None:
        """The sum over the node's ranks in their order, of what came from the others (one message after the other) and
        this rank's own part, into ``cut.shard``. Raises GpuCodecError for what is no such message."""
        place, layout = self.nodes.place, message.layout
        messages = iter(self._to_host(received).split(layout.sizes[place]))
        if self._decoded.numel() < cut.width or self._decoded.device != cut.shard.device:
            self._decoded = torch.zeros(cut.width, device=cut.shard.device)
        decoded = self._decoded[: cut.width]
        for other in range(len(self.nodes.local)):
            if other == place:
                brought = cut.packed[place * cut.width :][: cut.width]
            else:
                self._read(message, next(messages), decoded)
                brought = decoded
            if other:
                cut.shard.add_(brought)
            else:
                cut.shard.copy_(brought)

    def _read(self, message: Message, came: torch.Tensor, out: torch.Tensor) -> None:
        for slot in message.layout.slots[self.nodes.place]:
            data, values = came[slot.at : slot.at + slot.nbytes], out[slot.lo : slot.hi]
            if slot.encoded:
                self.codec.decode(data, values, scale=message.scale)
            else:
                values.copy_(get(data, 0, slot.hi - slot.lo, message.layout.dtype), non_blocking=True)
        # A sum that is not finite makes the step void on all nodes, as if what was encoded had come as it was.
        out[:1].add_(came[:4].view(torch.float32).to(out.device, non_blocking=True))

    def _to_host(self, received: torch.Tensor) -> torch.Tensor:
        """Payloads are checked where they are decoded from: on a device that would wait for each word of them."""
        if received.device.type == "cpu":
            return received
        if self._host.numel() < received.numel():
            self._host = torch.empty(received.numel(), dtype=torch.uint8, device=HOST, pin_memory=True)
        host = self._host[: received.numel()]
        host.copy_(received, non_blocking=True)
        torch.cuda.current_stream(received.device).synchronize()
        return host

    def _others(self) -> list[int]:
        return [k for k in range(self.nodes.shards) if k != self.nodes.place]

    def _bytes(self, size: int, device: torch.device) -> torch.Tensor:
        """One bucket is sent at a time."""
        if self._room.numel() < size or self._room.device != device:
            self._room = torch.empty(size, dtype=torch.uint8, device=device)
        return self._room

    def _seed(self, number: int, slot: Slot) -> int:
        """Of a payload: another one for each step, parameter, sender and receiver; the same whenever a job is repeated
        or goes on."""
        text = f"{number}/{self.rank}/{self.nodes.local[slot.shard]}/{slot.name}".encode()
        return xxhash.xxh3_64_intdigest(self.origin + text) >> 2

    def _residual(self, name: str, shard: int) -> _Residual:
        return self._held.setdefault((name, shard), _Residual())

    # ------------------------------------------------------------------------------------------- its steps
    def settle(self, counts: bool) -> None:
        """The step is over; ``counts``: it was not void, so that what it wrote is what is held back now."""
        written, self._written = self._written, []
        if counts:
            for held in written:
                held.flip()

    # ----------------------------------------------------------------------------------------- checkpoints
    def held(self) -> Held:
        """What of it belongs into a checkpoint, on the CPU."""
        values: dict[Piece, torch.Tensor] = {}
        for (name, shard), held in self._held.items():
            if held.settled is not None:
                values[name, *part(self.elements[name], self.nodes.shards, shard)] = held.settled.cpu().clone()
        nodes = self.nodes
        return Held(
            SavedNode(self.spec, nodes.local, nodes.shards, self.origin.hex(), self.steps, tuple(values)), values
        )

    def why_not(self, held: Held) -> str:
        """Why nothing of what was saved fits; empty if all of it does."""
        about, nodes = held.about, self.nodes
        if (about.local, about.shards) != (nodes.local, nodes.shards):
            return (
                f"workers {_listed(about.local)} in {about.shards} shards sent each other what is in it, "
                f"and now {_listed(nodes.local)} do in {nodes.shards}"
            )
        if about.parts and not self.codec.state_floats(LEAST):
            return f"node_codec={about.codec!r} held something back, and {self.spec!r} never does"
        known = {(name, *part(n, nodes.shards, k)) for name, n in self.elements.items() for k in self._others()}
        strange = [piece for piece in about.parts if piece not in known]
        return f"{strange[0][0]!r} has no such part now: elements {strange[0][1]}..{strange[0][2]}" if strange else ""

    def take(self, held: Held, device: torch.device) -> None:
        """Go on from what was saved, which fits."""
        self.origin, self.steps = bytes.fromhex(held.about.origin), held.about.steps
        for name, n in self.elements.items():
            for k in self._others():
                found: Any = held.values.get((name, *part(n, self.nodes.shards, k)))
                if found is not None:
                    self._residual(name, k).settled = found.to(device, copy=True)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def codec_of(shards: Shards, nodes: Nodes, rank: int, options: Options, spec: str) -> NodeCodec | None:
    """The codec between the workers of nodes that a model was declared with, if any."""
    if not spec:
        return None
    tensors = {p.name: p.tensor for p in shards.parameters}
    made = NodeCodec(spec, shards.label, nodes, rank, {name: t.numel() for name, t in tensors.items()})
    made.leave_out(options.exclude, options.warmup)
    if not made.encodes({name: t.dtype for name, t in tensors.items()}):
        log.warning("node_codec=%r encodes nothing of %s: no part of a parameter is large enough, or all are excluded",
                    spec, shards.label)  # fmt: skip
    return made
