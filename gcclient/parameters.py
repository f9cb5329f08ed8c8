"""A model's parameters in a domain: declared on all ranks, placed in blocks, merged into groups.

What may live here: what both ways of training (`ddp.py`, `optimizer.py`) need to know of where gradients live. What
may not: steps (`scope.py`), pushing, results.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import xxhash

from gcclient import arguments, device
from gcclient.arena import BlockPlace
from gcclient.audit import Audit
from gcclient.device import Bytes
from gcclient.domain import Domain
from gcclient.grouping import read_groups
from gcclient.session import Session
from gcproto.dtypes import DType
from gcproto.manifest import TensorSpec
from gcproto.modes import STATIC

#: Domain numbers below this are not models'.
_FIRST_MODEL: Final = 16
#: Codecs that take whole matrices, by name (a test compares with gcserver.codecs).
MATRIX_CODECS: Final = frozenset({"powersgd"})
#: Bytes of the largest tensor with which a model is declared whole where plans are automatic: a larger one would be a
#: block of its own that keeps one owner busy while the others wait.
LARGEST_WHOLE: Final = 64 << 20


@dataclass(slots=True, eq=False)
class Unit:
    """Blocks that are pushed together, once all their bytes have come: all of a group, or a single one.

    ``scope`` is the newest step that brought it something, ``filled`` how many bytes that was.
    """

    places: list[BlockPlace] = field(default_factory=list)
    nbytes: int = 0
    scope: Any = None
    filled: int = 0

    def take_in(self, place: BlockPlace) -> None:
        self.places.append(place)
        self.nbytes += place.block.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes ``lo:hi`` of a parameter (or of a bucket) and the block memory they correspond to."""

    unit: Unit
    place: BlockPlace
    input: Bytes
    output: Bytes
    lo: int
    hi: int

    def shifted(self, by: int) -> Piece:
        return Piece(self.unit, self.place, self.input, self.output, self.lo + by, self.hi + by)


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """One parameter of the model and where its gradient lives."""

    name: str
    tensor: torch.Tensor
    dtype: DType
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A parameter that is to be declared; ``group``: the index of its group, -1 without groups."""

    spec: TensorSpec
    tensor: torch.Tensor
    group: int


def declare(
    session: Session,
    kind: str,
    named: Iterable[tuple[str, torch.Tensor]],
    ranks: tuple[int, ...],
    compression: str | None,
    whole: bool | None,
    groups: object,
    audit: Audit | None,
) -> tuple[Domain, list[Parameter]]:
    """Declare parameters as a domain of their own; returns it and them, in address order. All ``ranks`` together.

    ``kind``: what the domain is called after. ``named``: in the order of the model. ``compression``, ``whole``,
    ``groups``: as :func:`gcclient.state` takes them, and it says what is raised. ``audit``: what is asked for, if
    anything: all ranks must ask for the same.
    """
    codec = "" if compression is None else arguments.read_text(compression, "compression")
    # Backward order: what is ready first comes first in the address space.
    ordered = [(arguments.read_name(name), tensor) for name, tensor in reversed(list(named))]
    tensors = dict(ordered)
    if len(tensors) < len(ordered):
        (twice, _), *_ = Counter(name for name, _ in ordered).most_common(1)
        raise ValueError(f"every parameter needs a name of its own; {twice!r} is given twice")
    if whole is None:
        # An automatic plan can only choose codecs of whole matrices where blocks were not cut from the start.
        largest = max(t.numel() * t.element_size() for t in tensors.values())
        whole = re.split(r"[(+]", codec)[0].strip() in MATRIX_CODECS or (
            session.job.mode != STATIC and largest <= LARGEST_WHOLE
        )
    lists = read_groups(groups, list(tensors))
    sections: dict[DType, list[_Entry]] = {}
    for group, names in enumerate([list(tensors)] if lists is None else lists):
        for name in names:
            dtype = device.dtype_of(tensors[name], name)
            spec = TensorSpec(name, tuple(tensors[name].shape), int(dtype))
            sections.setdefault(dtype, []).append(_Entry(spec, tensors[name], group))
    which, label = number(session, kind, ranks)
    every = 0 if audit is None else audit.every
    domain = session.domain(label, which, ranks, scoped=True, codec=codec, whole=bool(whole), audit=every)
    units = None if lists is None else [Unit() for _ in lists]
    parameters: list[Parameter] = []
    for entries in sections.values():
        cuts = tuple(i for i in range(1, len(entries)) if entries[i].group != entries[i - 1].group)
        places = session.declare(domain, tuple(e.spec for e in entries), cuts)
        parameters += _placed(entries, [(place, _unit(units, entries, place)) for place in places])
    return domain, parameters


def declare_tensor(session: Session, domain: Domain, name: str, tensor: torch.Tensor) -> Parameter:
    """Declare one more tensor of a model's domain, in blocks of its own. All ranks together."""
    dtype = device.dtype_of(tensor, name)
    entries = [_Entry(TensorSpec(name, tuple(tensor.shape), int(dtype)), tensor, 0)]
    places = session.declare(domain, (entries[0].spec,))
    (parameter,) = _placed(entries, [(place, _unit(None, entries, place)) for place in places])
    return parameter


def number(session: Session, kind: str, ranks: tuple[int, ...]) -> tuple[int, str]:
    """(domain number, label) of the next model of this kind over ``ranks``: alike on all, and unlike any other's."""
    count = session.models.get((kind, ranks), 0)
    session.models[kind, ranks] = count + 1
    whole = len(ranks) == session.me.size
    label = f"{kind}.{count}" if whole else f"{kind}.{count} of ranks {','.join(map(str, ranks))}"
    drawn = xxhash.xxh3_64_intdigest(f"{kind}.{count}/{ranks}".encode()) & 0x7FFFFFFF
    return max(drawn, _FIRST_MODEL), label


def _unit(units: list[Unit] | None, entries: list[_Entry], place: BlockPlace) -> Unit:
    """What a block is pushed with: no block crosses the end of a group, so any tensor of it tells the group."""
    unit = Unit() if units is None else units[entries[place.block.tensor].group]
    unit.take_in(place)
    return unit


def _placed(entries: list[_Entry], places: list[tuple[BlockPlace, Unit]]) -> list[Parameter]:
    """The parameters of one section, whose blocks in address order are ``places``."""
    parameters = []
    at = which = 0
    for e in entries:
        dtype = DType(e.spec.dtype)
        size, pieces, lo = e.spec.elements * dtype.itemsize, [], 0
        while lo < size:
            place, unit = places[which]
            inside = at + lo - place.block.start * dtype.itemsize
            n = min(size - lo, place.block.nbytes - inside)
            if n == 0:
                which += 1
                continue
            part = slice(inside, inside + n)
            pieces.append(Piece(unit, place, place.input[part], place.output[part], lo, lo + n))
            lo += n
        at += size
        parameters.append(Parameter(e.spec.name, e.tensor, dtype, tuple(pieces)))
    return parameters
