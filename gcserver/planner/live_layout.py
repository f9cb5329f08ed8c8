"""Where the tensors of a running job lie in blocks, and in which portions the worker brings them.

What may live here: the layout of a profile's domain, portions (DDP's buckets, MergeComp's groups, single tensors).
What may not: costs, timelines, decisions.

Sections follow one another, each of one dtype, its tensors side by side in order of their addresses; neighbours of the
same dtype (what is excluded has a section of its own) count as one. A profile that has no blocks, or blocks that its
tensors do not fill, is laid out as the daemon would.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final

from gcproto.dtypes import DType
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcserver.planner.profile import Profile, ProfiledTensor, ProfileError

#: What torch's DistributedDataParallel puts into a bucket unless told otherwise, bytes: the first, all others.
DDP_BUCKETS: Final = (1 << 20, 25 << 20)

#: Tensors by their index in the profile, in portions; a portion is copied into the arena as soon as it is complete.
Portions = tuple[tuple[int, ...], ...]

_COMPRESSIBLE: Final = frozenset({DType.F32, DType.F16, DType.BF16})


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """One block. ``parts``: (tensor, elements) in address order, tensors by their index in the profile.

    ``lead``: the tensor that fills most of it, whose rule a plan applies. ``compressible``: by dtype and by the size of
    the lead's group, or of its section where that is not known.
    """

    elements: int
    dtype: DType
    owner: int
    lane: int
    parts: tuple[tuple[int, int], ...]
    lead: int
    compressible: bool

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """The blocks of a domain in address order; ``whole``: as the profile has it."""

    blocks: tuple[LiveBlock, ...]
    whole: bool


def lay_out(profile: Profile) -> Layout:
    """Blocks with what they hold. Raises ProfileError for an unknown dtype, or an owner or lane that is not there."""
    sections = _sections(profile)
    blocks = [(n, owner, lane) for _, n, owner, lane in sorted(profile.blocks)]
    if sum(n for n, _, _ in blocks) != profile.elements:
        blocks = placed(profile, sections)
    for _, owner, lane in blocks:
        if not (0 <= owner < profile.nodes and 0 <= lane < profile.lanes):
            raise ProfileError(
                f"a block belongs to one of {profile.nodes} nodes and {profile.lanes} lanes, "
                f"got owner {owner}, lane {lane}: the profile has to be measured anew"
            )
    return Layout(tuple(_filled(profile, sections, blocks)), profile.whole)


def placed(profile: Profile, sections: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """(elements, owner, lane) of the blocks that the daemon would make of sections of tensors, by their indices."""
    space = AddressSpace(profile.nodes, profile.lanes, profile.partition_bytes, profile.whole)
    made = []
    for index, section in enumerate(sections):
        tensors = [profile.tensors[i] for i in section]
        specs = tuple(TensorSpec(t.name, (t.elements,), int(dtype_of(t))) for t in tensors)
        made += [(b.elements, b.owner, b.lane) for b in space.append(Section(index, specs))]
    return made


def dtype_of(tensor: ProfiledTensor) -> DType:
    """Raises ProfileError for a dtype that no domain holds."""
    try:
        return DType.from_label(tensor.dtype)
    except KeyError:
        raise ProfileError(f"tensor {tensor.name!r}: expected a dtype such as float32, got {tensor.dtype!r}") from None


def portions(profile: Profile, caps: Sequence[int], groups: Sequence[Sequence[str]] = ()) -> Portions:
    """Tensors as they are brought, in the order of readiness: in buckets of ``caps`` bytes, the last for all further.

    Where the profile has the buckets of all tensors, and they are of one dtype (in which order others came it does not
    say), these are they, whatever ``caps``. No caps: one by one, as gradcomm's own wrapper has them, but for those of
    the same group (by name), which come together. A bucket is of one dtype, and closes as soon as it holds its size, as
    torch's do once torch has seen the order of arrival.
    """
    if groups:
        of = {name: group for group, names in enumerate(groups) for name in names}
        alone = len(groups)
        together: dict[int, list[int]] = {}
        for i, tensor in enumerate(profile.tensors):
            if tensor.elements:
                together.setdefault(of.get(tensor.name, alone + i), []).append(i)
        return tuple(sorted((tuple(held) for held in together.values()), key=lambda held: held[-1]))
    if seen := _as_seen(profile):
        return seen
    if not caps:
        return tuple((i,) for i, t in enumerate(profile.tensors) if t.elements)
    done: list[tuple[int, ...]] = []
    open_: dict[DType, tuple[list[int], int]] = {}
    closed: dict[DType, int] = {}
    for i, tensor in enumerate(profile.tensors):
        dtype = dtype_of(tensor)
        held, nbytes = open_.get(dtype, ([], 0))
        held, nbytes = [*held, i], nbytes + tensor.elements * dtype.itemsize
        open_[dtype] = (held, nbytes)
        if nbytes >= caps[min(closed.get(dtype, 0), len(caps) - 1)]:
            done.append(tuple(held))
            closed[dtype] = closed.get(dtype, 0) + 1
            del open_[dtype]
    return tuple(sorted([*done, *(tuple(held) for held, _ in open_.values())], key=lambda held: held[-1]))


def _as_seen(profile: Profile) -> Portions:
    """Tensors in the buckets that were seen; none where that does not tell."""
    held = [(i, t.elements * dtype_of(t).itemsize) for i, t in enumerate(profile.tensors) if t.elements]
    ends = list(accumulate(profile.buckets))
    if not ends or ends[-1] != sum(n for _, n in held) or len({profile.tensors[i].dtype for i, _ in held}) > 1:
        return ()
    done, buckets = 0, list[list[int]]([] for _ in ends)
    for i, nbytes in held:
        done += nbytes
        # By all bytes so far: where torch has two tensors in another order than they got ready, no other bucket moves.
        buckets[bisect_left(ends, done)].append(i)
    return tuple(tuple(bucket) for bucket in buckets if bucket)


def _sections(profile: Profile) -> list[list[int]]:
    """Indices of tensors by section, in address order; by dtype, in the order of readiness, where none is known."""
    order = [i for i, t in enumerate(profile.tensors) if t.elements]
    dtypes = {i: dtype_of(profile.tensors[i]) for i in order}
    if all(t.address >= 0 for t in profile.tensors):
        order.sort(key=lambda i: profile.tensors[i].address)
    else:
        first = list(dict.fromkeys(dtypes.values()))
        order.sort(key=lambda i: first.index(dtypes[i]))
    return [list(run) for _, run in groupby(order, key=dtypes.__getitem__)]


def _filled(
    profile: Profile, sections: Sequence[Sequence[int]], blocks: Sequence[tuple[int, int, int]]
) -> Iterable[LiveBlock]:
    """Blocks with the tensors that lie in them, one section after the other."""
    todo = iter(blocks)
    for section in sections:
        left = [(i, profile.tensors[i].elements) for i in section]
        total, dtype = sum(n for _, n in left), dtype_of(profile.tensors[section[0]])
        whole = total * dtype.itemsize
        while total > 0:
            elements, owner, lane = next(todo, (total, 0, 0))
            # a block that reaches beyond its section is another layout's: what fits is taken
            elements = min(elements, total)
            total -= elements
            parts, room = [], elements
            while room:
                tensor, n = left[0]
                parts.append((tensor, min(n, room)))
                room -= parts[-1][1]
                left[0] = (tensor, n - parts[-1][1])
                if not left[0][1]:
                    left.pop(0)
            # the first of equals, as the manifest has it
            lead = max(parts, key=lambda part: part[1])[0]
            group = profile.tensors[lead].group
            reaches = (group if group >= 0 else whole) >= profile.min_compress_bytes
            yield LiveBlock(elements, dtype, owner, lane, tuple(parts), lead, dtype in _COMPRESSIBLE and reaches)
