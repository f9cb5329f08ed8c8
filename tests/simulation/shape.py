"""Of what size and kind a seeded world is: nodes, lanes, jobs, programs, network.

What may live here: drawing a world's shape from its seed. What may not: what happens in it (`world.py`), which
faults strike (`faults.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from msgspec import structs

from gcproto.agreed import Resumed, Rule
from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from tests.simulation.program import DomainSpec, JobSpec

KIB = 1024
#: worlds from this seed on lose nodes and go on
LOSSY = 1_000_000
#: how often a world is large, and of how many nodes then: what one costs grows with the square
LARGE = 0.015
LARGE_NODES = (8, 12, 16, 24, 32, 48, 64)
LARGE_WEIGHTS = (64, 32, 16, 8, 4, 2, 1)


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
    #: of the tensors that the daemons' own rule is for
    pattern: str = "*"


def section(index: int, domain: int, sizes: list[int], dtype: DType = DType.F32) -> Section:
    """A section of tensors of these sizes, bytes."""
    sized = ((i, n // dtype.itemsize or 1) for i, n in enumerate(sizes))
    return Section(index, tuple(TensorSpec(f"d{domain}.s{index}.t{i}", (n,), int(dtype)) for i, n in sized))


def sometimes_typed(cut: Section, domain: int, seed: int) -> Section:
    """Of another type in some cases, from a generator of its own."""
    r = Random(seed * 4096 + 131)
    if r.random() > 0.1:
        return cut
    sizes = [t.elements * DType.F32.itemsize for t in cut.tensors]
    return Section(cut.index, section(cut.index, domain, sizes, r.choice([DType.F16, DType.I64])).tensors, cut.cuts)


def sometimes_twice(codec: str, seed: int) -> str:
    """Another codec in a third of all worlds, from a generator of its own: the other draws stay what they were."""
    return "twice" if Random(seed * 8 + 5).random() < 0.35 else codec


def sometimes_cut(cut: Section, seed: int) -> Section:
    """Its tensors as groups of their own in a third of all cases, from a generator of its own."""
    groups = len(cut.tensors) > 1 and Random(seed * 8 + 6).random() < 0.35
    return Section(cut.index, cut.tensors, tuple(range(1, len(cut.tensors)))) if groups else cut


def sometimes_resumed(spec: DomainSpec, seed: int) -> DomainSpec:
    """Warmed up, or going on from an earlier job, in some cases; from a generator of its own."""
    r = Random(seed * 64 + 71)
    if r.random() > 0.1:
        return spec
    rules = r.choice([(), (Rule("*", "coarse"),), (Rule("*", "none"), Rule("d0.*", "feedback"))])
    numbers = tuple(r.randrange(1, 1 << 60) for _ in range(r.choice([0, 2, 2, 3])))
    resumed = Resumed(b"an earlier job's", r.randrange(50), numbers, rules, r.choice(["", "none"]))
    if not spec.codec:
        default = Random(seed * 64 + 72).choice([(), (Rule("*", "none"),), (Rule("*", "feedback"),)])
        resumed = structs.replace(resumed, default=default)
    return replace(spec, warmup=r.choice([0, 1, 3, 52]), resumed=r.choice([None, resumed, resumed]))


def draw_domain(r: Random, number: int, ranks: tuple[int, ...], codecs: list[str], steps: int, seed: int) -> DomainSpec:
    scoped = r.random() < 0.6
    sections = []
    for index in range(1 if scoped else r.randint(1, 3)):
        big = r.random() < 0.7
        sizes = [r.choice([64, 192, 320]) * KIB for _ in range(r.randint(1, 2))] if big else [r.choice([4, 96, 256])]
        at = seed * 16 + number * 4 + index
        sections.append(sometimes_typed(sometimes_cut(section(index, number, sizes), at), number, at))
    late = tuple(1 if i == 0 else r.randint(1, max(1, steps // 2)) for i in range(len(sections)))
    late = tuple(sorted(late))
    nan = {r.randint(1, steps): r.choice(ranks) for _ in range(r.choice([0, 0, 1, 2]))}
    skip = frozenset(r.sample(range(1, steps + 1), min(steps, r.choice([0, 0, 1]))))
    codec = sometimes_twice(r.choice(codecs), seed * 4 + number)
    # From a generator of its own: the other draws stay what they were before this one came.
    whole = scoped and Random(seed * 4 + number).random() < 0.2
    drawn = DomainSpec(
        number, ranks, scoped, codec, tuple(sections), late, steps, nan, skip, r.randint(1, 3), seed + number, whole
    )
    return sometimes_resumed(drawn, seed * 4 + number)


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


def draw_large(r: Random, nodes: int, seed: int) -> Shape:
    """A cluster of more nodes than most worlds have, with a short program: its frames grow with the square of them."""
    layout = tuple((n, 2 if r.random() < 0.1 else 1) for n in range(nodes))
    ranks = tuple(range(sum(n for _, n in layout)))
    codec = r.choice(["", "none", "feedback", "twice"])
    tensors = section(0, 0, [256 * KIB * r.randint(1, max(1, nodes // 4))])
    nan = {1: r.choice(ranks)} if r.random() < 0.2 else {}
    domain = DomainSpec(0, ranks, True, codec, (tensors,), (1,), 2, nan, frozenset(), 1, seed)
    return Shape(
        nodes=nodes,
        lanes=1,
        jobs=(JobSpec("job0", layout, (domain,)),),
        codec=r.choice(["feedback", "none"]),
        credit=r.choice([128, 512, 4096]) * KIB,
        partition_bytes=256 * KIB,
        tick=1.0,
        latency=r.choice([0.0005, 0.002]),
        jitter=r.choice([0.0, 0.02]),
    )


def with_points(job: JobSpec, seed: int) -> JobSpec:
    """In half of all worlds that lose nodes these may come back, and more is done; from a generator of its own.

    Groups of some ranks are left out: one that is lost as a whole begins anew, which the oracle does not follow.
    """
    r = Random(seed * 64 + 29)
    if r.random() < 0.5:
        return job
    whole = [d for d in job.domains if len(d.ranks) == job.world_size]
    domains = tuple(replace(d, steps=d.steps + r.choice([4, 12])) for d in whole)
    return replace(job, domains=domains, points=r.choice([1, 2, 3]))


def draw(seed: int) -> Shape:
    """The shape of world ``seed``; from LOSSY on its jobs go on without the nodes they lose."""
    if seed >= LOSSY:
        shape, r = _draw(seed), Random(seed * 16 + 3)
        jobs = tuple(replace(job, on_loss=r.choice(["shrink", "shrink", "skip"])) for job in shape.jobs)
        jobs = tuple(with_points(job, seed) for job in jobs)
        return replace(shape, jobs=jobs, arbiter_delay=r.choice([0.001, 0.02, 1.0]))
    return _draw(seed)


def _draw(seed: int) -> Shape:
    size = Random(seed * 64 + 23)
    if size.random() < LARGE:
        return draw_large(size, size.choices(LARGE_NODES, LARGE_WEIGHTS)[0], seed)
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
        pattern="*.t0" if Random(seed * 64 + 26).random() < 0.06 else "*",
    )
