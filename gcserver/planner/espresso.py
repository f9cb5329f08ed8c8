"""Espresso: which option every tensor of a model takes, so that an iteration is short (section 4.4, Algorithm 1).

What may live here: the search. What may not: the timeline, the baselines, Algorithm 2 (``offload``).

``select`` goes beyond the paper, whose greedy search may end above plans as simple as "compress everything from some
size on". After Algorithms 1 and 2 from no compression it runs them again on parts of the tree (every tensor
compressed, only one scheme, only the CPU) and looks at those uniform plans, which is what HiTopKComm and
BytePS-Compress are, and at the one in which every tensor takes what is quickest for it alone. Those that are nearly as
good as the best, plans that a caller adds among them, and for many tensors a plan that keeps every resource busy
(`espresso_mix`) are improved for a while and the best for longer: tensors are taken up again, with every option of the
tree that is worth trying (`candidates`), mixed devices included, until nothing changes or the effort is spent. The
result is the best plan seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gcserver.planner import espresso_kernels as kernels
from gcserver.planner import options_kernels
from gcserver.planner.costs import Cluster, CodecCosts
from gcserver.planner.espresso_mix import mixed
from gcserver.planner.offload import offload_to_cpu
from gcserver.planner.options import ANY, Constraints, Device, Option, options
from gcserver.planner.options_cost import Ints, OptionTable, compile_table, table
from gcserver.planner.options_schemes import ALLTOALL_ALLTOALL, INTER_ALLGATHER, scheme
from gcserver.planner.timeline import Training
from gcserver.planner.trace import Trace

Flags = npt.NDArray[np.bool_]
#: Options that do not save more than this share of work on any resource are left out of the search. Of few tensors,
#: each of which may be most of the iteration, only those that save nothing are where a plan is improved.
SLACK = 0.1
#: Timelines per tensor that the improvement of a plan may compute.
EFFORT = 12
#: Up to so many tensors are few: pairs of them are improved too.
FEW = 8
#: Of more tensors, starts this many times as long as the best are not improved.
CLOSE = 1.2
#: From so many tensors on, a plan of mixed options is a start as well, however long.
MANY = 64
#: From so many on, where each timeline takes long, starts this many times as long as the best are neither improved nor
#: offloaded to the CPU.
HUGE = 256
CLOSE_OF_HUGE = 1.05
#: A plan this close to what no plan can beat, as a share, is not improved.
ENOUGH = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """What is prepared once for a cluster and a codec: ``everything`` that no option beats, ``table`` to search.

    [O] for the columns of ``table``: ``compresses``; ``plain``: compressed once, for the inter link alone, by
    all-gather; ``both``: for both links, by all-to-all; ``main``: only on the device that Algorithm 1 uses, the GPU if
    there is one; ``cpu``: on the CPU though that is not it; ``to_cpu``: the column of the same steps on the CPU, or -1.
    """

    everything: OptionTable
    table: OptionTable
    compresses: Flags
    plain: Flags
    both: Flags
    main: Flags
    cpu: Flags
    to_cpu: Ints


@lru_cache(maxsize=64)
def prepare(cluster: Cluster, codec: CodecCosts, constraints: Constraints = ANY) -> Space:
    """The options to search on ``cluster`` with ``codec``. Raises CostError as ``options_cost.table`` does.

    Of the options that are not beaten exactly, those stay that for tensors of some power of two save work on some
    resource; their versions on the CPU alone and all dense options join them. This second selection is a heuristic.
    """
    everything = table(cluster, codec, constraints)
    device = Device.GPU if any(Device.GPU in o.devices for o in everything.options) else Device.CPU
    totals = everything.price(2.0 ** np.arange(31)).work
    order = options_kernels.by_chain(totals)
    found = list(options(Constraints(gpu=False, cpu=False, flat=constraints.flat)))
    for allowed in ({Device.GPU}, {Device.CPU}, {Device.GPU, Device.CPU}):
        flags = np.array([o.devices <= allowed for o in everything.options])
        length, columns = options_kernels.shortlist(totals, order, flags, SLACK)
        used = sorted({int(c) for row, k in zip(columns, length, strict=True) for c in row[:k]})
        found += [everything.options[c] for c in used]
    plain = scheme(INTER_ALLGATHER, device)
    both = [scheme(text, device) for text in ALLTOALL_ALLTOALL]
    if device in {d for o in found for d in o.devices}:
        found += [o for o in (plain, *both) if constraints.allow(o)]
    if codec.cpu is not None and constraints.cpu:
        found += [o.on(Device.CPU) for o in found if o.devices == {Device.GPU}]
    known = list(dict.fromkeys(found))
    at = {o: i for i, o in enumerate(known)}
    to_cpu = [at.get(o.on(Device.CPU), -1) if o.devices else -1 for o in known]
    return Space(
        everything,
        compile_table(cluster, codec, known),
        np.array([o.compressions > 0 for o in known]),
        np.array([o == plain for o in known]),
        np.array([o in both for o in known]),
        np.array([o.devices <= {device} for o in known]),
        np.array([o.devices == {Device.CPU} and device is Device.GPU for o in known]),
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


def quickest(training: Training, allowed: Flags) -> Ints:
    """The plan in which every tensor takes, of the options ``allowed`` [O], the one that is quickest for it alone."""
    columns = np.flatnonzero(allowed)
    best: Ints = columns[training.prices.work[:, columns, 4].argmin(axis=1)][training.size_of].astype(np.int64)
    return best


def priority(training: Training) -> Ints:
    """Algorithm 1's order: larger tensors first, among equals the one that is ready last."""
    n = len(training.elements)
    return np.lexsort((-np.arange(n), -training.elements)).astype(np.int64)


