"""GPU codecs as objects: specs, bounds, refusals, that nothing waits for the device, and agreed constants."""

import importlib
import math
import pkgutil

import numpy as np
import pytest
import torch

from gcclient.gpu_codecs import Encoded, GpuCodecError, compile_kernels, make, names
from gcclient.gpu_codecs import sidco as mine
from gcproto import layouts
from gcserver import codecs
from gcserver.codecs import (
    CodecError,
    by_id,
    chance,
    packing,
    parse,
    quantise,
    sidco,
    sidco_fit,
    sparsifier,
    stochastic,
)
from tests.unit.client.gpu_cases import DEVICE, EXACT, SUMMED, Sides
from tests.unit.codecs import vectors

SPECS = EXACT + SUMMED + ["sidco-e(ratio=0.01)", "sidco-e(ratio=0.001,packed=1,values=8)+momentum(m=0.9)"]


def test_the_codecs_are_those_of_the_issue():
    assert names() == ["fp16", "bf16", "topk", "randomk", "sidco-e", "onebit", "efsignsgd", "qsgd", "terngrad"]


@pytest.mark.parametrize("spec", SPECS)
def test_ids_levels_bounds_and_states_are_the_daemons(spec):
    cpu, gpu = parse(spec), make(spec)
    assert (gpu.id, gpu.name, gpu.level) == (cpu.id, cpu.name, cpu.level)
    assert (gpu.error_feedback, gpu.keeps_residual) == (cpu.error_feedback, cpu.keeps_residual)
    assert by_id(gpu.id, gpu.level).level == gpu.level
    assert make(cpu.spec).level == gpu.level
    for n, m in ((0, 1), (1, 1), (1000, 3), (12345, 7), (3 * 10**6, 40)):
        assert gpu.max_bytes(n, m) == cpu.max_bytes(n, m)
        assert gpu.state_floats(n, m) == cpu.state_floats(n, m)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("zip", "expected one of fp16, bf16"),
        ("powersgd(rank=4)", "others run in the daemon"),
        ("topk", "write topk"),
        ("topk(ratio=2)", r"in \[1e-06, 1.0\]"),
        ("topk(ratio=x)", "a number"),
        ("topk(ratio=0.1,values=12)", "one of 32, 16, 8"),
        ("topk(size=3)", "one of ratio, packed, values"),
        ("topk(ratio=0.1,ratio=0.2)", "once"),
        ("topk(ratio=0.1", "name"),
        ("fp16+ef", "does not apply"),
        ("onebit+momentum(m=0.9)", "does not apply"),
        ("topk(ratio=0.1)+ef(decay=0)+momentum(m=0.9)", "with error feedback"),
        ("randomk(ratio=0.1,unbiased=1)+momentum(m=0.9)", "expected 0 with momentum"),
        ("randomk(ratio=0.1,unbiased=1)+ef", "expected 0 with error feedback"),
        ("qsgd(levels=3,kind=maxmin)", "l2 or max"),
        ("qsgd(bucket=100)", "multiple of 64"),
    ],
)
def test_specs_that_are_refused(spec, message):
    with pytest.raises(GpuCodecError, match=message):
        make(spec)
    with pytest.raises(CodecError):
        parse(spec) if not spec.startswith("powersgd") else parse("powersgd(rank=0)")


