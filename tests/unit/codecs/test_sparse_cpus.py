"""What sparsifiers send does not depend on the CPU: the same bytes from kernels compiled without AVX."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from gcserver.codecs import parse
from tests.unit.codecs import vectors

SPECS = [
    "topk(ratio=0.01)",
    "topk(ratio=0.02,packed=1,values=8)+momentum(nesterov=1)",
    "randomk(ratio=0.01,values=16)",
    "gaussiank(ratio=0.01,packed=1)",
    "redsync(ratio=0.01)+momentum",
    "dgc(ratio=0.01,warmup=3)",
]


def digests():
    """Of payload, new state and what decode_add and decode make of it, a line a spec."""
    n = 100_003
    x = vectors.normal(n) * np.exp(vectors.normal(n, 1, 3))
    lines = []
    for spec in SPECS:
        codec = parse(spec)
        state = vectors.normal(codec.state_floats(n, 3), 2, 0.1)
        if "warmup" in spec:
            state[-1] = 2
        new, out, acc = np.zeros_like(state), np.zeros(codec.max_bytes(n, 3), np.uint8), vectors.normal(n, 3)
        size = codec.encode(x, state, new, out, np.array([0, 30_001, 30_001, n]), 1 / 3, seed=9).nbytes
        codec.decode_add(out[:size], acc)
        average = np.zeros_like(acc)
        codec.decode(out[:size], average)
        lines.append(hashlib.sha256(b"".join(a.tobytes() for a in (out[:size], new, acc, average))).hexdigest())
    return "\n".join(lines)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_same_bytes_without_vector_extensions():
    # numba's cache knows for which processor it holds what: half a minute, unless the sources are as they were.
    env = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = "from tests.unit.codecs.test_sparse_cpus import digests; print(digests())"
    other = subprocess.run([sys.executable, "-c", script], check=True, env=env, capture_output=True, text=True)
    assert other.stdout.strip() == digests()
