"""Whether compression pays on a link, and from which bandwidth on it stops paying; "don't" is an answer.

What may live here: expected steps of plans over bandwidths, the verdict, a profile made from shapes alone. What may
not: measuring, how a plan is composed (`auto.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from gcproto.advice import BANDWIDTH_FORM, is_bandwidth
from gcproto.dtypes import DType
from gcproto.modes import QUALITIES
from gcproto.rates import say_rate
from gcserver.planner.auto import Proposal, Wish, compose
from gcserver.planner.auto_informed import informed
from gcserver.planner.families import CASTS, DENSE
from gcserver.planner.live_layout import placed
from gcserver.planner.profile import CodecCost, LinkCost, Profile, ProfiledTensor, ProfileError
from gcserver.planner.worth import worth

#: Bandwidths between which the one is looked for above which compression stops paying, bytes a second.
LEAST: Final = 1e5
MOST: Final = 1e12
#: Halvings of that range, which is of seven decades: the answer is within 1 %.
_HALVINGS: Final = 11


class AdvicePlan(msgspec.Struct, frozen=True):
    """What a plan comes to: ``name`` is none, fp16 or a quality, ``spec`` what it uses, ``seconds`` a step."""

    name: str
    spec: str
    seconds: float


class AdviceRow(msgspec.Struct, frozen=True):
    """One link: ``bandwidth`` in bytes a second a direction, as it is measured or asked about, the plans, and whether
    the best one is worth a switch."""

    bandwidth: float
    plans: tuple[AdvicePlan, ...]
    pays: bool
    verdict: str


class Advice(msgspec.Struct, frozen=True):
    """compute: seconds of a step without any exchange. rows: the profile's own link first. stops_paying: bytes a second
    above which nothing of the quality is worth a switch; 0: it never is; `MOST`: it is on every link there is. verdict:
    one sentence on the profile's own link."""

    compute: float
    rows: tuple[AdviceRow, ...]
    stops_paying: float
    verdict: str

    def steps(self, measured: float) -> Iterator[tuple[float, bool, str, str, float]]:
        """Every plan on every link, as operators and workers are told: bandwidth, whether that is the ``measured`` one,
        name, spec, seconds."""
        for row in self.rows:
            for plan in row.plans:
                yield row.bandwidth, row.bandwidth == measured, plan.name, plan.spec, plan.seconds

    @property
    def pays_below(self) -> float | None:
        """``stops_paying``; None where that is beyond every link."""
        return self.stops_paying if self.stops_paying < MOST else None


def advise(
    profile: Profile, bandwidths: Sequence[float] = (), quality: str = "balanced", now: Wish | None = None
) -> Advice:
    """Expected steps on the profile's own link (first) and on links of these bandwidths, bytes a second; each once.

    now: the job's wish, whose buckets and excluded tensors every plan has, with the rules in force and what a step
    under them takes, from which it is learned what lanes and network cost the workers (`auto_informed.py`); on other
    links they cost as much for each second. Raises ProfileError for a profile or bandwidth that cannot be used,
    AutoError for another quality.
    """
    if not all(map(is_bandwidth, bandwidths)):
        raise ProfileError(f"bandwidths: expected {BANDWIDTH_FORM}, got {list(bandwidths)}")
    compute, link = profile.compute, profile.link.bandwidth
    profile = informed(profile, now) if now is not None else profile
    # What steps say of an exchange slower than the link is measured holds on every link.
    share = profile.link.bandwidth / link
    # What families took, they took on the link of now and under its plan.
    wish = replace(now or Wish(), quality=quality, family="", rules=(), step=0.0, took={}, kept={})
    rows = tuple(_row(_on(profile, b * share), wish, b) for b in dict.fromkeys((link, *bandwidths)))
    stops = _stops_paying(profile, wish, share)
    # Found without levels, which may be what makes a plan worth it, or not: the row has the last word.
    stops = max(stops, link) if rows[0].pays else min(stops, link)
    verdict = rows[0].verdict
    if stops <= 0:
        verdict += "; it would not pay on any link"
    elif stops < MOST:
        verdict += f"; compression stops paying above about {say_rate(stops)}"
    return Advice(compute, rows, stops, verdict)


def profile_of(
    shapes: Mapping[str, Sequence[int]],
    compute: float,
    link: LinkCost,
    nodes: int,
    codecs: Mapping[str, CodecCost],
    *,
    whole: bool = False,
    partition_bytes: int = 8 << 20,
    min_compress_bytes: int = 64 << 10,
) -> Profile:
    """A profile of a model that does not run yet: ``shapes`` by name in the order of the forward pass, float32.

    ``compute``: seconds of a step without exchange; a third is taken for the forward pass, and of the rest each
    gradient takes its share of elements. Of its optimizer nothing is known. whole: as in
    `gcclient.state(whole=True)`. Raises ProfileError.
    """
    if not shapes or compute < 0 or nodes < 1:
        raise ProfileError(f"expected shapes, compute from 0 on and a node, got {len(shapes)}, {compute}, {nodes}")
    total = max(sum(math.prod(shape) for shape in shapes.values()), 1)
    tensors: list[ProfiledTensor] = []
    ready, address = 0.0, 0
    for name, shape in reversed(list(shapes.items())):
        n = math.prod(shape)
        # the first gradient of a step is ready at 0: what it takes belongs to the time before
        ready += 2 / 3 * compute * n / total if tensors else 0.0
        tensors.append(ProfiledTensor(name, tuple(shape), n, DType.F32.label, ready, address))
        address += n
    profile = Profile(
        "model", "model", nodes, 1, 1, compute - ready, tuple(tensors), link, partition_bytes, min_compress_bytes,
        codecs=dict(codecs), whole=whole,
    )  # fmt: skip
    blocks, address = [], 0
    for n, owner, lane in placed(profile, [[i for i, t in enumerate(tensors) if t.elements]]):
        blocks.append((address, n, owner, lane))
        address += n
    return replace(profile, blocks=tuple(blocks))


def _on(profile: Profile, bandwidth: float) -> Profile:
    link = replace(profile.link, bandwidth=bandwidth)
    return replace(profile, link=link)


def _row(profile: Profile, wish: Wish, bandwidth: float) -> AdviceRow:
    plans = []
    chosen: Proposal | None = None
    for name in (DENSE, CASTS[0], *QUALITIES):
        if name in QUALITIES:
            found = compose(profile, replace(wish, quality=name, parts=frozenset({"lgreco", "espresso"})))
            chosen = found if name == wish.quality else chosen
        elif name in profile.codecs or name == DENSE:
            found = compose(profile, replace(wish, parts=frozenset({"espresso"}), family=name))
        else:
            continue
        plans.append(AdvicePlan(name, found.family, found.expected))
    best = chosen or compose(profile, wish)
    pays, why = worth(best.dense, best)
    use = f"use {best.family}: {why}" if pays else f"don't: {why}"
    return AdviceRow(bandwidth, tuple(plans), pays, f"at {say_rate(bandwidth)} {use}")


def _stops_paying(profile: Profile, wish: Wish, share: float) -> float:
    """The bandwidth above which nothing of a quality is worth it, found by halving on a logarithmic scale; share: of
    it, what an exchange gets."""
    wish = replace(wish, parts=frozenset({"espresso"}))

    def pays(bandwidth: float) -> bool:
        found = compose(_on(profile, bandwidth * share), wish)
        return worth(found.dense, found)[0]

    low, high = math.log(LEAST), math.log(MOST)
    if not pays(LEAST):
        return 0.0
    if pays(MOST):
        return MOST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(math.exp(middle)) else (low, middle)
    return math.exp(low)
