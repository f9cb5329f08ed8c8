"""What every option costs on a cluster: tasks become jobs on resources, with a price for any tensor (Espresso, 4.3).

What may live here: following a tensor through an option, and pricing. What may not: the grammar, the timeline.

While a tensor goes through an option, three things are known of it: the share of it that one active rank's buffer
covers, how many ranks of a node are active, and how many compressed copies of that share are stacked. Compressed
payloads cannot be added up: a first step that is followed by no decompression hands all it received to the next one
(footnote 2 of the paper), and decompression has to take in every copy. The ranks of a node share its network card and
its cores. A flat collective runs at the speed of the slower link and occupies that one only.

Successive tasks on one resource are one job, and what takes no time is none, so that an option is a chain of jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gcserver.planner import options_kernels as kernels
from gcserver.planner.costs import Cluster, CodecCosts, CostError, Link, RisingCurve, shape
from gcserver.planner.options import ANY, Action, Constraints, Device, Level, Option, Routine, Task, options

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GPU, CPU, INTRA, INTER = range(4)
RESOURCES = ("gpu", "cpu", "intra", "inter")


@dataclass(frozen=True, slots=True)
class Cost:
    """One task of a tensor of n elements; shares are of n.

    ``latency + dense * n + wire * payload(share * n)`` seconds, or a curve's at ``share * n`` elements, and for
    decompression that of ``decode_add`` at ``further * n`` more.
    """

    resource: int
    latency: float = 0.0
    dense: float = 0.0
    wire: float = 0.0
    share: float = 1.0
    curve: int = -1
    further: float = 0.0

    @property
    def row(self) -> tuple[float, ...]:
        return (self.latency, self.dense, self.wire, self.share, float(self.curve), self.further)


class _Walk:
    """A tensor on its way through an option: share a buffer covers, ranks active on a node, stacked copies."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.share, self.active, self.copies = 1.0, cluster.ranks, 1

    def task(self, task: Task) -> Cost:
        """What ``task`` costs here; afterwards this is the state behind it."""
        if task.device is not None:
            return self._compute(task.action is Action.COMP, task.device)
        return self._collective(task)

    def _compute(self, encode: bool, device: Device) -> Cost:
        # All active ranks of a node use the same cores, while each has an accelerator of its own.
        share = self.share * (self.active if device is Device.CPU else 1)
        further = 0.0 if encode else share * (self.copies - 1)
        self.copies = 1
        return Cost(int(device), share=share, curve=int(device) * 3 + (not encode), further=further)

    def _collective(self, task: Task) -> Cost:
        assert task.routine is not None
        assert task.level is not None
        ranks, link, resource, at_once = self._where(task.routine, task.level)
        steps, volume = shape(task.routine, ranks)
        per_byte = volume * at_once / link.bandwidth
        dense, wire = (0.0, self.copies * per_byte) if task.compressed else (4.0 * self.share * per_byte, 0.0)
        cost = Cost(resource, steps * link.latency, dense, wire, self.share)
        self._after(task, ranks)
        return cost

    def _where(self, routine: Routine, level: Level) -> tuple[int, Link, int, float]:
        """(ranks, link, resource, how many ranks' transfers pass the link at once)."""
        c = self.cluster
        if level is Level.INTRA:
            return c.ranks, c.intra, INTRA, 1.0
        if level is Level.INTER:
            return c.nodes, c.inter, INTER, float(self.active)
        ranks = c.nodes * c.ranks
        if c.nodes == 1:
            return ranks, c.intra, INTRA, 1.0
        # A ring passes each card once. In an all-to-all, all ranks of a node send to those of all other nodes.
        apart = c.ranks * (ranks - c.ranks) / (ranks - 1) if routine is Routine.ALLTOALL else 1.0
        if c.ranks > 1 and c.intra.bandwidth * apart < c.inter.bandwidth:
            return ranks, Link(max(c.intra.latency, c.inter.latency), c.intra.bandwidth), INTRA, 1.0
        return ranks, c.inter, INTER, apart

    def _after(self, task: Task, ranks: int) -> None:
        routine = task.routine
        if routine in (Routine.REDUCE_SCATTER, Routine.ALLTOALL):
            self.share /= ranks
        if routine is Routine.ALLGATHER and task.action is not Action.COMM_C:
            self.share *= ranks
        elif task.action in (Action.COMM_C, Action.COMM1_C):
            self.copies *= ranks
        if task.level is not Level.INTER:
            root = routine in (Routine.REDUCE, Routine.GATHER)
            self.active = 1 if root else self.cluster.ranks