def candidates(training: Training, allowed: Flags, slack: float = SLACK) -> tuple[Ints, Ints]:
    """(length [S], columns [S, O]) of the options worth trying for each size of the trace."""
    return options_kernels.shortlist(training.prices.work, training.by_chain, allowed, slack)  # type: ignore[no-any-return]


def algorithm1(training: Training, compresses: Flags, allowed: Flags, plan: Ints) -> tuple[Ints, float, int]:
    """Algorithm 1 with the options ``allowed`` [O], from ``plan``: (plan, seconds without forward, timelines)."""
    plan = plan.copy()
    length, columns = candidates(training, allowed)
    end, tried = kernels.greedy(
        priority(training), True, 1, 1 << 62, length, columns, compresses, training.arrays, training.priced, plan
    )
    return plan, float(end), int(tried)


def improve(training: Training, length: Ints, columns: Ints, plan: Ints, budget: int) -> tuple[float, Ints, int, bool]:
    """Take up all tensors again, and then pairs of them, as long as that helps and ``budget`` timelines last.

    Pairs get out of plans that no change of one tensor improves. They take part where tensors are few, which is where
    there is little else to balance a bad decision; they are given 64 times the budget then, since timelines are short.
    Returns (seconds without forward, infinite without any budget; plan; timelines; whether there was budget left).
    """
    plan = plan.copy()
    order = priority(training)
    few = len(plan) <= FEW
    budget *= 1 + 63 * few
    none = np.zeros(training.prices.count.shape[1], np.bool_)
    given = training.arrays, training.priced, plan
    tried, end, before = 0, np.inf, np.inf
    while tried < budget:
        end, one = kernels.greedy(order, False, 1 << 30, budget - tried, length, columns, none, *given)
        tried += int(one)
        if not few or tried >= budget or not end < before * (1 - kernels.GAIN):
            break
        end, two = kernels.pairs(order, budget - tried, length, columns, *given)
        tried += int(two)
        before = end
    return float(end), plan, tried, tried < budget


def select(trace: Trace, space: Space, effort: int = EFFORT, plans: Sequence[Sequence[Option]] = ()) -> Strategy:
    """The best strategy found for ``trace``; ``plans``: further ones to start from, an option for every tensor.

    ``effort``: timelines per tensor that improving the best plan may take; each other start gets a quarter of that
    first. Raises CostError if one of ``plans`` uses an option that is not in ``space.table``.
    """
    training = Training(trace, space.table)
    dense = quickest(training, ~space.compresses)
    steps = {"uncompressed": training.time(dense) - trace.forward}
    found: list[tuple[float, Ints]] = []
    tried, huge = 0, len(training.elements) >= HUGE
    for name, allowed, start in _searches(training, space, dense):
        plan, end, more = algorithm1(training, space.compresses, allowed, start)
        if not found:
            steps["algorithm 1"] = end
        tried += more
        if not (huge and found) or end <= CLOSE_OF_HUGE * min(seconds for seconds, _ in found):
            moved = offload_to_cpu(training, space.to_cpu, plan)
            end, plan = moved.seconds, moved.plan
            tried += moved.timelines
        steps[name] = end
        found.append((end, plan))
    everything = np.ones(len(space.compresses), np.bool_)
    myopic = quickest(training, everything)
    steps["myopic"] = training.time(myopic) - trace.forward
    found.append((steps["myopic"], myopic))
    for given in plans:
        plan = np.array([space.table.index(o) for o in given], np.int64)
        found.append((training.time(plan) - trace.forward, plan))

    slack = 0.0 if len(training.elements) <= FEW else SLACK
    length, columns = candidates(training, everything, slack)
    if len(length):
        plan = dense.copy()
        end, more = kernels.uniform(columns[-1, : length[-1]], np.inf, training.arrays, training.priced, plan)
        steps["uniform"] = float(end)
        found.append((float(end), plan))
        tried += int(more)

    # Nothing can end before a gradient is ready and has gone through its shortest chain.
    least = training.prices.work[:, :, 4].min(axis=1)[training.size_of]
    enough = float((np.cumsum(training.gaps) + least).max(initial=0.0)) * (1 + ENOUGH)
    found.sort(key=lambda f: f[0])
    best, plan = found[0]
    final = False
    far = best * (CLOSE_OF_HUGE if huge else CLOSE)
    close = [p for end, p in found if len(p) <= FEW or end <= far]
    if len(training.elements) >= MANY:
        close.append(mixed(training, length, columns))
    for start in {p.tobytes(): p for p in close}.values():
        if best > enough:
            end, improved, more, complete = improve(training, length, columns, start, effort // 4 * len(start))
            tried += more
            if end < best:
                best, plan, final = end, improved, complete
    if best > enough and not final:
        end, improved, more, _ = improve(training, length, columns, plan, effort * len(plan))
        tried += more
        if end < best:
            best, plan = end, improved
    steps["improved"] = best
    steps = {name: seconds + trace.forward for name, seconds in steps.items()}
    chosen = tuple(space.table.options[c] for c in plan.tolist())
    return Strategy(chosen, plan, steps["improved"], steps, tried)


def _searches(training: Training, space: Space, dense: Ints) -> Iterator[tuple[str, Flags, Ints]]:
    """(name, options allowed, start) of every run of Algorithms 1 and 2; the first is the paper's."""
    yield "algorithm 2", space.main, dense
    compressing = space.main & space.compresses
    if not compressing.any():
        return
    yield "all compressed", compressing, quickest(training, compressing)
    yield "inter all-gather", space.plain | ~space.compresses, dense
    yield "both links", space.both | ~space.compresses, dense
    if space.cpu.any():
        yield "cpu only", space.cpu | ~space.compresses, dense
