"""What the tests of all sparsifiers share: one encode with its state, and what it is compared with."""

from __future__ import annotations

import numpy as np

from gcserver.codecs import parse
from tests.unit.codecs import oracles, sparse_oracles, vectors

#: options of packing and what the oracle calls them: (packed, width)
FORMS = {
    "": (0, 32),
    ",packed=1": (1, 32),
    ",values=16": (0, 16),
    ",packed=1,values=16": (1, 16),
    ",packed=1,values=8": (1, 8),
}

#: two segments, of 4 and 2 elements, and the payload of their halves of largest magnitude
GOLDEN_X = np.array([0.5, -2.0, 2.0, 0.0, -1.0, 3.0], np.float32)
GOLDEN_HEX = (
    "02000000" "02000000" "01000000"  # two segments, of 2 and 1 elements
    "01000000" "02000000" "05000000"  # indices in the partition
    "000000c0" "00000040" "00004040"  # -2, 2, 3
)  # fmt: skip


def run(codec, x, residual, bounds, scale=1.0, seed=0, levels=None, state=None, want_state=True):
    """(result, payload, new state): from a fresh state with this residual, or from ``state``."""
    n, m = x.size, len(bounds) - 1
    counted = levels if levels is not None and len(levels) == m else None  # a wrong number is for encode to refuse
    out, check = vectors.guarded(codec.needed(np.asarray(bounds), counted))
    floats = codec.state_floats(n, m) or n
    if state is None and residual is not None:
        state = np.zeros(floats, np.float32)
        state[:n] = residual
    new, check_new = vectors.guarded(4 * floats)
    new = new.view(np.float32)
    result = codec.encode(x, state, new if want_state else None, out, bounds, scale, seed, levels)
    check()
    check_new()
    return result, out[: result.nbytes].tobytes(), new


def same(a, b):
    """Equal to the bit."""
    return np.array_equal(np.asarray(a, np.float32).view("u4"), np.asarray(b, np.float32).view("u4"))


def check_against(template, choose, x, residual, bounds, scale=1.0, seed=0, forms=FORMS):
    """Encode with every form of packing: payload, residual and what decodes equal the oracle's, to the bit.

    template: a spec with ``{}`` where the options go; choose(v): the indices the oracle sends.
    """
    for options, (packed, width) in forms.items():
        codec = parse(template.format(options))
        result, payload, new = run(codec, x, residual, bounds, scale, seed)
        v = oracles.corrected(x, residual, scale, codec.decay)
        expected, left = sparse_oracles.frame(choose(v), v, bounds, packed, width)
        assert payload == expected, (codec.spec, len(payload), len(expected))
        assert same(new[: x.size], left), codec.spec
        assert result.nonfinite == oracles.nonfinite(v)
        assert run(codec, x, residual, bounds, scale, seed, want_state=False)[1] == payload
        out = np.full(x.size, 9, np.float32)
        codec.decode(payload, out)
        assert same(out, sparse_oracles.decode(payload, x.size))
        assert np.array_equal(out + new[: x.size], v), "conservation is exact whatever the rounding"
