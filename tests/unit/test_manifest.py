"""Layout: blocks cover sections exactly, owners and lanes are balanced, slots never overlap, both sides agree.

What may live here: tests of `proto/manifest.py`. What may not: what is written into slots.
"""

from __future__ import annotations

from itertools import pairwise, zip_longest

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcproto.dtypes import DType
from gcproto.manifest import (
    ADDRESS_ALIGN,
    LANE_HEADER_BYTES,
    MAX_TENSORS,
    MAX_WHOLE_BYTES,
    MIN_BLOCK_BYTES,
    PAGE,
    RANK_HEADER_BYTES,
    AddressSpace,
    ArenaPlan,
    Block,
    ManifestError,
    Section,
    TensorSpec,
    block_sizes,
    check_section,
    difference,
    whole_sizes,
)

KIB, MIB = 1024, 1 << 20
F32 = int(DType.F32)


def section(index: int, *sizes: int, dtype: int = F32, cuts: tuple[int, ...] = ()) -> Section:
    return Section(index, tuple(TensorSpec(f"s{index}.t{i}", (n,), dtype) for i, n in enumerate(sizes)), cuts)


@st.composite
def spaces(draw: st.DrawFn) -> AddressSpace:
    partition = PAGE * draw(st.integers(1, 1024))
    space = AddressSpace(draw(st.integers(1, 6)), draw(st.integers(1, 3)), partition, draw(st.booleans()))
    for index in range(draw(st.integers(1, 4))):
        dtype = int(draw(st.sampled_from(DType)))
        sizes = draw(st.lists(st.one_of(st.integers(0, 3000), st.integers(0, 1_500_000)), min_size=1, max_size=6))
        cuts = draw(st.sets(st.integers(1, len(sizes) - 1))) if len(sizes) > 1 else ()
        space.append(section(index, *sizes, dtype=dtype, cuts=tuple(sorted(cuts))))
    return space


@given(spaces())
@settings(deadline=None)
def test_blocks_cover_sections_exactly(space: AddressSpace) -> None:
    end = 0
    for s, blocks in zip(space.sections, space.blocks, strict=True):
        at = 0
        for b in blocks:
            assert b.start == at and b.elements > 0 and b.section == s.index
            assert b.whole == space.whole
            if not space.whole:
                assert b.nbytes <= max(space.partition_bytes, s.dtype.itemsize)
            assert b.key == blocks[0].key + b.start * s.dtype.itemsize
            assert b.key >= end, "blocks never overlap, addresses only grow"
            end = b.key + b.nbytes
            at += b.elements
        assert at == s.elements
        if blocks:
            assert blocks[0].key % ADDRESS_ALIGN == 0


@given(spaces())
@settings(deadline=None)
def test_bounds_are_the_tensors_boundaries(space: AddressSpace) -> None:
    for s, blocks in zip(space.sections, space.blocks, strict=True):
        ends = {0}
        total = 0
        for spec in s.tensors:
            total += spec.elements
            ends.add(total)
        seen = set()
        for b in blocks:
            assert b.bounds[0] == 0 and b.bounds[-1] == b.elements
            assert list(b.bounds) == sorted(set(b.bounds))
            inner = {b.start + x for x in b.bounds[1:-1]}
            assert inner <= ends
            seen |= inner | {b.start, b.start + b.elements}
            assert s.tensors[b.tensor].elements > 0
        assert ends <= seen | {0}, "no segment crosses from one tensor into the next"


