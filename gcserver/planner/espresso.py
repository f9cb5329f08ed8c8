"""Espresso: which option every tensor of a model takes, so that an iteration is short (section 4.4, Algorithm 1).

What may live here: the search. What may not: the timeline, the baselines, Algorithm 2 (``offload``).

``select`` goes beyond the paper, whose greedy search may end above plans as simple as "compress everything from some
size on": after Algorithms 1 and 2 it also looks at those uniform plans (among them what HiTopKComm, HiPress and
BytePS-Compress do) and takes the tensors up again, starting from the best and with all 4341 options, mixed devices
included, until nothing improves or its effort is spent. The result is the best of all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gcserver.planner import options_kernels
from gcserver.planner import timeline_kernels as kernels
from gcserver.planner.costs import Cluster, CodecCosts
from gcserver.planner.offload import offload_to_cpu
from gcserver.planner.options import Constraints, Device, Option
from gcserver.planner.options_cost import Floats, Ints, OptionTable, compile_table, table
from gcserver.planner.timeline import Training
from gcserver.planner.trace import Trace

Flags = npt.NDArray[np.bool_]
#: Options that do not save more than this share of work on any resource are left out of the search.
SLACK = 0.02
#: Timelines per tensor that the improvement of a plan may compute.
EFFORT = 20
#: Up to so many tensors, pairs of them are improved too.
FEW = 8
#: A plan this close to what no plan can beat, as a share, is not improved.
ENOUGH = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """What is prepared once for a cluster and a codec: ``everything`` that no option beats, ``table`` to search.

    [O] for the columns of ``table``: ``compresses``; ``main``: only on the device that Algorithm 1 uses, the GPU if
    there is one; ``to_cpu``: the column of the same steps on the CPU, or -1.
    """

    everything: OptionTable
    table: OptionTable
    compresses: Flags
    main: Flags
    to_cpu: Ints


@lru_cache(maxsize=64)
def prepare(cluster: Cluster, codec: CodecCosts, constraints: Constraints = Constraints()) -> Space:
    """The options to search on ``cluster`` with ``codec``. Raises CostError as ``options_cost.table`` does.

    Of the options that are not beaten exactly, those stay that for tensors of some power of two save work on some
    resource; their versions on the CPU alone join them. This second selection is a heuristic.
    """
    everything = table(cluster, codec, constraints)
    device = Device.GPU if any(Device.GPU in o.devices for o in everything.options) else Device.CPU
    totals = everything.price(2.0 ** np.arange(31)).work
    found: list[Option] = []
    for allowed in ({Device.GPU}, {Device.CPU}, {Device.GPU, Device.CPU}):
        flags = np.array([o.devices <= allowed for o in everything.options])
        length, columns = options_kernels.shortlist(totals, flags, SLACK)
        used = sorted({int(c) for row, k in zip(columns, length, strict=True) for c in row[:k]})
        found += [everything.options[c] for c in used]
    if codec.cpu is not None and constraints.cpu:
        found += [o.on(Device.CPU) for o in found if o.devices == {Device.GPU}]
    known = list(dict.fromkeys(found))
    at = {o: i for i, o in enumerate(known)}
    to_cpu = [at.get(o.on(Device.CPU), -1) if o.devices else -1 for o in known]
    return Space(
        everything,
        compile_table(cluster, codec, known),
        np.array([o.compressions > 0 for o in known]),
        np.array([o.devices <= {device} for o in known]),
        np.array(to_cpu, np.int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Strategy:
    """A decision: the option of every tensor, and its predicted iteration.

    ``steps``: seconds after each part of the search, ``timelines``: how many it looked at.
    """

    options: tuple[Option, ...]
    plan: Ints
    seconds: float
    steps: dict[str, float]
    timelines: int


def uncompressed(training: Training, compresses: Flags) -> Ints:
    """Plan of no compression: every tensor takes the dense scheme that is quickest for it alone."""
    dense = np.flatnonzero(~compresses)
    quickest = dense[training.prices.work[:, dense, 4].argmin(axis=1)]
    return quickest[training.size_of].astype(np.int64)


def priority(training: Training) -> Ints:
    """Algorithm 1's order: larger tensors first, among equals the one that is ready last."""
    n = len(training.elements)
    return np.lexsort((-np.arange(n), -training.elements)).astype(np.int64)


