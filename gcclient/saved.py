"""What a checkpoint holds of gradcomm, and how states saved for some blocks come to those of another layout.

What may live here: the keys and texts of a checkpoint, reading and checking them, cutting residuals anew. What may not:
asking the daemon for states or bringing them (`checkpoint.py`), when that is done (`session.py`).

    format                         1
    domain/<label>                 JSON of a SavedDomain; the same on all ranks
    rank <r>/<label>               JSON of a SavedPart; of the first rank of each node, which has what its node held
    back rank <r>/<label>/<side>/<tensor>[<first>:<last>]   float32: the residual of these elements of a tensor
    rank <r>/<label>/<side>/<tensor>[<first>:<last>]+  float32: what else the codec keeps of the block beginning there

``side``: "contribution" or "owner". Residuals are named by tensors, so they can be cut for other blocks; what else a
codec keeps belongs to a block as it was cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from gcclient.errors import StateMismatch
from gcproto.agreed import MAX_ORIGIN, MAX_RULES, MAX_STEPS_BEFORE, Label, Resumed, Rule
from gcproto.dtypes import DType
from gcproto.manifest import USED, Block, Section, TensorSpec, check_section

F32 = NDArray[np.float32]
FORMAT: Final = 1
#: dtypes whose tensors may be compressed, so that there may be states of them
FLOATING: Final = frozenset({DType.F32, DType.F16, DType.BF16})
SIDES: Final = ("contribution", "owner")
#: (tensor, its first element, the one after its last)
Piece = tuple[str, int, int]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
NEWEST: Final = "load the checkpoint with the release that saved it, or save it again"


class SavedDomain(msgspec.Struct, frozen=True):
    """What all ranks of a domain save alike. ``nodes``: its ranks on each node; ``tensors``: in the order in which they
    were declared, also those that are never compressed."""

    ranks: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    scoped: bool
    codec: str
    tensors: tuple[TensorSpec, ...]
    #: bytes as hexadecimal digits
    origin: str
    steps: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEPS_BEFORE)]
    numbers: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    rules: Annotated[tuple[Rule, ...], msgspec.Meta(max_length=MAX_RULES)]
    controller: Label
    default: Annotated[tuple[Rule, ...], msgspec.Meta(max_length=MAX_RULES)]
    #: not in checkpoints of earlier releases
    planned: bool = False


class SavedBlock(msgspec.Struct, frozen=True, array_like=True):
    """States of one block: ``side`` is an index of SIDES, ``floats`` how many in all, the rest as in `BlockStates`."""

    side: Annotated[int, msgspec.Meta(ge=0, le=1)]
    pieces: tuple[Piece, ...]
    floats: Number
    tag: Annotated[int, msgspec.Meta(ge=0)]
    held: bool

    @property
    def elements(self) -> int:
        return sum(b - a for _, a, b in self.pieces)


class SavedPart(msgspec.Struct, frozen=True):
    """What a node's first rank saves of a domain."""

    blocks: tuple[SavedBlock, ...]


@dataclass(frozen=True, slots=True)
class States:
    """States of a block as a lane has them: float32, the residual first."""

    owner: bool
    tag: int
    held: bool
    values: F32


