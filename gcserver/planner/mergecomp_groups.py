"""How the tensors of a model are cut into groups, and what a cut means to gradcomm and to torch.

What may live here: groupings, MergeComp's baselines, bucket sizes. What may not: costs and searches.

A grouping says nothing of error feedback, and that is the point: residuals belong to elements of tensors, so that a
checkpoint brings them into a job with other groups (the released MergeComp clears its residuals with every new cut).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

_MIB: Final = 1 << 20


class GroupingError(ValueError):
    """A grouping that cannot be: says what was expected and what came."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Tensors in the order of back-propagation, cut into groups: group i ends before tensor ``ends[i]``.

    ``Grouping((2, 5))`` is two groups of five tensors: 0 and 1, and 2 to 4. Raises :class:`GroupingError` unless the
    ends rise from 1 on.
    """

    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ends or any(a >= b for a, b in pairwise((0, *self.ends))):
            raise GroupingError(f"the ends of groups must rise, from 1 on, got {list(self.ends)}")

    @property
    def tensors(self) -> int:
        return self.ends[-1]

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[range]:
        """The tensors of each group."""
        return (range(a, b) for a, b in pairwise((0, *self.ends)))

    def sizes(self, elements: Sequence[int]) -> tuple[int, ...]:
        """Elements of each group. Raises :class:`GroupingError` if this cuts another number of tensors."""
        if len(elements) != self.tensors:
            raise GroupingError(f"this grouping cuts {self.tensors} tensors, got the sizes of {len(elements)}")
        return tuple(sum(elements[group.start : group.stop]) for group in self)


def layer_wise(tensors: int) -> Grouping:
    """Every tensor by itself."""
    return Grouping(tuple(range(1, tensors + 1)))


def whole_model(tensors: int) -> Grouping:
    """All tensors in one group."""
    return Grouping((tensors,))


def naive(tensors: int, groups: int) -> Grouping:
    """Equal counts of tensors, the last group takes what is left (section 5.2, "naive partition").

    Raises :class:`GroupingError` unless there are 1 to ``tensors`` groups.
    """
    if not 1 <= groups <= tensors:
        raise GroupingError(f"{tensors} tensors can be cut into 1 to {tensors} groups, got {groups}")
    step = tensors // groups
    return Grouping((*range(step, step * groups, step), tensors))


def ddp_bucket_caps(grouping: Grouping, nbytes: Sequence[int]) -> list[float]:
    """Bucket sizes in MiB for torch: ``DistributedDataParallel(model, bucket_cap_mb_list=...)``.

    ``nbytes`` are the tensors' bytes in the order of back-propagation. Torch closes a bucket as soon as it holds its
    size, so a group's own bytes cut exactly behind its last tensor; MiB are a power of two, so the sizes survive the
    conversion to fractions and back. They hold for parameters of one dtype on one device (torch keeps a bucket for
    each), and from the step on in which torch has seen the order of arrival: the second, the third with a static
    graph. With ``find_unused_parameters`` torch never looks, and cuts in the order of declaration.
    Raises :class:`GroupingError` if a group is empty or the sizes are not the grouping's.
    """
    sizes = grouping.sizes(nbytes)
    if 0 in sizes:
        raise GroupingError(f"torch has no bucket of no bytes, group {sizes.index(0)} is empty")
    return [size / _MIB for size in sizes]
