"""The counter-based generator: what it draws, to the bit, and that it may pass for chance.

Statistics are of fixed seeds, so a test that passes once passes always; the bounds are what a good generator keeps
but for one seed in some thousand.
"""

import numpy as np
import pytest
from numba import njit

from gcserver.codecs.stochastic import key, stochastic
from gcserver.codecs.vector import F32, I32
from tests.unit.codecs import quantise_oracles as oracles

N = 1 << 19
draw_words = stochastic([F32], [I32], lambda ops, values, scalars, words: [words])


@njit("void(int64, int64, int64, int64, int64, int64)")
def draw(x, out, n, first, k0, k1):
    draw_words((x, out), n, (first, k0, k1), (1.0,))


@pytest.fixture(scope="module")
def drawn():
    return {seed: oracles.words(seed, 0, N) for seed in (0, 1, 2, 3, 1000, 2**61)}


def centred(words):
    """Uniform on (-1, 1) with variance 1/3."""
    return (words >> 9) / 2**22 - 1 + 2**-23


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1000])
@pytest.mark.parametrize("first", [0, 5, 2**32 - 40])
@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1])
def test_words_equal_the_oracle(n, first, seed):
    x, out = np.zeros(n, np.float32), np.zeros(n, np.uint32)
    draw(x.ctypes.data, out.ctypes.data, n, first, *key(seed))
    assert np.array_equal(out, oracles.words(seed, first, n))


def test_keys_of_different_seeds_differ():
    assert len({key(seed) for seed in range(10_000)}) == 10_000
    assert key(0) == (0x7B1DCDAF, 0xE220A839)  # splitmix64's first output


def test_mean_and_variance(drawn):
    for words in drawn.values():
        u = centred(words)
        assert abs(u.mean()) < 4 / np.sqrt(3 * N)
        assert abs(3 * (u * u).mean() - 1) < 4 * np.sqrt(0.8 / N)


def test_every_value_is_as_likely(drawn):
    for words in drawn.values():
        for shift in (24, 16, 9):
            counts = np.bincount((words >> shift) & 255, minlength=256)
            chi = ((counts - N / 256) ** 2).sum() / (N / 256)
            assert abs(chi - 255) < 4 * np.sqrt(2 * 255)


def test_neighbours_are_independent(drawn):
    for words in drawn.values():
        u = centred(words)
        for lag in (1, 2, 3, 4, 8, 16, 32, 64, 256, 1024, 65536):
            assert abs(3 * (u[:-lag] * u[lag:]).mean()) < 4.5 / np.sqrt(N)
        pairs = np.bincount((words[:-1] >> 26) * 64 + (words[1:] >> 26), minlength=4096)
        chi = ((pairs - N / 4096) ** 2).sum() / (N / 4096)
        assert abs(chi - 4095) < 4 * np.sqrt(2 * 4095)


def test_single_bits_of_neighbours_are_independent(drawn):
    bits = ((drawn[1][:, None] >> np.arange(9, 32, dtype=np.uint32)) & 1).astype(np.float32) * 2 - 1
    for lag in (1, 2, 256):
        assert np.abs(bits[:-lag].T @ bits[lag:]).max() < 5 * np.sqrt(N)


def test_seeds_are_independent(drawn):
    """Element by element, and shifted: two nodes must not round alike."""
    seeds = list(drawn)
    for a in seeds:
        for b in seeds:
            for shift in (0, 1, 7) if a < b else ():
                product = centred(drawn[a])[: N - shift] * centred(drawn[b])[shift:]
                assert abs(3 * product.mean()) < 4.5 / np.sqrt(N)
    # One element over many seeds, as over the steps of a run.
    steps = centred(np.array([oracles.words(seed, 12_345, 1)[0] for seed in range(20_000)]))
    assert abs(steps.mean()) < 4 / np.sqrt(3 * len(steps))
    assert abs(3 * (steps[1:] * steps[:-1]).mean()) < 4 / np.sqrt(len(steps))
