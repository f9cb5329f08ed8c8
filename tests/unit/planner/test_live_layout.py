"""Blocks of a profile beside the daemon's own layout, and the portions in which tensors are brought."""

from __future__ import annotations

import msgspec
import pytest

from gcproto.dtypes import DType
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcserver.planner.live_layout import DDP_BUCKETS, lay_out, portions
from gcserver.planner.profile import Profile, ProfiledTensor, ProfileError
from tests.unit.planner.live_profiles import gpt, plain


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("measured", [False, True])
def test_blocks_are_the_daemons(nodes: int, whole: bool, measured: bool) -> None:
    profile = gpt(nodes, whole=whole)
    if not measured and not whole:
        profile = msgspec.structs.replace(profile, blocks=())
    space = AddressSpace(nodes, 1, profile.partition_bytes, whole)
    specs = tuple(TensorSpec(t.name, t.shape, int(DType.F32)) for t in profile.tensors)
    blocks = space.append(Section(0, specs))
    found = lay_out(profile)
    assert found.whole is whole
    assert len(found.blocks) == len(blocks)
    for mine, theirs in zip(found.blocks, blocks, strict=True):
        assert (mine.elements, mine.owner, mine.lane, mine.lead, mine.nbytes) == (
            theirs.elements, theirs.owner, theirs.lane, theirs.tensor, theirs.nbytes,
        )  # fmt: skip
        bounds = [0]
        for _, n in mine.parts:
            bounds.append(bounds[-1] + n)
        assert tuple(bounds) == theirs.bounds


def test_addresses_say_where_tensors_lie() -> None:
    profile = plain([10, 20, 30], [0.0, 1.0, 2.0])
    turned = tuple(msgspec.structs.replace(t, address=a) for t, a in zip(profile.tensors, (50, 30, 0), strict=True))
    blocks = ((0, 30, 0, 0), (30, 30, 1, 0))
    found = lay_out(msgspec.structs.replace(profile, tensors=turned, blocks=blocks))
    assert [b.parts for b in found.blocks] == [((2, 30),), ((1, 20), (0, 10))]
    unknown = tuple(msgspec.structs.replace(t, address=-1) for t in profile.tensors)
    found = lay_out(msgspec.structs.replace(profile, tensors=unknown, blocks=blocks))
    assert [b.parts for b in found.blocks] == [((0, 10), (1, 20)), ((2, 30),)]
    assert [b.lead for b in found.blocks] == [1, 2]


def test_sections_of_a_dtype_may_lie_apart() -> None:
    """What a model excludes has a section of its own, after those of all other dtypes."""
    placed = [("embed", 7, "float32", 50, 2.0), ("a", 30, "float32", 0, 1.0), ("b", 20, "bfloat16", 30, 0.0)]
    tensors = tuple(ProfiledTensor(name, (n,), n, dtype, ready, at) for name, n, dtype, at, ready in placed)
    blocks = ((0, 30, 0, 0), (30, 20, 1, 0), (50, 7, 0, 0))
    found = lay_out(msgspec.structs.replace(plain([1], [0.0]), tensors=tensors, blocks=blocks))
    assert [(b.parts, b.dtype) for b in found.blocks] == [
        (((1, 30),), DType.F32), (((2, 20),), DType.BF16), (((0, 7),), DType.F32),
    ]  # fmt: skip


def test_what_is_too_small_is_so_by_its_group() -> None:
    """Tensors that a worker brings one by one share no blocks: neighbours do not make a small one large."""
    sizes = [1 << 10, 1 << 20]
    tensors = tuple(
        ProfiledTensor(f"t{i}", (n,), n, "float32", float(i), at, group)
        for i, (n, at, group) in enumerate(zip(sizes, (0, 1 << 10), (4 << 10, 4 << 20), strict=True))
    )
    blocks = ((0, sizes[0], 0, 0), (sizes[0], sizes[1], 1, 0))
    profile = msgspec.structs.replace(plain([1], [0.0]), tensors=tensors, blocks=blocks, min_compress_bytes=64 << 10)
    assert [b.compressible for b in lay_out(profile).blocks] == [False, True]
    unknown = tuple(msgspec.structs.replace(t, group=-1) for t in tensors)
    found = lay_out(msgspec.structs.replace(profile, tensors=unknown))
    assert [b.compressible for b in found.blocks] == [True, True], "of an older profile only the section is known"


