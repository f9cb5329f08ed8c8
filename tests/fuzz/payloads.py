"""Target: codecs' payloads.

Each gives a result or a CodecError, the same from check, decode and decode_add, and nothing is written but ``out``, and
that only when the payload is accepted. `tests/property/test_fuzz.py` gives every codec its 100,000 by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gcserver.codecs import Codec, CodecError, by_id, parse
from tests.fuzz import mutate
from tests.unit.codecs import specs, vectors

VARIANTS: Final = tuple(spec for name in specs.FLAT for spec in specs.variants(name))


class Room:
    """float32[n] between guard zones, filled with a pattern that refused payloads must leave as it is."""

    def __init__(self, n: int) -> None:
        self.raw, self.guard = vectors.guarded(4 * n, fill=0x3C)
        self.pattern = self.raw.tobytes()
        self.out = self.raw.view(np.float32)


def _accepts(act: Callable[[NDArray[np.uint8], Any], None], data: NDArray[np.uint8], to: Any) -> bool:
    try:
        act(data, to)
    except CodecError:
        return False
    return True


def attempt(codec: Codec, payload: bytes, room: Room) -> bool:
    """Whether check, decode and decode_add accept a payload, which they must alike.

    Nothing may be written outside of ``room``, nor at all if the payload is refused.
    """
    data = np.frombuffer(payload, np.uint8)
    room.raw[:] = 0x3C
    checked = _accepts(codec.check, data, room.out.size)
    assert _accepts(codec.decode, data, room.out) == checked
    assert _accepts(codec.decode_add, data, room.out) == checked
    assert checked or room.raw.tobytes() == room.pattern
    room.guard()
    return checked


def frame(codec: Codec, n: int, seed: int) -> bytes:
    """A valid payload of ``n`` elements in up to four segments."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32)
    x[rng.random(n) < 0.2] = 0
    bounds = np.array([0, *sorted(rng.integers(0, n + 1, rng.integers(0, 4))), n], np.int64)
    out = np.empty(codec.max_bytes(n, len(bounds) - 1), np.uint8)
    return out[: codec.encode(x, None, None, out, bounds, seed=seed).nbytes].tobytes()


@lru_cache(maxsize=1 << 12)
def _frame(variant: int, n: int, seed: int) -> bytes:
    return frame(parse(VARIANTS[variant]), n, seed)


@lru_cache(maxsize=256)
def _room(n: int) -> Room:
    return Room(n)


class Payloads:
    """An input is the number of a codec's variant, the number of elements (a byte each), and the payload."""

    name = "payloads"

    def close(self) -> None:
        pass

    def draw(self, rng: random.Random) -> bytes:
        variant, n = rng.randrange(len(VARIANTS)), rng.randrange(0, 80)
        seed = rng.randrange(8)
        valid = _frame(variant, n, seed)
        kind = rng.randrange(20)
        if kind == 0:
            payload = rng.randbytes(rng.randrange(100))
        elif kind == 1:
            payload = _frame(rng.randrange(len(VARIANTS)), n, seed)
        else:
            payload = mutate.spoil(rng, valid, _frame(variant, n, seed + 1))
        return bytes([variant % 256, variant // 256, n]) + payload

    def feed(self, data: bytes) -> str:
        low, high, n = data[:3]
        variant = low + 256 * high
        codec = parse(VARIANTS[variant])
        decoder = by_id(codec.id, codec.level)
        accepted = attempt(decoder, data[3:], _room(n))
        assert attempt(decoder, _frame(variant, n, 0), _room(n))
        return "decoded" if accepted else "refused"
