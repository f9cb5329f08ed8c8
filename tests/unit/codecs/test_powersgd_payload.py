"""What powersgd puts into its payloads: which segments, how many bytes, golden ones, refusals; alike on every CPU."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from gcserver.codecs import CodecError
from gcserver.codecs.jit import compiled_for
from gcserver.codecs.powersgd import PowerSgd
from gcserver.codecs.powersgd_kernels import largest_rank
from gcserver.codecs.tworounds import TwoRounds
from tests.unit.codecs import powersgd_oracle as oracle
from tests.unit.codecs import vectors
from tests.unit.codecs.powersgd_nodes import Node


def test_what_is_compressed():
    assert largest_rank(100, 100, 64) == 24  # 2*25*200 is 10000, not below
    assert [largest_rank(r, c, 4) for r, c in ((0, 5), (5, 0), (1, 1), (1, 10**6), (4, 4), (5, 5))] == [0] * 5 + [1]
    codec = PowerSgd(rank=4)
    assert codec.payload_floats(0, ((4096, 4096), (4096, 0))) == 5 * 4096
    assert codec.payload_floats(1, ((4096, 4096), (4096, 0))) == 4 * 4096
    assert codec.max_bytes(100) == 400
    assert codec.state_floats(1000) == 1500
    for shapes in (((64, 64),), ((33, 65), (1000, 20), (7, 0))):
        n = sum(r * c if c else r for r, c in shapes)
        assert n <= codec.state_floats(n, len(shapes), shapes) <= codec.state_floats(n, len(shapes))
        assert all(4 * codec.payload_floats(stage, shapes) <= codec.max_bytes(n) for stage in (0, 1))


def test_golden_bytes():
    """5x5 at rank 1: P = V Q for the warm Q = e1/8, then Q = V^T P^ for P^ = e1."""
    shapes = ((5, 5), (2, 0))
    node = Node(PowerSgd(rank=1), shapes)
    node.state[27] = 0.125
    x = np.zeros(27, np.float32)
    x[:5] = [8, -4, 2, 1, 0.5]
    x[25:] = [3, -1]
    first = node.begin(x)
    assert first.tobytes().hex() == "0000803f" + 4 * "00000000" + "00004040" + "000080bf"
    second = node.middle(first)
    assert second.tobytes().hex() == "00000041" + "000080c0" + "00000040" + "0000803f" + "0000003f"
    out = node.finish(second, 2)
    assert out.tolist() == (x / 2).tolist()
    assert not node.next[:27].any()
    assert node.next[27:].tolist() == [0.0625, -0.03125, 0.015625, 0.0078125, 0.00390625]


def test_the_first_q_is_pinned():
    node = Node(PowerSgd(rank=1), ((5, 5),))
    x = np.eye(5, dtype=np.float32).ravel()
    assert node.begin(x, seed=12345).tolist() == oracle.fresh(12345, 0, 5, 1).ravel().tolist()
    assert (node.begin(x, seed=12345) * 2**26).tolist() == [-3194273, -2470768, -4912593, 6723588, 5388361]


def test_frames_of_both_rounds_are_plain_floats():
    codec = PowerSgd(rank=2)
    assert isinstance(codec, TwoRounds) and (codec.rounds, codec.layout, codec.shared_seed) == (2, "matrix", True)
    data = vectors.unaligned(vectors.normal(7).view(np.uint8))
    out, acc = np.zeros(7, np.float32), np.ones(7, np.float32)
    codec.decode(data, out, 0.5)
    codec.decode_add(data, acc)
    assert np.array_equal(out, vectors.normal(7) * np.float32(0.5))
    assert np.array_equal(acc, vectors.normal(7) + 1)
    for n in (6, 8):
        with pytest.raises(CodecError, match="powersgd"):
            codec.check(data, n)
    with pytest.raises(CodecError, match="two rounds"):
        codec.encode(out, None, None, data, None)


def refusals():
    shapes = ((30, 40), (3, 0))
    node = Node(PowerSgd(rank=2), shapes)
    good = {
        "x": np.zeros(node.n, np.float32),
        "state_in": node.state,
        "state_out": node.state.copy(),
        "work": np.zeros(node.codec.work_floats(shapes), np.float32),
        "out": np.zeros(4 * node.codec.payload_floats(0, shapes), np.uint8),
        "segments": node.segments,
        "shapes": shapes,
    }
    yield "x: expected", good | {"x": good["x"][1:]}
    yield "state_in", good | {"state_in": node.state[1:]}
    yield "state_out: expected memory of its own", good | {"state_out": node.state}
    yield "V lies in it", good | {"state_out": None}
    yield "work", good | {"work": good["work"][1:]}
    yield "out: expected at least", good | {"out": good["out"][1:]}
    yield "segments", good | {"segments": np.array([0, 1203])}
    yield "segments", good | {"segments": None}
    yield "neither negative", good | {"shapes": ((-30, -40), (3, 0))}
    yield "levels: expected ranks up to the codec's, 2", good | {"levels": np.array([3, 1], np.uint32)}
    yield "levels", good | {"levels": np.array([1], np.uint32)}
    yield "levels", good | {"levels": np.array([0, 1], np.uint32)}


@pytest.mark.parametrize("case", range(12))
def test_wrong_arguments_are_refused(case):
    message, arguments = list(refusals())[case]
    with pytest.raises(CodecError, match=message):
        PowerSgd(rank=2).begin(**arguments)


def shared_digest():
    """Of what every node computes for itself from the same sums: the result and the warm Q."""
    digest = hashlib.sha256()
    for rank, values in ((1, "32"), (3, "16"), (3, "32"), (4, "32"), (12, "32"), (13, "16"), (13, "32"), (16, "16")):
        shapes = ((203, 311), (64, 0), (99, 4101))
        node = Node(PowerSgd(rank=rank, values=values), shapes)
        node.begin(vectors.normal(node.n))
        node.middle(vectors.normal(node.codec.payload_floats(0, shapes), seed=1))
        out = node.finish(vectors.normal(node.codec.payload_floats(1, shapes), seed=2), 3)
        digest.update(out.tobytes() + node.next[node.n :].tobytes())
    return digest.hexdigest()


def without_avx512():
    """What kernels are compiled for but that, as numba takes it."""
    return ",".join(f"{'-' if f.startswith(('avx512', 'avx10')) else '+'}{f}" for f in sorted(compiled_for()))


@pytest.mark.parametrize(
    ("cpu", "features"),
    [
        pytest.param("x86-64", without_avx512(), id="no AVX-512"),
        pytest.param("generic", "", id="no AVX, no fused multiply-add", marks=pytest.mark.long),
    ],
)
def test_nodes_with_another_cpu_agree(cpu, features):
    """Compiled for a processor that can do less, the kernels are right as well, and give the same bytes."""
    program = """
from tests.unit.codecs import powersgd_nodes, test_powersgd, test_powersgd_payload
test_powersgd.test_each_stage_equals_the_oracle(7, powersgd_nodes.ODD)
test_powersgd.test_each_stage_equals_the_oracle(12, powersgd_nodes.LARGE)
print(test_powersgd_payload.shared_digest())
"""
    env = os.environ | {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == shared_digest()
