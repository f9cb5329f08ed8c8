"""A model's parameters in a domain: declared on all ranks, placed in blocks, merged into groups.

What may live here: what both ways of training (`ddp.py`, `optimizer.py`) need to know of where gradients live. What
may not: steps (`scope.py`), pushing, results.
"""

from __future__ import annotations

import fnmatch
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import xxhash

from gcclient import arguments, device
from gcclient.arena import BlockPlace
from gcclient.audit import Audit, read_audit
from gcclient.device import Bytes
from gcclient.domain import Domain
from gcclient.grouping import read_groups
from gcclient.session import Session
from gcproto import modes
from gcproto.agreed import MAX_WARMUP
from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareDomain
from gcproto.modes import STATIC

#: Domain numbers below this are not models'.
FIRST_MODEL: Final = 16
#: Codecs that take whole matrices, by name (a test compares with gcserver.codecs).
MATRIX_CODECS: Final = frozenset({"powersgd"})
#: Bytes of the largest tensor with which a model is declared whole where plans are automatic: a larger one would be a
#: block of its own that keeps one owner busy while the others wait.
LARGEST_WHOLE: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of a model's domain beside its tensors: arguments of :func:`gcclient.state`, read.

    ``codec`` is empty where the job's is meant, and so is ``quality``.
    """

    codec: str = ""
    whole: bool | None = None
    groups: object = None
    audit: Audit | None = None
    quality: str = ""
    exclude: tuple[str, ...] = ()
    warmup: int = 0


def read_options(
    compression: str | None,
    whole: bool | None,
    groups: object,
    audit: Audit | None,
    quality: str | None,
    exclude: Iterable[str],
    warmup_steps: int,
) -> Options:
    """Raises TypeError and ValueError that name the argument."""
    return Options(
        "" if compression is None else arguments.read_codec(compression),
        whole,
        groups,
        read_audit(audit, os.environ),
        arguments.read_word(quality, "quality", {}, "", modes.QUALITIES),
        arguments.read_patterns(exclude, "exclude"),
        arguments.read_whole_within(warmup_steps, "warmup_steps", 0, MAX_WARMUP),
    )


def takes_matrices(codec: str) -> bool:
    """Whether a codec's spec names one of gradcomm's that take whole matrices."""
    return re.split(r"[(+]", codec)[0].strip() in MATRIX_CODECS


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


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """What is declared together. ``kind``: what its domain is called after; ``named``: its parameters, in its order;
    ``ranks``: those it is averaged over; ``options``: the same on all of them."""

    kind: str
    named: Sequence[tuple[str, torch.Tensor]]
    ranks: tuple[int, ...]
    options: Options

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self.named]


def declare(session: Session, model: Model) -> tuple[Domain, list[Parameter]]:
    """Declare parameters as a domain of their own; returns it and them, in address order. All ranks together.

    :func:`gcclient.state` says what is raised.
    """
    with numbering(session):
        prepared = prepare(session, *number(session, model.kind, model.ranks), model)
    return declare_prepared(session, prepared)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that can be declared: nothing of it is refused any more. ``sections``: what is declared together;
    ``groups``: how many there are, None without any."""

    declared: DeclareDomain
    sections: tuple[tuple[Section, list[_Entry]], ...]
    groups: int | None


def prepare(session: Session, which: int, label: str, model: Model) -> Prepared:
    """A model in a domain of that number and label, as it would be declared. Nothing is: whoever mends what this raises
    for may declare the model again. :func:`gcclient.state` says what that is."""
    options = model.options
    codec, whole = options.codec, options.whole
    # Backward order: what is ready first comes first in the address space.
    ordered = [(arguments.read_name(name), tensor) for name, tensor in reversed(model.named)]
    tensors = dict(ordered)
    if len(tensors) < len(ordered):
        (twice, _), *_ = Counter(name for name, _ in ordered).most_common(1)
        raise ValueError(f"every parameter needs a name of its own; {twice!r} is given twice")
    if whole is None:
        # An automatic plan can only choose codecs of whole matrices where blocks were not cut from the start.
        largest = max(t.numel() * t.element_size() for t in tensors.values())
        whole = takes_matrices(codec) or (session.job.mode != STATIC and largest <= LARGEST_WHOLE)
    lists = read_groups(options.groups, list(tensors))
    left_out = _left_out(options.exclude, tensors)
    # No block holds both: one that is led by a tensor that is compressed might compress the others with it.
    sections: dict[tuple[DType, bool], list[_Entry]] = {}
    for group, names in enumerate([list(tensors)] if lists is None else lists):
        for name in names:
            dtype = device.dtype_of(tensors[name], name)
            spec = TensorSpec(name, tuple(tensors[name].shape), int(dtype))
            sections.setdefault((dtype, name in left_out), []).append(_Entry(spec, tensors[name], group))
    every = 0 if options.audit is None else options.audit.every
    declared = DeclareDomain(
        label, which, model.ranks, True, codec, bool(whole), every, options.exclude, options.warmup, options.quality
    )
    cut = tuple((_section(i, entries), entries) for i, entries in enumerate(sections.values()))
    session.checkpoints.check(declared, [section for section, _ in cut])
    return Prepared(declared, cut, None if lists is None else len(lists))


def _section(index: int, entries: list[_Entry]) -> Section:
    cuts = tuple(i for i in range(1, len(entries)) if entries[i].group != entries[i - 1].group)
    return Section(index, tuple(e.spec for e in entries), cuts)


def declare_prepared(session: Session, prepared: Prepared) -> tuple[Domain, list[Parameter]]:
    """:func:`declare`, once a model is prepared."""
    domain = session.domain(prepared.declared)
    session.checkpoints.compare(domain, (t.name for section, _ in prepared.sections for t in section.tensors))
    units = None if prepared.groups is None else [Unit() for _ in range(prepared.groups)]
    parameters: list[Parameter] = []
    for section, entries in prepared.sections:
        places = session.declare(domain, section.tensors, section.cuts)
        parameters += _placed(entries, [(place, _unit(units, entries, place)) for place in places])
    session.checkpoints.complete(domain)
    return domain, parameters


def _left_out(patterns: Sequence[str], names: Iterable[str]) -> set[str]:
    """The names that match any of ``patterns``; a warning for one that matches none of them."""
    found: set[str] = set()
    for pattern in patterns:
        if not (matching := fnmatch.filter(names, pattern)):
            warnings.warn(f"exclude: {pattern!r} matches the name of no parameter", stacklevel=5)
        found.update(matching)
    return found


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
    return max(drawn, FIRST_MODEL), label


@contextmanager
def numbering(session: Session) -> Iterator[None]:
    """Numbers that are given within it are given again should it raise: what is declared after all, once the cause is
    mended, goes by the name that its checkpoint has."""
    before = dict(session.models)
    try:
        yield
    except BaseException:
        session.models = before
        raise


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
