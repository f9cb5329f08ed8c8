"""MergeComp on a running job: which tensors the worker brings together.

What may live here: the affine costs of a profile under one codec, the cut, whether it is worth having. What may not:
the search (`mergecomp.py`), what a group's blocks use (`auto_options.py`).

Blocks stay where they are, whatever the groups: a group is what the worker copies and launches at once, a bucket of
DDP's, and a block travels when the last group that reaches into it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gcserver.planner.families import TWO_EXCHANGES, parse
from gcserver.planner.fit import AffineCost, fit_affine
from gcserver.planner.live import BlockOption, Live, cost_of
from gcserver.planner.live_layout import Portions, dtype_of
from gcserver.planner.mergecomp import MergeModel, merge
from gcserver.planner.mergecomp_groups import ddp_bucket_caps

#: What groups have to gain, as a share of the step, to replace what the worker does now.
GAIN: Final = 1e-3
#: Of more tensors than this, neighbours in order of readiness stay together: the search takes the square of their
#: number, and where exactly one of thousands is cut makes no difference.
RUNS: Final = 1000
#: Sizes at which a codec's curves are taken for the fit, elements.
_SIZES: Final = tuple(1 << bits for bits in range(14, 27, 2))


@dataclass(frozen=True, slots=True)
class Groups:
    """``portions``: tensors by index, in the order of readiness. ``caps``: DDP's buckets for them, MiB. ``seconds``:
    of a step with them. ``changed``: whether they are other portions than the worker's present ones."""

    portions: Portions
    caps: tuple[float, ...]
    seconds: float
    changed: bool
    reason: str


def costs(live: Live, spec: str) -> tuple[AffineCost, AffineCost]:
    """(encoding and decoding, exchanging) of so many elements over the owner, affine (MergeComp, Assumption 5)."""
    profile, cost = live.profile, cost_of(live.profile, spec)
    members, share = profile.nodes, (profile.nodes - 1) / profile.nodes
    double = parse(spec).name in TWO_EXCHANGES
    exchanges = 2 if double else 1
    # The owner of a block encodes the aggregate as well, unless sums travel as they are.
    encodings = 1.0 if double else 1 + 1 / members
    lanes = [
        profile.round_seconds * (1 + exchanges) / 2
        + profile.busy * (cost.encode(n) * encodings + cost.decode_add(n) * share + cost.decode(n))
        + 1e-9  # a fit takes no zeros
        for n in _SIZES
    ]
    total = sum(live.settled(b, BlockOption(spec)).nbytes for b in range(len(live.blocks)))
    a_byte = 2 * share / profile.link.bandwidth
    return (
        fit_affine([float(n) for n in _SIZES], lanes).cost,
        AffineCost(2 * exchanges * profile.link.latency, a_byte * total / max(profile.elements, 1)),
    )


def regroup(live: Live, spec: str, options: Sequence[BlockOption]) -> Groups:
    """MergeComp's cut for a job that uses ``spec``, if a step with ``options`` is shorter for it; else what is now."""
    profile, now = live.profile, live.seconds(options)
    order = [i for i, t in enumerate(profile.tensors) if t.elements]
    if not order:
        return Groups(live.brought, (), now, False, "no tensor has an element")
    runs = _runs(order)
    before = 0.0
    ready = [before := max(before, *(profile.tensors[i].ready for i in run)) for run in runs]
    encode, exchange = costs(live, spec)
    sizes = tuple(sum(profile.tensors[i].elements for i in run) for run in runs)
    merged = merge(MergeModel(sizes, tuple(ready), encode, exchange, own_cores=True))
    cut = tuple(tuple(i for run in group for i in runs[run]) for group in merged.grouping)
    seconds = Live(profile, cut).seconds(options)
    if seconds < now * (1 - GAIN):
        nbytes = [sum(profile.tensors[i].elements * dtype_of(profile.tensors[i]).itemsize for i in run) for run in runs]
        caps = tuple(ddp_bucket_caps(merged.grouping, nbytes))
        return Groups(
            cut,
            caps,
            seconds,
            True,
            f"{len(cut)} groups, declared anew, would take {1 - seconds / now:.1%} off the step",
        )
    reason = f"{len(cut)} groups would not shorten the step"
    return Groups(live.brought, (), now, False, reason)


def _runs(order: Sequence[int]) -> list[Sequence[int]]:
    """At most `RUNS` runs of neighbours, equally long as far as they can be."""
    count = min(len(order), RUNS)
    bounds = [len(order) * i // count for i in range(count + 1)]
    return [order[lo:hi] for lo, hi in pairwise(bounds)]