def arguments(spec="topk(ratio=0.1)", n=100):
    gpu = make(spec)
    state = torch.zeros(gpu.state_floats(n))
    return gpu, {
        "x": torch.zeros(n),
        "state_in": state,
        "state_out": torch.zeros_like(state),
        "out": torch.zeros(gpu.max_bytes(n, 2), dtype=torch.uint8),
        "segments": [0, 40, n],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(100, dtype=torch.float64)}, "x: expected a contiguous one-dimensional torch.float32"),
        ({"x": torch.zeros(10, 10)}, "x: expected"),
        ({"x": torch.zeros(200)[::2]}, "x: expected"),
        ({"state_in": torch.zeros(99)}, r"state_in: expected float32\[100\]"),
        ({"out": torch.zeros(10, dtype=torch.uint8)}, "out: expected uint8"),
        ({"out": torch.zeros(1000, dtype=torch.int8)}, "out: expected"),
        ({"segments": [0, 40, 99]}, "ascending boundaries from 0 to 100"),
        ({"segments": [0, 60, 40, 100]}, "ascending boundaries"),
        ({"segments": []}, "ascending boundaries"),
        ({"levels": [1]}, r"expected 2 in \[1, 1000000\]"),
        ({"levels": [0, 1]}, "levels"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    gpu, good = arguments()
    gpu.encode(**good).settle()
    with pytest.raises(GpuCodecError, match=message):
        gpu.encode(**(good | change))


def test_states_are_versions():
    gpu, good = arguments()
    for name in ("x", "state_in"):
        with pytest.raises(GpuCodecError, match="memory of its own"):
            gpu.encode(**(good | {"state_out": good[name]}))
    cast, good = arguments("fp16")
    with pytest.raises(GpuCodecError, match="state_in: expected None"):
        cast.encode(**good)


@pytest.mark.parametrize("spec", SPECS)
def test_encoding_waits_for_nothing(spec):
    """On tensors without contents, anything that would have to look at one fails; so does a mixture of devices."""
    gpu, n = make(spec), 300_000
    floats = gpu.state_floats(n, 3)
    old, new = (torch.empty(floats, device="meta") if floats else None for _ in range(2))
    out = torch.empty(gpu.max_bytes(n, 3), dtype=torch.uint8, device="meta")
    pending = gpu.encode(torch.empty(n, device="meta"), old, new, out, [0, 1000, 1000, n], 0.5, seed=3)
    known = "packed" not in spec and not spec.startswith("sidco")
    assert (pending.nbytes > 0) == known
    with pytest.raises((RuntimeError, NotImplementedError)):  # and settling does look
        pending.settle()


@pytest.mark.skipif(DEVICE != "cuda", reason="waits are CUDA's: TEST_DEVICE=cuda")
@pytest.mark.parametrize("spec", SPECS if DEVICE == "cuda" else ["every codec"])
def test_encoding_on_cuda_waits_for_nothing(spec):
    gpu, n = make(spec), 300_000
    floats = gpu.state_floats(n, 3)
    old, new = (torch.zeros(floats, device=DEVICE) if floats else None for _ in range(2))
    out = torch.zeros(gpu.max_bytes(n, 3), dtype=torch.uint8, device=DEVICE)
    x = torch.randn(n, device=DEVICE)
    gpu.encode(x, old, new, out, [0, 1000, 1000, n], 0.5, seed=3).settle()  # what is kept from step to step
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = gpu.encode(x, old, new, out, [0, 1000, 1000, n], 0.5, seed=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.settle().nbytes <= gpu.max_bytes(n, 3)


def test_settling_twice_gives_the_same():
    gpu, good = arguments("sidco-e(ratio=0.1)")
    state = torch.zeros(gpu.state_floats(100, 2))
    good |= {"x": torch.arange(100.0), "state_in": state, "state_out": torch.zeros_like(state)}
    pending = gpu.encode(**good)
    assert pending.nbytes == -1
    first = pending.settle()
    assert first == pending.settle() == Encoded(first.nbytes, 0, 0) and pending.nbytes == first.nbytes


def of_the_daemon(prefix, name):
    """The value of a constant that modules of gcserver.codecs whose names begin so agree on."""
    found = set()
    for module in pkgutil.iter_modules(codecs.__path__):
        if module.name.startswith(prefix):
            found.add(getattr(importlib.import_module(f"{codecs.__name__}.{module.name}"), name, None))
    (value,) = found - {None}
    return value


def test_constants_are_the_daemons():
    for prefix, names_ in {
        "spars": ("MOST_SEGMENTS", "PACKED", "MILLION"),
        "packing": ("GAPS", "VALUES", "EXACT", "SIXTEEN", "EIGHT"),
        "quantise": ("GRAIN", "LIMIT", "TINY"),
        "stochastic": ("SPREAD", "FIRST", "SECOND"),
        "randomk": ("SEEDED",),
    }.items():
        for name in names_:
            assert getattr(layouts, name) == of_the_daemon(prefix, name), name
    assert layouts.MAX_SHIFT == {1: packing.MAX_SHIFT_16, 2: packing.MAX_SHIFT_8}
    for name in ("EXACT_BELOW", "LEAST_SAMPLE", "MOST_SAMPLE", "WINDOW", "TOLERANCE", "FADE", "SEGMENT_FLOATS", "CUTS"):
        assert getattr(mine, name) == of_the_daemon("sidco", name), name
    for name in ("FEW", "FIRST", "LOW", "HIGH", "STEPS"):
        assert getattr(mine, name) == of_the_daemon("sidco", name), name


def test_scalar_functions_are_the_daemons():
    rng = np.random.default_rng(0)
    for x in [*np.exp(rng.uniform(-600, 600, 300)).tolist(), 1.0, 0.25, 5e-324]:
        assert layouts.ln(x) == sidco_fit.ln(x)
    for x in [*rng.uniform(-720, 720, 300).tolist(), 0.0, 1.0]:
        assert layouts.exp(x) == sidco_fit.exp(x) and (abs(x) > 700 or math.isclose(layouts.exp(x), math.exp(x)))
    for seed in (0, 1, 2**62 - 1):
        assert layouts.rounding_keys(seed) == stochastic.key(seed)
        for counter in (0, 1, 12345, 2**31):
            assert layouts.bits64(seed, counter) == int(chance.bits64(seed, counter)) & layouts.MASK64
            assert layouts.draw(seed, counter, 1000) == chance.draw(seed, counter, 1000)
    for length in (0, 1, 99, 10**6):
        for level in (1, 10_000, 10**6):
            assert layouts.wanted(length, level) == sparsifier.wanted(length, level)
    for n, k in ((1 << 16, 655), (10**6, 10**4), (10**8, 10**5), (10**7, 32)):
        assert mine.sample_size(n, k) == sidco.sample_size(n, k)
    assert layouts.quantiser_word(4, 7, 1024, True) == quantise.word(4, 7, 1024, True)


def test_a_payload_may_lie_anywhere():
    """At an odd address inside a larger message."""
    for spec in ("topk(ratio=0.1)", "randomk(ratio=0.1)", "onebit", "qsgd", "fp16", "topk(ratio=0.1,packed=1)"):
        sides = Sides(spec, [0, 33, 1000])
        (_, payload, _), _ = sides.encode(vectors.normal(1000))
        message = torch.zeros(payload.size + 3, dtype=torch.uint8, device=DEVICE)
        message[3:] = torch.from_numpy(payload)
        ours, theirs = np.zeros(1000, np.float32), torch.zeros(1000, device=DEVICE)
        sides.cpu.decode(payload, ours)
        sides.gpu.decode(message[3:], theirs)
        assert np.array_equal(ours, theirs.cpu().numpy())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_kernels_write_the_same_bytes(monkeypatch):
    # The vectors that the processor says it has are taken at its word: trying them takes as long as compiling.
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
    compile_kernels()
    try:
        for spec in ("qsgd(bits=3)+ef", "onebit"):
            sides = Sides(spec, [0, 1000, 5000])
            (_, payload, state), (_, payload_gpu, state_gpu) = sides.encode(vectors.normal(5000), 0.5, seed=5)
            assert payload.tobytes() == payload_gpu.tobytes() or spec == "onebit"
            assert state is None or np.allclose(state, state_gpu, atol=1e-6)
    finally:
        compile_kernels(False)