def walk(option: Option, cluster: Cluster) -> list[Cost]:
    """The cost of each task of ``option`` on ``cluster``, in its order."""
    state = _Walk(cluster)
    return [state.task(task) for task in option.tasks]


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Chains of jobs for S sizes and O options: ``count`` [S, O], ``resource`` and ``seconds`` [S, O, 12].

    ``work`` [S, O, 7]: seconds on each of the resources, of the whole chain with nothing to wait for, and of its parts
    before the first and after the last use of the inter link.
    """

    sizes: Floats
    count: Ints
    resource: Ints
    seconds: Floats
    work: Floats


@dataclass(frozen=True, slots=True, eq=False)
class OptionTable:
    """Options with their costs on a cluster for a codec, ready to be priced for any size."""

    cluster: Cluster
    codec: CodecCosts
    options: tuple[Option, ...]
    tasks: Ints  # [O]
    resource: Ints  # [O, 12]
    terms: Floats  # [O, 12, 6]

    def price(self, sizes: Iterable[float]) -> Prices:
        """Every option for tensors of these many elements."""
        ns = np.array(list(sizes), np.float64)
        codec = self.codec
        wire = np.array([codec.per_element, codec.minimum, codec.header])
        count, resource, seconds = kernels.price(ns, self.tasks, self.resource, self.terms, wire, _knots(codec))
        return Prices(ns, count, resource, seconds, kernels.work(count, resource, seconds))

    def select(self, columns: Sequence[int] | Ints) -> OptionTable:
        """Only these options, in this order."""
        at = np.asarray(columns, np.int64)
        kept = tuple(self.options[i] for i in at)
        return OptionTable(self.cluster, self.codec, kept, self.tasks[at], self.resource[at], self.terms[at])

    def index(self, option: Option) -> int:
        """Where ``option`` is; :class:`CostError` if it is not here."""
        try:
            return self.options.index(option)
        except ValueError as error:
            raise CostError(f"{option} is not among the {len(self.options)} options of this table") from error


def compile_table(cluster: Cluster, codec: CodecCosts, chosen: Sequence[Option]) -> OptionTable:
    """Follow every option through ``cluster``. Raises :class:`CostError` where the codec lacks a device's figures."""
    for device in {d for o in chosen for d in o.devices}:
        codec.on(device)
    tasks = np.zeros(len(chosen), np.int64)
    resource = np.zeros((len(chosen), kernels.JOBS), np.int64)
    terms = np.zeros((len(chosen), kernels.JOBS, 6))
    for i, option in enumerate(chosen):
        for k, cost in enumerate(walk(option, cluster)):
            resource[i, k], terms[i, k] = cost.resource, cost.row
            tasks[i] = k + 1
    return OptionTable(cluster, codec, tuple(chosen), tasks, resource, terms)


@lru_cache(maxsize=64)
def table(cluster: Cluster, codec: CodecCosts, constraints: Constraints = ANY) -> OptionTable:
    """The options worth considering on ``cluster``: the tree without what others beat at every size.

    An option goes if another one's chain of jobs is contained in its own, job by job on the same resources and never
    longer, for every size of tensor: costs are linear between the sizes at which a curve bends, so comparing them
    there and beyond the last decides. Options of equal costs leave their first.
    """
    allowed = Constraints(
        constraints.max_compressions,
        constraints.gpu and cluster.gpu and codec.gpu is not None,
        constraints.cpu and codec.cpu is not None,
        constraints.flat,
    )
    everything = compile_table(cluster, codec, options(allowed))
    prices = everything.price(_bends(everything))
    kept = kernels.undominated(prices.count, prices.resource, prices.seconds)
    return everything.select(np.flatnonzero(kept))


def _bends(table: OptionTable) -> Floats:
    """Sizes between which every cost of ``table`` is linear, two beyond the last."""
    codec = table.codec
    bends = {1.0}
    for costs, first in ((codec.gpu, 0), (codec.cpu, 3)):
        for offset, curve in enumerate((costs.encode, costs.decode, costs.decode_add) if costs else ()):
            used = table.terms[..., 4] == min(first + offset, first + 1)
            shares = table.terms[..., 5 if offset == 2 else 3][used]
            bends |= {x / s for x, _ in curve.points for s in np.unique(shares) if s > 0}
    if codec.per_element > 0:
        bends |= {codec.minimum / codec.per_element / s for s in np.unique(table.terms[..., 3]) if s > 0}
    inside = sorted(b for b in bends if b >= 1.0)
    return np.array([*inside, 2 * inside[-1], 4 * inside[-1]])


def _knots(codec: CodecCosts) -> Floats:
    """[6, points, 2]: encode, decode, decode_add of GPU and CPU; shorter curves continued in their last direction."""
    curves: list[RisingCurve | None] = []
    for costs in (codec.gpu, codec.cpu):
        curves += [costs.encode, costs.decode, costs.decode_add] if costs else [None] * 3
    longest = max(len(c.points) for c in curves if c) + 1 if any(curves) else 2
    knots = np.zeros((6, longest, 2))
    for row, curve in zip(knots, curves, strict=True):
        points: list[tuple[float, float]] = [*curve.points] if curve else [(0.0, 0.0)]
        while len(points) < longest:
            x = 2 * points[-1][0] + 1.0
            points.append((x, curve(x) if curve else 0.0))
        row[:] = points
    return knots