def candidates(training: Training, allowed: Flags, slack: float = SLACK) -> tuple[Ints, Ints]:
    """(length [S], columns [S, O]) of the options worth trying for each size of the trace."""
    return options_kernels.shortlist(training.prices.work, allowed, slack)  # type: ignore[no-any-return]


def algorithm1(training: Training, compresses: Flags, allowed: Flags, plan: Ints) -> tuple[Ints, float, int]:
    """Algorithm 1 with the options ``allowed`` [O], from ``plan``: (plan, seconds without forward, timelines)."""
    plan = plan.copy()
    length, columns = candidates(training, allowed)
    end, tried = kernels.greedy(
        priority(training), True, 1, 1 << 62, length, columns, compresses, training.arrays, training.priced, plan
    )
    return plan, float(end), int(tried)


def improve(training: Training, allowed: Flags, plan: Ints, budget: int) -> tuple[Ints, float, int]:
    """Take up all tensors again, and then pairs of them, as long as that helps and ``budget`` timelines last.

    Pairs get out of plans that no change of one tensor improves. They take part where tensors are few, which is where
    there is little else to balance a bad decision; they are
    given 64 times the budget then, since timelines are short.
    """
    plan = plan.copy()
    length, columns = candidates(training, allowed)
    none, order = np.zeros(len(allowed), np.bool_), priority(training)
    few = len(plan) <= FEW
    budget *= 1 + 63 * few
    tried, end, before = 0, 0.0, np.inf
    while tried < budget:
        left = budget - tried
        end, one = kernels.greedy(
            order, False, 1 << 30, left, length, columns, none, training.arrays, training.priced, plan
        )
        tried += int(one)
        if not few or tried >= budget or not end < before * (1 - kernels.GAIN):
            break
        end, two = kernels.pairs(order, budget - tried, length, columns, training.arrays, training.priced, plan)
        tried += int(two)
        before = end
    return plan, float(end), tried


def select(trace: Trace, space: Space, effort: int = EFFORT, plans: Sequence[Sequence[Option]] = ()) -> Strategy:
    """The best strategy found for ``trace``; ``plans``: further ones to start from, an option for every tensor.

    ``effort``: timelines a tensor may cost in each of the two improvements. Raises CostError if one of ``plans`` uses
    an option that is not in ``space.table``.
    """
    training = Training(trace, space.table)
    start = uncompressed(training, space.compresses)
    greedy, end, tried = algorithm1(training, space.compresses, space.main, start)
    offloaded = offload_to_cpu(training, space.to_cpu, greedy)
    tried += offloaded.timelines
    steps = {"uncompressed": training.time(start), "algorithm 1": end, "algorithm 2": offloaded.seconds}
    found = [(offloaded.seconds, offloaded.plan)]

    everything = np.ones(len(space.compresses), np.bool_)
    length, columns = candidates(training, everything, slack=5 * SLACK)
    uniform = start.copy()
    if len(length):
        largest = columns[-1, : length[-1]]
        end, more = kernels.uniform(largest, np.inf, training.arrays, training.priced, uniform)
        found.append((float(end), uniform))
        tried += int(more)
        steps["uniform"] = float(end)
    for options in plans:
        plan = np.array([space.table.index(o) for o in options], np.int64)
        found.append((training.time(plan) - trace.forward, plan))
    found.sort(key=lambda f: f[0])
    # Nothing can end before a gradient is ready and has gone through its shortest chain.
    ready = np.cumsum(training.gaps)
    floor = float((ready + training.prices.work[:, :, 4].min(axis=1)[training.size_of]).max(initial=0.0))
    for _, plan in found[:2]:
        if min(f[0] for f in found) > floor * (1 + ENOUGH):
            improved, end, more = improve(training, everything, plan, effort * len(plan))
            found.append((end, improved))
            tried += more
    best, plan = min(found, key=lambda f: f[0])
    steps["improved"] = best
    steps = {name: seconds + trace.forward * (name != "uncompressed") for name, seconds in steps.items()}
    chosen = tuple(space.table.options[c] for c in plan.tolist())
    return Strategy(chosen, plan, steps["improved"], steps, tried)
