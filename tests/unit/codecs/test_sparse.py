"""The payload of sparsifiers against its oracle: packing both ways, golden bytes, bounds, refusals, mutants."""

import ctypes
import mmap
import struct

import numpy as np
import pytest
from numba import njit

from gcserver.codecs import CodecError, by_id, parse
from gcserver.codecs.randomk import randomk_apply
from gcserver.codecs.sparse import sparse_apply
from tests.unit.codecs import sparse_oracles, vectors
from tests.unit.codecs.refusals import assert_refused
from tests.unit.codecs.sparse_cases import FORMS, check_against, run, same

#: a threshold so low that whatever is not zero is sent: any set of indices and values can be made
ALL = "threshold(value=1e-30,cap=1{})"


def scattered(n, density, seed):
    rng = np.random.default_rng(seed)
    x = np.zeros(n, np.float32)
    index = np.flatnonzero(rng.random(n) < density)
    x[index] = rng.standard_normal(index.size) * 10.0 ** rng.uniform(-20, 20, index.size)
    return x


def nonzero(v):
    return np.flatnonzero(np.abs(v) >= np.float32(1e-30))


@pytest.mark.parametrize("n", vectors.SIZES)
@pytest.mark.parametrize("density", [0.003, 0.05, 0.5, 1.0])
def test_any_indices_and_values_in_every_form(n, density):
    x = scattered(n, density, n)
    for bounds in vectors.segment_tables(n):
        check_against(ALL, nonzero, x, None, bounds)


def test_gaps_of_every_width():
    # One element 2**w after the one before, alone and among near ones; 31 to 33 in a group's neighbourhood.
    for w in range(24):
        # The widest take memory, and are of no other group for it.
        for count in (1, 31, 32, 33, 64, 65) if w < 18 else (1, 33):
            x = np.zeros((1 << w) + count + 1, np.float32)
            x[1 << w : (1 << w) + count] = 1.5
            x[0] = -1
            bounds = np.array([0, x.size])
            _, payload, _ = run(parse(ALL.format(",packed=1")), x, None, bounds)
            assert payload == sparse_oracles.frame(nonzero(x), x, bounds, 1)[0]
            out = np.empty_like(x)
            by_id(19, 1 << 30).decode(payload, out)
            assert same(out, x)


@pytest.mark.parametrize("width", [16, 8])
def test_rounding_is_within_its_bound_and_what_it_loses_is_kept_exactly(width):
    codec = parse(ALL.format(f",values={width}"))
    bound, reach = (2.0**-11, 2.0**30) if width == 16 else (2.0**-4, 2.0**14)
    rng = np.random.default_rng(width)
    for spread in (0.1, 1, 5, 12, 35):
        x = (rng.choice([-1, 1], 5000) * 10.0 ** rng.uniform(-spread, min(spread, 38), 5000)).astype(np.float32)
        _, payload, new = run(codec, x, None, np.array([0, x.size]))
        out = np.empty_like(x)
        codec.decode(payload, out)
        assert np.isfinite(out).all()
        sent = np.abs(x) >= np.float32(1e-30)
        assert np.array_equal(out.astype(np.float64) + new, x.astype(np.float64)), "in exact arithmetic, too"
        for start in range(0, sent.sum(), 128):
            value, back = x[sent][start : start + 128].astype(np.float64), out[sent][start : start + 128]
            near = np.abs(value) * reach >= np.abs(value).max()
            assert (np.abs(back - value)[near] <= bound * np.abs(value)[near]).all()


def test_values_that_fill_the_range_of_floats():
    bits = np.array([1, 31, 32, 33, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFE, 0x7F7FFFFF], np.uint32)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        signs = rng.integers(0, 2, bits.size).astype(np.uint32) << 31
        x = (bits | signs).view(np.float32)[rng.permutation(bits.size)[: rng.integers(1, 10)]]
        bounds = np.array([0, x.size])
        check_against("topk(ratio=1{})", lambda v: np.arange(v.size), x, None, bounds)


