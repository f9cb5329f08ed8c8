"""Residuals outlive another grouping: saved for the blocks of one, they come to those of any other, element by element.

What may live here: properties of `gcclient/saved.py` over groups. What may not: daemons, training.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gcclient import saved
from gcclient.saved import F32, Piece, SavedBlock, SavedDomain
from gcproto.dtypes import DType
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcserver.planner.mergecomp_groups import Grouping

PARTITION = 64 << 10


def pieces(sizes: Sequence[int], cuts: Sequence[int]) -> list[tuple[Piece, ...]]:
    """What lies in each block of a model in these groups."""
    specs = tuple(TensorSpec(f"t{i}", (n,), int(DType.F32)) for i, n in enumerate(sizes))
    section = Section(0, specs, tuple(cuts))
    return saved.cut(section, AddressSpace(2, 1, PARTITION).append(section))


def groupings(tensors: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Where groups after the first begin."""
    return st.sets(st.integers(1, tensors - 1)).map(lambda cuts: tuple(sorted(cuts)))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 40_000), min_size=2, max_size=6), mine=st.booleans())
def test_no_element_loses_its_residual(data: st.DataObject, sizes: list[int], mine: bool) -> None:
    before, after = (pieces(sizes, data.draw(groupings(len(sizes)))) for _ in range(2))
    held = {f"t{i}": np.arange(n, dtype=np.float32) + 1000 * i for i, n in enumerate(sizes)}
    blocks = []
    for inside in before:
        residual: F32 = np.concatenate([held[name][first:last] for name, first, last in inside])
        blocks.append((SavedBlock(0, inside, len(residual), 0, True), residual))
    tensors = tuple(TensorSpec(name, (len(values),), int(DType.F32)) for name, values in held.items())
    domain = SavedDomain((0,), ((0,),), True, "", tensors, "ab" * 16, 7, (), (), "", ())
    state = {"format": 1, **saved.write_domain("ddp.0", domain), **saved.write_part(0, "ddp.0", blocks)}
    read = saved.read(state, 0)["ddp.0"]
    found = {name: np.zeros_like(values) for name, values in held.items()}
    for inside in after:
        for states, lost in read.states(inside, mine):
            assert not lost and not states.owner
            at = 0
            for name, first, last in inside:
                found[name][first:last] += states.values[at : at + last - first]
                at += last - first
    assert all((found[name] == held[name]).all() for name in held)


def test_groups_of_mergecomp_are_cuts() -> None:
    """A grouping's ends but the last are where a section's groups begin."""
    grouping = Grouping((2, 3, 5))
    inside = pieces([9] * 5, grouping.ends[:-1])
    assert [[name for name, _, _ in block] for block in inside] == [["t0", "t1"], ["t2"], ["t3", "t4"]]
