"""Of what size and kind a seeded world is: nodes, lanes, jobs, programs, network.

What may live here: drawing a world's shape from its seed. What may not: what happens in it (`world.py`), which
faults strike (`faults.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from tests.simulation.program import DomainSpec, JobSpec

KIB = 1024
#: worlds from this seed on lose nodes and go on
LOSSY = 1_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """A world before anything happens. Times in seconds, ``credit`` in bytes."""

    nodes: int
    lanes: int
    jobs: tuple[JobSpec, ...]
    codec: str = "feedback"
    credit: int = 512 * KIB
    partition_bytes: int = 128 * KIB
    min_compress_bytes: int = 16 * KIB
    deadline: float = 60.0
    tick: float = 0.25
    latency: float = 0.002
    jitter: float = 0.0
    reorder: float = 0.0
    duplicates: float = 0.0
    answer_delay: float = 0.0
    static_peers: bool = True
    everyone: bool = False
    #: how long the arbiter takes at most
    arbiter_delay: float = 0.0


def section(index: int, domain: int, sizes: list[int]) -> Section:
    """A section of fp32 tensors of these sizes, bytes."""
    tensors = tuple(TensorSpec(f"d{domain}.s{index}.t{i}", (n // 4,), int(DType.F32)) for i, n in enumerate(sizes))
    return Section(index, tensors)


def sometimes_twice(codec: str, seed: int) -> str:
    """Another codec in a third of all worlds, from a generator of its own: the other draws stay what they were."""
    return "twice" if Random(seed * 8 + 5).random() < 0.35 else codec


def sometimes_cut(cut: Section, seed: int) -> Section:
    """Its tensors as groups of their own in a third of all cases, from a generator of its own."""
    groups = len(cut.tensors) > 1 and Random(seed * 8 + 6).random() < 0.35
    return Section(cut.index, cut.tensors, tuple(range(1, len(cut.tensors)))) if groups else cut


def draw_domain(r: Random, number: int, ranks: tuple[int, ...], codecs: list[str], steps: int, seed: int) -> DomainSpec:
    scoped = r.random() < 0.6
    sections = []
    for index in range(1 if scoped else r.randint(1, 3)):
        big = r.random() < 0.7
        sizes = [r.choice([64, 192, 320]) * KIB for _ in range(r.randint(1, 2))] if big else [r.choice([4, 96, 256])]
        sections.append(sometimes_cut(section(index, number, sizes), seed * 16 + number * 4 + index))
    late = tuple(1 if i == 0 else r.randint(1, max(1, steps // 2)) for i in range(len(sections)))
    late = tuple(sorted(late))
    nan = {r.randint(1, steps): r.choice(ranks) for _ in range(r.choice([0, 0, 1, 2]))}
    skip = frozenset(r.sample(range(1, steps + 1), min(steps, r.choice([0, 0, 1]))))
    codec = sometimes_twice(r.choice(codecs), seed * 4 + number)
    # From a generator of its own: the other draws stay what they were before this one came.
    whole = scoped and Random(seed * 4 + number).random() < 0.2
    return DomainSpec(
        number, ranks, scoped, codec, tuple(sections), late, steps, nan, skip, r.randint(1, 3), seed + number, whole
    )


def draw_job(r: Random, label: str, nodes: int, codecs: list[str], seed: int) -> JobSpec:
    """A job on some nodes with unequal numbers of ranks, one or two domains."""
    used = sorted(r.sample(range(nodes), r.randint(min(2, nodes), nodes)))
    layout = tuple((n, r.choice([1, 1, 1, 2, 2, 3])) for n in used)
    world = sum(n for _, n in layout)
    everyone = tuple(range(world))
    domains = [draw_domain(r, 0, everyone, codecs, r.randint(4, 8), seed)]
    if r.random() < 0.3 and world > 2:
        some = tuple(sorted(r.sample(range(world), r.randint(2, world - 1))))
        domains.append(draw_domain(r, 1, some, codecs, r.randint(2, 4), seed))
    return JobSpec(label, layout, tuple(domains))


def draw(seed: int) -> Shape:
    """The shape of world ``seed``; from LOSSY on its jobs go on without the nodes they lose."""
    if seed >= LOSSY:
        shape, r = _draw(seed), Random(seed * 16 + 3)
        jobs = tuple(replace(job, on_loss=r.choice(["shrink", "shrink", "skip"])) for job in shape.jobs)
        return replace(shape, jobs=jobs, arbiter_delay=r.choice([0.001, 0.02, 1.0]))
    return _draw(seed)


def _draw(seed: int) -> Shape:
    r = Random(seed * 2 + 1)
    nodes = r.choice([1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6])
    everyone = r.random() < 0.3
    codecs = ["", "", "feedback", "none"]
    if everyone:
        codecs += ["all-feedback", "all-none", "all-feedback"]
    jobs = tuple(draw_job(r, f"job{i}", nodes, codecs, seed * 8 + i) for i in range(r.choice([1, 1, 1, 2])))
    return Shape(
        nodes=nodes,
        lanes=r.choice([1, 1, 2, 2, 3]),
        jobs=jobs,
        codec=sometimes_twice(r.choice(["feedback", "feedback", "none"]), seed * 4 + 2),
        credit=r.choice([64, 128, 512, 4096]) * KIB,
        partition_bytes=r.choice([64, 128, 256]) * KIB,
        latency=r.choice([0.0005, 0.002, 0.01]),
        jitter=r.choice([0.0, 0.02, 0.2]),
        reorder=r.choice([0.0, 0.0, 0.1]),
        duplicates=r.choice([0.0, 0.0, 0.02]),
        answer_delay=r.choice([0.0, 0.0, 0.003]),
        static_peers=r.random() < 0.7,
        everyone=everyone,
    )
