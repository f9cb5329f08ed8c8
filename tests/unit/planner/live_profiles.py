"""Profiles that tests plan for: a GPT by its shapes, codec costs from docs/benchmarks.md, small cases to do by hand."""

from __future__ import annotations

import msgspec
import numpy as np

from gcserver.planner.advice import profile_of
from gcserver.planner.errors_lowrank import lowrank_bytes
from gcserver.planner.errors_quantised import qsgd_bytes
from gcserver.planner.errors_sparse import sparse_bytes
from gcserver.planner.profile import CodecCost, Curve, LevelErrors, LinkCost, Profile, ProfiledTensor

MBIT100, GBIT1, GBIT10 = 12e6, 120e6, 1.2e9


def line(gb_per_s: float, base: float = 5e-6) -> Curve:
    """A kernel's seconds at so many GB/s of float32 input."""
    return Curve(((0, base), (1 << 24, base + 4 * (1 << 24) / gb_per_s / 1e9)))


def costs() -> dict[str, CodecCost]:
    """The table of docs/benchmarks.md, 16 M elements, with error feedback where the codec has it."""
    found = {
        "none": CodecCost(line(17.2), line(16.3), line(16.7), 1.0),
        "fp16": CodecCost(line(21.1), line(21.0), line(20.2), 0.5),
        "bf16": CodecCost(line(18.4), line(17.8), line(18.2), 0.5),
        "qsgd(bits=8)": CodecCost(line(15.0), line(26.0), line(23.2), 0.252),
        "qsgd(bits=4)": CodecCost(line(15.1), line(23.6), line(24.4), 0.127),
        "powersgd(rank=4)": CodecCost(line(3.7), line(8.0), line(500.0), 0.004),
    }
    for ratio, encode, add in ((0.05, 5.0, 40.0), (0.01, 6.5, 130.0), (0.005, 7.0, 250.0), (0.001, 7.0, 880.0)):
        for name in ("sidco-e", "topk"):
            found[f"{name}(ratio={ratio})"] = CodecCost(line(encode), line(45.0), line(add), 2 * ratio)
        for form, slower, share in ((",packed=1", 1.05, 0.65), (",packed=1,values=16", 1.09, 0.4)):
            found[f"sidco-e(ratio={ratio}{form})"] = CodecCost(
                line(encode / slower), line(41.0), line(add / 1.5), 2 * ratio * share
            )
    return found


def gpt_shapes(layers: int = 8, width: int = 512, vocabulary: int = 2048) -> dict[str, tuple[int, ...]]:
    """A GPT's parameters in the order of the forward pass: 27 M with the defaults."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width), "wpe.weight": (256, width)}
    for i in range(layers):
        h = f"h.{i}."
        shapes |= {h + "ln_1.weight": (width,), h + "ln_1.bias": (width,)}
        shapes |= {h + "attn.weight": (3 * width, width), h + "attn.bias": (3 * width,)}
        shapes |= {h + "proj.weight": (width, width), h + "proj.bias": (width,)}
        shapes |= {h + "ln_2.weight": (width,), h + "ln_2.bias": (width,)}
        shapes |= {h + "up.weight": (4 * width, width), h + "up.bias": (4 * width,)}
        shapes |= {h + "down.weight": (width, 4 * width), h + "down.bias": (width,)}
    return shapes


def gpt(
    nodes: int = 2, bandwidth: float = GBIT1, *, whole: bool = False, compute: float = 0.22, layers: int = 8
) -> Profile:
    """A GPT on a cluster, whose optimizer stands late gradients: of 26 M parameters with all of its layers."""
    link = LinkCost(2e-4, bandwidth, 0.0, 20)
    found = profile_of(gpt_shapes(layers), compute, link, nodes, costs(), whole=whole)
    return msgspec.structs.replace(found, tolerant=True)


def with_errors(profile: Profile, *families: str, seed: int = 0) -> Profile:
    """The profile with errors that fall with the level, differently for each tensor."""
    rng = np.random.default_rng(seed)
    grids = {
        "topk": np.union1d(np.rint(np.geomspace(100, 500_000, 25)).astype(np.int64), [1000, 5000, 10_000, 50_000]),
        "qsgd": np.arange(2, 9, dtype=np.int64),
        "powersgd": np.array([*range(1, 17), 20, 24, 28, 32], np.int64),
    }
    errors = {}
    for family in families:
        levels = grids[family]
        rows = []
        for t in profile.tensors:
            if family == "topk":
                sizes = sparse_bytes(t.elements, levels)
            else:
                sizes = qsgd_bytes(t.elements, levels) if family == "qsgd" else lowrank_bytes(t.shape, levels)
            norm = float(np.sqrt(t.elements)) * rng.lognormal(0, 1)
            lost = norm * (levels / levels[-1] * 1.01) ** -rng.uniform(0.05, 0.4) * 0.5
            rows.append(LevelErrors(t.name, tuple(levels.tolist()), tuple(lost.tolist()), tuple(sizes.tolist())))
        errors[family] = tuple(rows)
    return msgspec.structs.replace(profile, errors=errors)


def plain(
    elements: list[int],
    ready: list[float],
    *,
    nodes: int = 2,
    owners: list[int] | None = None,
    latency: float = 0.0,
    bandwidth: float = 4e6,
    codecs: dict[str, CodecCost] | None = None,
    forward: float = 0.0,
    lanes: int = 1,
    **more: object,
) -> Profile:
    """One tensor a block, nothing free but what is given: no turns, copies at a terabyte a second."""
    tensors = tuple(
        ProfiledTensor(f"t{i}", (n,), n, "float32", r, sum(elements[:i]))
        for i, (n, r) in enumerate(zip(elements, ready, strict=True))
    )
    blocks = tuple(
        (sum(elements[:i]), n, owners[i] if owners else i % nodes, i % lanes) for i, n in enumerate(elements)
    )
    free = Curve(((0, 0.0),))
    given = {"none": CodecCost(free, free, free, 1.0), **(codecs or {})}
    settings = {"copy": 1e15, "round_seconds": 0.0, **more}
    return Profile(
        "job", "ddp.0", nodes, 1, lanes, forward, tensors, LinkCost(latency, bandwidth, 0.0, 20), 8 << 20, 0,
        blocks=blocks, codecs=given, **settings,  # type: ignore[arg-type]
    )  # fmt: skip