@dataclass(slots=True)
class Saved:
    """One domain of a checkpoint, as this rank needs it. ``used`` are the blocks that found a place."""

    label: str
    domain: SavedDomain
    blocks: list[tuple[SavedBlock, F32]] = field(default_factory=list)
    #: whether there is a part of this rank's
    whole: bool = True
    used: set[int] = field(default_factory=set)
    _exact: dict[tuple[int, tuple[Piece, ...]], int] = field(default_factory=dict)
    #: by side and tensor: (first element, the one after the last, block, place in its residual)
    _parts: dict[tuple[int, str], list[tuple[int, int, int, int]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for index, (block, _) in enumerate(self.blocks):
            self._exact[block.side, block.pieces] = index
            at = 0
            for name, first, last in block.pieces:
                self._parts[block.side, name].append((first, last, index, at))
                at += last - first

    def resumed(self, alike: bool, same_codec: bool) -> Resumed:
        """What the domain is declared to go on from. ``alike``: its nodes are those that it was saved on."""
        d = self.domain
        plan = (d.rules, d.controller, d.default, d.planned) if same_codec else ()
        return Resumed(bytes.fromhex(d.origin), d.steps, d.numbers if alike else (), *plan)

    def specs(self) -> dict[str, TensorSpec]:
        """By name, what was saved."""
        return {t.name: t for t in self.domain.tensors}

    def states(self, pieces: tuple[Piece, ...], mine: bool) -> Iterator[tuple[States, str]]:
        """What there is for a block of these pieces, and what of it is lost by its new cut (empty: nothing).

        ``mine``: this node owns the block. Sums that it held back of a block which another one owns now go to its own
        contribution, which comes to the same.
        """
        found = self._find(0, pieces)
        if mine:
            owned = self._find(1, pieces)
        else:
            owned, held = None, self._find(1, pieces)
            if held is not None:
                n = sum(b - a for _, a, b in pieces)
                if found is None:
                    found = States(False, 0, True, np.zeros(n, np.float32)), ""
                values = found[0].values.copy()
                values[:n] += held[0].values[:n]
                lost = found[1] or held[1]
                if not lost and held[0].values[n:].any():
                    lost = _beside(pieces[0][0])
                found = States(False, found[0].tag, found[0].held or held[0].held, values), lost
        yield from (x for x in (found, owned) if x is not None)

    def _find(self, side: int, pieces: tuple[Piece, ...]) -> tuple[States, str] | None:
        index = self._exact.get((side, pieces))
        if index is not None:
            block, values = self.blocks[index]
            self.used.add(index)
            return States(bool(side), block.tag, block.held, values), ""
        out: F32 | None = None
        held, lost, at = False, "", 0
        for name, first, last in pieces:
            for a, b, index, where in self._parts.get((side, name), ()):
                low, high = max(a, first), min(b, last)
                if low >= high:
                    continue
                if out is None:
                    out = np.zeros(sum(y - x for _, x, y in pieces), np.float32)
                block, values = self.blocks[index]
                out[at + low - first : at + high - first] = values[where + low - a : where + high - a]
                held |= block.held
                self.used.add(index)
                if values[block.elements :].any():
                    lost = lost or _beside(name)
            at += last - first
        return None if out is None else (States(bool(side), 0, held, out), lost)


def _beside(name: str) -> str:
    return f"what the codec keeps of {name!r} beside its residual"


def cut(section: Section, blocks: Sequence[Block]) -> list[tuple[Piece, ...]]:
    """The parts of tensors that each block of a section, in address order, holds."""
    tensors = ((t.name, t.elements) for t in section.tensors if t.elements)
    out: list[tuple[Piece, ...]] = []
    name, elements, at = "", 0, 0
    for block in blocks:
        pieces = []
        for n in (b - a for a, b in pairwise(block.bounds)):
            if at == elements:
                (name, elements), at = next(tensors), 0
            pieces.append((name, at, at + n))
            at += n
        out.append(tuple(pieces))
    return out


def tensors_of(sections: Iterable[Section]) -> tuple[TensorSpec, ...]:
    """All tensors but workers' notes."""
    return tuple(t for s in sections for t in s.tensors if t.name != USED)


# ------------------------------------------------------------------------------------------------- keys
def domain_key(label: str) -> str:
    return f"domain/{label}"


def part_key(rank: int, label: str) -> str:
    return f"rank {rank}/{label}"


def is_for(key: str, rank: int) -> bool:
    """Whether rank ``rank`` needs what a checkpoint has under ``key``."""
    return key == "format" or key.startswith(("domain/", f"rank {rank}/"))


def _places(part: str, block: SavedBlock) -> list[tuple[str, int, int]]:
    """(key, first float, the one after the last) of what a block's states are kept as."""
    side, at, out = f"{part}/{SIDES[block.side]}", 0, []
    for name, first, last in block.pieces:
        out.append((f"{side}/{name}[{first}:{last}]", at, at + last - first))
        at += last - first
    if block.floats > at:
        name, first, last = block.pieces[0]
        out.append((f"{side}/{name}[{first}:{last}]+", at, block.floats))
    return out


def write_part(rank: int, label: str, blocks: Iterable[tuple[SavedBlock, F32]]) -> dict[str, Any]:
    """What a node's first rank puts into a checkpoint of a domain; holds on to none of ``blocks``."""
    part, out = part_key(rank, label), dict[str, Any]()
    written = []
    for block, values in blocks:
        written.append(block)
        for key, first, last in _places(part, block):
            # Of its own: a view would have torch.save write the whole block for each.
            out[key] = torch.from_numpy(values[first:last].copy())
    return {part: _text(SavedPart(tuple(written))), **out}


def write_domain(label: str, domain: SavedDomain) -> dict[str, Any]:
    """What every rank puts into it."""
    return {domain_key(label): _text(domain)}


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


# ---------------------------------------------------------------------------------------------- reading
def read(state: Mapping[str, Any], rank: int) -> dict[str, Saved]:
    """The domains in a checkpoint, by label, with what there is for ``rank``. Raises StateMismatch."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise StateMismatch("expected what gcclient.state_dict() returned: there is no 'format'", advice=NEWEST)
    if state["format"] != FORMAT:
        raise StateMismatch(f"expected a checkpoint of format {FORMAT}, got {state['format']!r}", advice=NEWEST)
    found = {}
    for key in state:
        if not isinstance(key, str) or not key.startswith("domain/"):
            continue
        label = key.removeprefix("domain/")
        domain = _struct(state, key, SavedDomain)
        part = part_key(rank, label)
        blocks = _struct(state, part, SavedPart).blocks if part in state else ()
        try:
            _check(domain, blocks)
        except ValueError as error:
            raise StateMismatch(f"{key}: {error}", advice=NEWEST) from None
        values = [(block, _values(state, part, block)) for block in blocks]
        found[label] = Saved(label, domain, values, part in state)
    return found


def _check(domain: SavedDomain, blocks: Iterable[SavedBlock]) -> None:
    """Raises ValueError for what no daemon would take, beyond what types say."""
    if not 1 <= (length := len(bytes.fromhex(domain.origin))) <= MAX_ORIGIN:
        raise ValueError(f"origin: expected 1 to {MAX_ORIGIN} bytes, got {length}")
    if max((*domain.numbers, *(block.tag for block in blocks)), default=0) >> 64:
        raise ValueError("numbers of nodes and tags of codecs have 64 bits")
    for tensor in domain.tensors:
        check_section(Section(0, (tensor,)))


def _struct(state: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(state[key], type=kind)
    except (TypeError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StateMismatch(f"{key}: expected the JSON text of a {kind.__name__}: {error}", advice=NEWEST) from None


def _values(state: Mapping[str, Any], part: str, block: SavedBlock) -> F32:
    if not block.pieces or any(a >= b or a < 0 for _, a, b in block.pieces) or block.floats < block.elements:
        raise StateMismatch(f"{part}: no block is cut {block.pieces} and has {block.floats} floats", advice=NEWEST)
    found = []
    for key, first, last in _places(part, block):
        tensor = state.get(key)
        if not isinstance(tensor, torch.Tensor):
            raise StateMismatch(f"{key}: expected a tensor, got {type(tensor).__name__}", advice=NEWEST)
        if tensor.dtype is not torch.float32 or tensor.shape != (last - first,):
            what = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise StateMismatch(f"{key}: expected torch.float32 of shape [{last - first}], got {what}", advice=NEWEST)
        found.append(tensor.detach().cpu().contiguous().numpy())
    values: F32 = np.concatenate(found)
    if not np.isfinite(values).all():
        raise StateMismatch(f"{part}: what is saved of {block.pieces[0][0]!r} is not finite", advice=NEWEST)
    return values


def check_tensor(saved: Saved, tensor: TensorSpec, specs: Mapping[str, TensorSpec]) -> str:
    """Why nothing that is saved of a domain (``specs``) fits a tensor declared now; empty if it does."""
    was = specs.get(tensor.name)
    if was is None:
        return f"{tensor.describe()} is not in the checkpoint" if saved.domain.scoped else ""
    if was.shape != tensor.shape:
        return f"{tensor.describe()} has shape {list(was.shape)} in the checkpoint"
    if was.dtype in FLOATING and tensor.dtype not in FLOATING:
        return f"{tensor.describe()} is never compressed, and is {DType(was.dtype).name} in the checkpoint"
    return ""