@given(spaces())
@settings(deadline=None)
def test_a_whole_space_cuts_no_tensor_and_fills_blocks(space: AddressSpace) -> None:
    if not space.whole:
        space = AddressSpace(space.members, space.lanes, space.partition_bytes, True)
    for s, blocks in zip(space.sections, space.blocks, strict=True):
        sizes = [t.elements for t in s.tensors if t.elements]
        cut = {sum(t.elements for t in s.tensors[:i]) for i in s.cuts}
        taken = 0
        for b, after in zip_longest(blocks, blocks[1:]):
            inside = [hi - lo for lo, hi in pairwise(b.bounds)]
            assert inside == sizes[taken : taken + len(inside)], "its segments are the tensors"
            assert b.nbytes <= space.partition_bytes or len(inside) == 1, "a larger tensor is alone"
            taken += len(inside)
            if after is not None and after.start not in cut:
                most = max(space.partition_bytes, MIN_BLOCK_BYTES)
                assert b.nbytes + after.bounds[1] * s.dtype.itemsize > min(most, _wanted(space, s, b.tensor) // 2)
        assert taken == len(sizes)


def _wanted(space: AddressSpace, s: Section, tensor: int) -> int:
    ends = (*s.cuts, len(s.tensors))
    group = next(g for g, end in zip(s.groups, ends, strict=True) if tensor < end)
    nbytes = sum(t.elements for t in group) * s.dtype.itemsize
    return max(block_sizes(nbytes, space.members, space.partition_bytes), default=0)


@given(spaces())
@settings(deadline=None)
def test_no_block_crosses_a_cut_and_each_group_is_cut_as_a_section_of_its_own(space: AddressSpace) -> None:
    for s, blocks in zip(space.sections, space.blocks, strict=True):
        assert [b.key for b in blocks] == sorted({b.key for b in blocks})
        left, first = list(blocks), 0
        for group, last in zip(s.groups, (*s.cuts, len(s.tensors)), strict=True):
            alone = AddressSpace(space.members, space.lanes, space.partition_bytes, space.whole)
            expected = alone.append(Section(0, group))
            mine, left = left[: len(expected)], left[len(expected) :]
            assert [b.bounds for b in mine] == [b.bounds for b in expected]
            assert [b.tensor - first for b in mine] == [b.tensor for b in expected]
            nbytes = sum(b.nbytes for b in mine)
            for tensor in range(first, last):
                assert s.group_reaches(tensor, nbytes) and not s.group_reaches(tensor, nbytes + 1)
            first = last
        assert not left


@given(spaces())
@settings(deadline=None)
def test_both_sides_compute_the_same(space: AddressSpace) -> None:
    other = AddressSpace(space.members, space.lanes, space.partition_bytes, space.whole)
    for s, blocks in zip(space.sections, space.blocks, strict=True):
        assert other.append(s) == blocks


@given(st.integers(1, 8), st.integers(1, 4), st.lists(st.integers(1, 2_000_000), min_size=1, max_size=8))
@settings(deadline=None)
def test_owners_and_lanes_are_balanced_by_bytes(members: int, lanes: int, sizes: list[int]) -> None:
    space = AddressSpace(members, lanes, 4 * MIB)
    blocks = space.append(section(0, *sizes))
    biggest = max(b.nbytes for b in blocks) + ADDRESS_ALIGN
    for count, of in ((members, lambda b: b.owner), (lanes, lambda b: b.lane)):
        loads = [0] * count
        for b in blocks:
            assert 0 <= of(b) < count
            loads[of(b)] += b.nbytes + ADDRESS_ALIGN
        assert max(loads) - min(loads) <= biggest


@given(spaces(), st.data())
@settings(deadline=None)
def test_losses_move_the_blocks_of_the_lost_alone(space: AddressSpace, data: st.DataObject) -> None:
    left = tuple(range(space.members))
    before, remaining = left, []
    owners = [b.owner for blocks in space.blocks for b in blocks]
    while len(left) > 1:
        lost = data.draw(st.sets(st.sampled_from(left), min_size=1, max_size=len(left) - 1))
        left = tuple(i for i in left if i not in lost)
        remaining.append(left)
        after = AddressSpace(space.members, space.lanes, space.partition_bytes, space.whole, tuple(remaining))
        moved = []
        for s, blocks in zip(space.sections, space.blocks, strict=True):
            for old, new in zip(blocks, after.append(s), strict=True):
                assert (old.key, old.elements, old.lane, old.bounds) == (new.key, new.elements, new.lane, new.bounds)
                moved.append(new.owner)
        for old_owner, new_owner in zip(owners, moved, strict=True):
            kept = before[old_owner]
            assert kept in lost or left[new_owner] == kept
        owners, before = moved, left


@given(spaces(), st.integers(1, 4))
@settings(deadline=None)
def test_slots_never_overlap(space: AddressSpace, local_ranks: int) -> None:
    for lane in range(space.lanes):
        plan, again = ArenaPlan(local_ranks), ArenaPlan(local_ranks)
        used: dict[int, list[tuple[int, int]]] = {}
        for blocks in space.blocks:
            mine = [b for b in blocks if b.lane == lane]
            assert plan.append(mine) == again.append(mine)
            for b in mine:
                _collect(plan, b, used, local_ranks)
        assert plan == again
        for chunk, ranges in used.items():
            ranges.sort()
            for (_, end), (start, _) in pairwise(ranges):
                assert end <= start
            assert ranges[-1][1] <= plan.chunks[chunk]
            assert plan.chunks[chunk] % PAGE == 0


def _collect(plan: ArenaPlan, b: Block, used: dict[int, list[tuple[int, int]]], local_ranks: int) -> None:
    slot = plan.slots[b.key]
    assert slot.header % ADDRESS_ALIGN == 0 and len(slot.inputs) == local_ranks
    ranges = used.setdefault(slot.chunk, [])
    ranges.append((slot.header, slot.header + LANE_HEADER_BYTES + RANK_HEADER_BYTES * local_ranks))
    for at in (*slot.inputs, slot.output):
        assert at % (PAGE if b.nbytes >= PAGE else ADDRESS_ALIGN) == 0
        ranges.append((at, at + b.nbytes))


def test_large_sections_have_two_blocks_an_owner() -> None:
    blocks = AddressSpace(4, 1, 2 * MIB).append(section(0, 4 * MIB))  # 16 MiB
    assert {o: sum(b.owner == o for b in blocks) for o in range(4)} == {0: 2, 1: 2, 2: 2, 3: 2}


@pytest.mark.parametrize(
    ("size", "members", "partition", "expected"),
    [
        (0, 2, 4 * MIB, []),
        (100, 2, 4 * MIB, [100]),
        (MIN_BLOCK_BYTES, 2, 4 * MIB, [MIN_BLOCK_BYTES]),
        (MIN_BLOCK_BYTES, 2, 64 * KIB, [64 * KIB] * 4),
        (300 * KIB, 2, 4 * MIB, [256 * KIB, 44 * KIB]),
        (4 * MIB, 2, 4 * MIB, [2 * MIB] * 2),
        (8 * MIB, 2, 4 * MIB, [2 * MIB] * 4),
        (64 * MIB, 2, 8 * MIB, [4 * MIB] * 4 + [8 * MIB] * 6),
        (24 * MIB, 2, 8 * MIB, [3 * MIB] * 4 + [6 * MIB] * 2),
    ],
)
def test_block_sizes(size: int, members: int, partition: int, expected: list[int]) -> None:
    assert list(block_sizes(size, members, partition)) == expected


@pytest.mark.parametrize(
    ("tensors", "members", "partition", "expected"),
    [
        ([], 2, 4 * MIB, []),
        ([0, 0], 2, 4 * MIB, []),
        ([100, 0, 200], 2, 4 * MIB, [300]),
        ([200 * KIB, 100 * KIB, 100 * KIB, 300 * KIB], 2, 4 * MIB, [300 * KIB, 100 * KIB, 300 * KIB]),
        ([10, 20 * MIB, 10], 1, 4 * MIB, [10, 20 * MIB, 10]),
        ([1 * MIB] * 4, 1, 2 * MIB, [2 * MIB] * 2),
        # the lowest addresses leave last and are finer
        ([3 * MIB] * 8, 2, 8 * MIB, [3 * MIB] * 4 + [6 * MIB] * 2),
    ],
)
def test_whole_sizes(tensors: list[int], members: int, partition: int, expected: list[int]) -> None:
    assert list(whole_sizes(tensors, members, partition)) == expected


def test_a_tensor_that_is_never_cut_fits_a_frame() -> None:
    huge = section(0, MAX_WHOLE_BYTES // 4 + 1)
    check_section(huge)
    with pytest.raises(ManifestError, match=r"at most 2147483648 bytes, got 2147483652: 's0\.t0'"):
        AddressSpace(1, 1, 4 * MIB, True).append(huge)


@given(st.integers(0, 1 << 34), st.integers(1, 64), st.integers(16, 16384))
def test_block_sizes_add_up_and_start_on_pages(size: int, members: int, pages: int) -> None:
    partition = max(pages * PAGE, size // 1000 // PAGE * PAGE)
    sizes = list(block_sizes(size, members, partition))
    assert sum(sizes) == size
    assert all(0 < s <= partition for s in sizes)
    assert all(s % PAGE == 0 for s in sizes[:-1])


def test_a_chunk_is_shared_by_small_sections() -> None:
    space, plan = AddressSpace(1, 1, 4 * MIB), ArenaPlan(1)
    assert plan.append(space.append(section(0, 16))) == [0]
    assert plan.append(space.append(section(1, 16))) == []
    assert plan.append(space.append(section(2, MIB))) == [1]
    assert plan.append([]) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Section(0, ()), f"1 to {MAX_TENSORS}"),
        (Section(0, (TensorSpec("a", (1,), 0), TensorSpec("b", (1,), 1))), "one dtype"),
        (Section(0, (TensorSpec("a", (1,), 77),)), "unknown dtype code 77"),
        (Section(0, (TensorSpec("a", (-1,), 0),)), "negative"),
        (section(0, 1, 1, 1, cuts=(2, 1)), r"rising, within 1\.\.2, got \[2, 1\]"),
        (section(0, 1, 1, 1, cuts=(0,)), "tensors at which groups begin"),
        (section(0, 1, 1, 1, cuts=(1, 1)), "rising"),
        (section(0, 1, 1, 1, cuts=(3,)), "rising"),
    ],
)
def test_bad_sections_are_refused(bad: Section, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        check_section(bad)


def test_sections_come_in_order_and_partitions_are_pages() -> None:
    with pytest.raises(ManifestError, match="expected section 0, got 1"):
        AddressSpace(1, 1, PAGE).append(section(1, 4))
    with pytest.raises(ManifestError, match="multiple of 4096, got 5000"):
        AddressSpace(1, 1, 5000)


def test_a_difference_names_tensor_and_both_values() -> None:
    a = Section(0, (TensorSpec("w", (4, 4), F32), TensorSpec("b", (4,), F32)))
    renamed = Section(0, (TensorSpec("v", (4, 4), F32), TensorSpec("b", (4,), F32)))
    reshaped = Section(0, (TensorSpec("w", (4, 5), F32), TensorSpec("b", (4,), F32)))
    retyped = Section(0, (TensorSpec("w", (4, 4), int(DType.F64)), TensorSpec("b", (4,), F32)))
    shorter = Section(0, a.tensors[:1])
    merged = Section(0, a.tensors, (1,))
    assert difference(a, renamed).startswith("name or order of tensor 0 differs: 'w'")
    assert "shape of tensor 0 differs: 'w' shape [4, 4]" in difference(a, reshaped)
    assert "[4, 5]" in difference(a, reshaped)
    assert "dtype of tensor 0" in difference(a, retyped) and "F64" in difference(a, retyped)
    assert "'b' shape [4] dtype F32 is only here" in difference(a, shorter)
    assert "only there" in difference(shorter, a)
    assert (
        difference(a, merged)
        == "groups differ (1 here, 2 there): tensor 1, 'b' shape [4] dtype F32, begins one there and not here"
    )
    assert difference(merged, a).endswith("begins one here and not there")
    assert difference(a, a) == "the declarations are equal"
    assert len({msgspec.msgpack.encode(s) for s in (a, renamed, reshaped, retyped, shorter, merged)}) == 6