def golden(options, x=(0.5, -2.0, 2.0, 0.0, -1.0, 3.0)):
    x = np.array(x, np.float32)
    return run(parse(f"topk(ratio=0.5{options})"), x, None, np.array([0, 4, 6]))


def test_golden_bytes_packed():
    # Indices 1, 2, 5: gaps 1, 0, 2, of two bits each: 01 | 00 | 10, lowest bit first.
    _, payload, _ = golden(",packed=1")
    assert payload.hex() == "0200000102000000010000000221000000c00000004000004040"


def test_golden_bytes_with_sixteen_bits():
    # -2 and 2 are alike but for the sign; 3 is alone: each group's base is its smallest, shift 0, code 1.
    _, payload, new = golden(",values=16")
    assert payload.hex() == (
        "02000002" "02000000" "01000000" "01000000" "02000000" "05000000"
        "00000040" "00004040"  # bases 2.0 and 3.0
        "0180" "0100" "0100"
    )  # fmt: skip
    assert new.tolist() == [0.5, 0, 0, 0, -1, 0]


def test_golden_bytes_packed_with_eight_bits():
    # Gaps 0, 1, 1. Values 1 and 3 are 0x3f800000 and 0x40400000: 0xc00000 apart, 96 steps of 2**17, of at most 126.
    _, payload, new = golden(",packed=1,values=8", (1.0, -0.5, 3.0, 0.0, 0.25, 0.0))
    assert payload.hex() == "02000005020000000100000001061100803f0000803e016101"
    assert new.tolist() == [0, -0.5, 0, 0, 0, 0]


