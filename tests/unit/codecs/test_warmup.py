"""Nothing compiles after warmup, and is_warm knows a full cache from an empty one without compiling."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numba.core import sigutils

from gcproto.dtypes import DType
from gcserver.codecs import jit, parse, reduce
from gcserver.codecs.warmup import is_warm, kernels, warmup
from tests.unit.codecs import specs, vectors

# Compiling everything takes more than a minute where no cache is left over.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", autouse=True)
def warm():
    calls = []
    warmup(lambda *call: calls.append(call))
    assert calls[0][1] == 0 and calls[-1] == ("", len(kernels()), len(kernels()))


def test_nothing_compiles_after_warmup():
    before = [len(k.signatures) for k in kernels()]
    assert before == [1] * len(before)
    for n in (0, 1, 1000, 100_000):
        x = vectors.normal(n)
        for codec in map(parse, specs.USUAL):
            floats = codec.state_floats(n, 2)
            old = np.zeros(floats, np.float32)
            for source, state in ((x, old), (vectors.unaligned(x), vectors.unaligned(old))):
                out = np.empty(codec.max_bytes(n, 2), np.uint8)
                versions = (state, np.zeros_like(old)) if floats else (None, None)
                result = codec.encode(source, *versions, out, np.array([0, n // 2, n]), 1, seed=3)
                payload = vectors.unaligned(out[: result.nbytes])
                codec.decode(payload, np.empty_like(x), np.float32(0.5))
                codec.decode_add(payload, x.copy())
        reduce.sum_ranks(np.empty_like(x), [x] * 6)
        reduce.scale_copy(np.empty_like(x), x, 1)
        for dtype in DType:
            acc = np.zeros(n, reduce.accumulate_dtype(dtype))
            raw = np.zeros(n * dtype.itemsize, np.uint8)
            reduce.load_copy(acc, raw, dtype)
            reduce.load_add(acc, vectors.unaligned(raw), dtype)
            reduce.store(raw, acc, dtype, 1)
    assert [len(k.signatures) for k in kernels()] == before


def test_a_kernel_refuses_other_types_after_warmup():
    with pytest.raises(TypeError):
        kernels()[0](1.5, "x")


def test_kernels_have_the_signatures_they_declare():
    for kernel in kernels():
        (compiled,) = kernel.overloads.values()
        args, result = sigutils.normalize_signature(kernel.declared_signature)
        assert (compiled.signature.args, compiled.signature.return_type) == (args, result), kernel.__name__


def test_is_warm():
    assert is_warm()


def test_what_a_call_compiled_is_what_warmup_loads(tmp_path):
    lazy = (
        "import numpy as np\n"
        "from gcserver.codecs import parse\n"
        "parse('none').decode(np.zeros(4, np.uint8), np.zeros(1, np.float32))\n"
    )
    check = (
        "from gcserver.codecs.jit import compile_kernel, is_cached\n"
        "from gcserver.codecs.casts import cast_load, cast_add\n"
        "assert is_cached(cast_load) and not is_cached(cast_add)\n"
        "compile_kernel(cast_load)\n"
        "assert sum(cast_load.stats.cache_hits.values()) == 1, cast_load.stats\n"
    )
    for script in (lazy, check):
        run(script, tmp_path)


def test_the_cache_depends_on_the_layouts_that_kernels_are_made_of(tmp_path, monkeypatch):
    digest = jit._package_digest.__wrapped__
    before, changed = digest(), tmp_path / "layouts.py"
    changed.write_text("LN2 = 0.7\n")
    monkeypatch.setattr(jit.layouts, "__file__", str(changed))
    assert digest() != before


def test_is_warm_tells_an_empty_cache_without_compiling(tmp_path):
    script = (
        "from gcserver.codecs.warmup import is_warm, kernels\n"
        "assert not is_warm()\n"
        "assert not any(k.signatures for k in kernels())\n"
    )
    run(script, tmp_path)


def run(script, cache):
    env = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=env, timeout=60)