def mixed() -> Profile:
    profile = plain([1, 2, 3], [0.0] * 3)
    tensors = tuple(
        ProfiledTensor(f"t{i}", (n,), n, dtype, float(i))
        for i, (n, dtype) in enumerate(
            [(1 << 18, "float32"), (1 << 19, "bfloat16"), (1 << 18, "float32"), (8, "int64")]
        )
    )
    return msgspec.structs.replace(profile, tensors=tensors, blocks=())


def test_every_dtype_has_a_section_of_its_own() -> None:
    found = lay_out(mixed())
    assert [(b.dtype, b.compressible) for b in found.blocks if b.dtype is DType.I64] == [(DType.I64, False)]
    for block in found.blocks:
        assert {mixed().tensors[t].dtype for t, _ in block.parts} == {block.dtype.label}
    assert sum(b.elements for b in found.blocks) == mixed().elements
    assert [len(p) for p in portions(mixed(), (1 << 40,))] == [1, 2, 1]


def test_buckets_as_torch_cuts_them() -> None:
    tensors = [300_000, 10, 5_000_000, 2_000_000, 7]
    profile = plain(tensors, [0.0] * 5)
    # the first closes at 1 MiB (300,000 floats), the next at 25 MiB
    assert portions(profile, DDP_BUCKETS) == ((0,), (1, 2, 3), (4,))
    assert portions(profile, (1 << 40,)) == ((0, 1, 2, 3, 4),)
    assert portions(profile, ()) == ((0,), (1,), (2,), (3,), (4,))
    names = [t.name for t in profile.tensors]
    assert portions(profile, (), ((names[3], names[0]), (names[1],))) == ((1,), (2,), (0, 3), (4,))


def test_buckets_that_were_seen_are_those_of_the_worker() -> None:
    profile = msgspec.structs.replace(plain([300, 10, 500], [0.0] * 3), buckets=(1240, 2000))
    for caps in (DDP_BUCKETS, (1 << 40,), ()):
        assert portions(profile, caps) == ((0, 1), (2,))
    last_first = msgspec.structs.replace(profile, tensors=profile.tensors[::-1])
    assert portions(last_first, ()) == ((0, 1, 2),), "none ends where a bucket does"
    tensors = (msgspec.structs.replace(profile.tensors[0], dtype="float16"), *profile.tensors[1:])
    assert portions(msgspec.structs.replace(profile, tensors=tensors), (1 << 40,)) == ((0,), (1, 2))
    some = msgspec.structs.replace(profile, buckets=(1240,))
    assert portions(some, (1 << 40,)) == ((0, 1, 2),), "of some tensors only"


def test_blocks_of_another_layout_are_laid_out_anew() -> None:
    profile = gpt()
    odd = msgspec.structs.replace(profile, blocks=profile.blocks[:-1])
    assert lay_out(odd) == lay_out(profile)


def test_what_cannot_be_is_refused() -> None:
    profile = gpt()
    with pytest.raises(ProfileError, match="owner 7"):
        lay_out(msgspec.structs.replace(profile, blocks=tuple((a, n, 7, 0) for a, n, _, _ in profile.blocks)))
    odd = (msgspec.structs.replace(profile.tensors[0], dtype="complex64"), *profile.tensors[1:])
    with pytest.raises(ProfileError, match="complex64"):
        lay_out(msgspec.structs.replace(profile, tensors=odd))