@pytest.mark.parametrize("options", FORMS)
def test_the_bound_holds_for_any_data_and_is_not_far_off(options):
    codec = parse(f"topk(ratio=0.01{options})")
    for seed, n in enumerate((0, 1, 99, 100, 3200, 100_000)):
        for m in (1, 2, 7):
            bounds = np.array([0, *sorted(np.random.default_rng(seed).integers(0, n + 1, m - 1)), n])
            # Every group of indices with one gap as large as can be.
            x = np.full(n, 1e-3, np.float32)
            x[:: max(1, n // 32)] = 1
            x[-n // 50 :] += 1
            for data in (x, vectors.normal(n, seed)):
                assert run(codec, data, None, bounds)[0].nbytes <= codec.max_bytes(n, m)
    plain, n = parse("topk(ratio=0.01)"), 1 << 20
    assert codec.max_bytes(n) <= plain.max_bytes(n)
    x = vectors.normal(n)
    assert codec.max_bytes(n) <= 1.6 * run(codec, x, None, np.array([0, n]))[0].nbytes


def test_bytes_an_element_at_one_percent():
    n, k = 1 << 20, (1 << 20) // 100
    for options, most in (("", 8.01), (",packed=1", 5.20), (",packed=1,values=16", 3.25), (",packed=1,values=8", 2.25)):
        result, *_ = run(parse(f"topk(ratio=0.01{options})"), vectors.normal(n), None, np.array([0, n]))
        assert result.nbytes / k <= most, options


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("options", FORMS)
def test_decode_and_decode_add(options, scale):
    n = 5000
    codec = parse(f"topk(ratio=0.05{options})")
    _, payload, _ = run(codec, vectors.normal(n), None, np.array([0, 1000, 1000, n]))
    data = np.frombuffer(payload, np.uint8)
    out = vectors.normal(n, seed=4)
    codec.decode(data, out, scale)
    expected = sparse_oracles.decode(payload, n)
    assert same(out, expected * np.float32(scale))
    acc = vectors.normal(n, seed=5)
    before = acc.copy()
    by_id(16, codec.level).decode_add(vectors.unaligned(data), acc)
    assert same(acc, before + expected)


# ------------------------------------------------------------------------------------------------ refusals
def frame(counts, indices, values, form=0):
    head = struct.pack(f"<I{len(counts)}I", len(counts) | form << 24, *counts)
    return head + struct.pack(f"<{len(indices)}I{len(values)}f", *indices, *values)


def packed(counts, widths, gaps, tail):
    return struct.pack(f"<I{len(counts)}I", len(counts) | 1 << 24, *counts) + bytes(widths) + gaps + tail


ONE, TWO = struct.pack("<f", 1.0), struct.pack("<2f", 1.0, 2.0)


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (b"", "cut short"),
        (b"\1\0\0", "cut short"),
        (struct.pack("<I", 2**24 - 1), "cut short"),
        *((struct.pack("<I", form << 24), "form") for form in (6, 7, 8, 12, 16, 255)),
        (struct.pack("<II", 1, 2**32 - 1), "as many"),
        (frame([2], [1, 2], [1.0, 2.0])[:-1], "as many"),
        (frame([2], [1, 2], [1.0, 2.0]) + b"\0", "as many"),
        (frame([11], range(11), range(11)), "as many"),  # more elements than the partition
        (frame([2], [2, 2], [1.0, 2.0]), "ascending"),
        (frame([1, 1], [3, 2], [1.0, 2.0]), "ascending"),
        (frame([2], [2, 10], [1.0, 2.0]), "inside"),
        (frame([1], [2**32 - 1], [1.0]), "inside"),
        (packed([1], [], b"", b""), "as many"),
        (packed([1], [0], b"", ONE[:3]), "as many"),
        (packed([1], [33], bytes(5), ONE), "as many"),
        (packed([1], [4], b"\x0a", ONE), "inside"),  # index 10
        (packed([1], [4], b"\x12", ONE), "padding"),  # a bit beyond the only gap
        (packed([2], [32], b"\xff" * 8, TWO), "inside"),  # gaps that add up beyond 2**32
        (packed([2], [4], b"\x63", TWO), "inside"),  # index 3, then 10
        (frame([1], [3], [1.0], form=2)[:-4] + struct.pack("<IH", 14, 1), "range"),
        (frame([1], [3], [1.0], form=4)[:-4] + struct.pack("<IB", 21, 1), "range"),
        (frame([1], [3], [1.0], form=4)[:-4] + struct.pack("<IB", 1 << 31, 1), "range"),
        (frame([1], [3], [1.0], form=4)[:-4] + struct.pack("<I", 0), "as many"),
    ],
)
@pytest.mark.parametrize("id_", [16, 18, 19, 20, 21, 22, 23, 24])
def test_bad_payload_is_refused_before_anything_is_written(payload, rule, id_):
    assert_refused(by_id(id_, 0x3F800000 if id_ == 19 else 10_000), payload, rule)


def test_a_payload_is_any_sparsifiers():
    _, payload, _ = run(parse("topk(ratio=0.1,packed=1,values=8)"), vectors.normal(1000), None, np.array([0, 1000]))
    decoded = []
    for id_ in (16, 18, 20, 21, 22, 23, 24):
        out = np.empty(1000, np.float32)
        by_id(id_, 1).decode(payload, out)
        decoded.append(out)
    assert all(same(decoded[0], other) for other in decoded)


def test_more_segments_than_a_payload_can_name():
    codec = parse("topk(ratio=0.1)")
    table = np.zeros((1 << 24) + 1, np.int64)
    with pytest.raises(CodecError, match="segments: expected at most 16777215"):
        codec.encode(np.zeros(0, np.float32), None, None, np.zeros(1 << 27, np.uint8), table)


# ------------------------------------------------------------------------------------------------- storm
@njit
def storm(seeded, frames, sizes, end, out, n, rounds, seed):
    """Mutate frames and hand them to check, decode and add: (accepted, refused, first round with a fault or -1).

    frames: uint8[count, longest]; end: where the readable memory behind a payload ends; out: float32 with n elements
    between guard zones of 16, all 0x3c3c3c3c while nothing was accepted.
    """
    state = np.uint64(seed)
    accepted, refused = 0, 0
    guard = out.size - 32
    words, doubled = out.view(np.uint32), np.empty(out.size, np.uint32)
    edges = np.array([0, 1, 2, 31, 32, 33, 255, 2**16, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    for turn in range(rounds):
        which = turn % len(sizes)
        size = sizes[which]
        place = end.size - frames.shape[1] - 16
        data = end[place:]
        data[:size] = frames[which, :size]
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        changes = 1 + (state >> np.uint64(60)) % np.uint64(3)
        for _ in range(np.int64(changes)):
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            kind = np.int64((state >> np.uint64(61)) % np.uint64(8))
            at = np.int64((state >> np.uint64(33)) % np.uint64(max(1, size)))
            value = np.int64((state >> np.uint64(20)) & np.uint64(255))
            word = at & ~3
            if kind == 0:
                data[at] = value
            elif kind == 1:
                data[at] ^= np.uint8(1 << (value & 7))
            elif kind == 2:
                size = at
            elif kind == 3 and size + 8 <= frames.shape[1] + 16:
                size += 1 + value % 8
            elif kind == 4 and word + 4 <= size:
                data[word : word + 4].view(np.uint32)[0] = edges[value % len(edges)]
            elif kind == 5 and word + 4 <= size:
                data[word : word + 4].view(np.uint32)[0] += np.uint32(1 if value & 1 else 0xFFFFFFFF)
            elif kind == 6 and word + 8 <= size:
                data[word : word + 4] = data[word + 4 : word + 8].copy()
            elif kind == 7:
                for i in range(min(size, 12)):
                    data[i] = np.uint8(value * (i + 1))
        # The payload ends where memory does: a read beyond it ends the process.
        moved = end[end.size - size :]
        for i in range(size - 1, -1, -1):
            moved[i] = data[i]
        payload = np.int64(end.ctypes.data) + end.size - size
        target = np.int64(out.ctypes.data) + 64
        verdict = 0
        for mode in range(3):
            words[:] = np.uint32(0x3C3C3C3C)
            if seeded:
                rule = randomk_apply(payload, size, target, n, 1.0, mode)
            else:
                rule = sparse_apply(payload, size, target, n, 1.0, mode)
            if mode == 0:
                verdict = rule
            written = 0
            for i in range(out.size):
                inside = 16 <= i < 16 + n
                if (not inside or rule != 0 or mode == 0) and words[i] != np.uint32(0x3C3C3C3C):
                    written += 1
                if mode == 1:
                    doubled[i] = words[i]
            if rule != verdict or written > 0 or guard != n:
                return accepted, refused, turn
        accepted += verdict == 0
        refused += verdict != 0
    return accepted, refused, -1


def ending_at_a_page():
    """uint8[4096] whose last byte is the last that may be read; the mapping is kept by the array."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    memory = np.frombuffer(pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_void_p(memory.ctypes.data + mmap.PAGESIZE)
    assert libc.mprotect(where, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0, ctypes.get_errno()
    return memory[: mmap.PAGESIZE]


@pytest.mark.parametrize("seeded", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_storm_of_mutated_frames_breaks_nothing(seeded):
    n, frames = 77, []
    for seed, (options, (packed_, _)) in enumerate(FORMS.items()):
        if seeded and packed_:
            continue
        for ratio in (0.01, 0.2, 1):
            codec = parse(f"{'randomk' if seeded else 'topk'}(ratio={ratio}{options})")
            for bounds in ([0, n], [0, 20, 20, n]):
                frames.append(run(codec, vectors.normal(n, seed), None, np.array(bounds), seed=seed)[1])
    frames.append(struct.pack("<I", 0))
    table = np.zeros((len(frames), max(map(len, frames))), np.uint8)
    for row, data in zip(table, frames, strict=True):
        row[: len(data)] = np.frombuffer(data, np.uint8)
    sizes = np.array([len(f) for f in frames])
    out = np.empty(n + 32, np.float32)
    accepted, refused, fault = storm(seeded, table, sizes, ending_at_a_page(), out, n, 150_000, 7)
    assert fault == -1
    assert accepted + refused == 150_000 and min(accepted, refused) > 5000
