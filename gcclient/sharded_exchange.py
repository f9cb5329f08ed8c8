"""A wrapped optimizer's step in shards: within the node first, then each rank's part through the daemon.

What may live here: what a gradient goes through between its rank's backward pass and the node's collectives, in which
thread and order. What may not: the node's collectives (`node_group.py`), who has which shard (`hierarchy.py`), steps
without shards (`exchange.py`), when a step begins and ends (`averaging.py`).

The ranks of a node must call its collectives in one order, but gradients become ready in another order on each rank,
and ranks need not use the same parameters. So parameters are put together in bundles, once and alike on all ranks, in
the order of back-propagation; a bundle goes once all its gradients are there and the bundles before it went. What is
left goes with step(), zeros in place of what is missing.

What of a bundle this rank brought in full some rank uses, and its shard is pushed as soon as it is summed. What a rank
lacks waits for the end of the step: there the ranks of the node tell each other which parameters they used and whether
all was finite, and bring that to their own shard's step, whose average says the same of all nodes. As without shards,
what nobody used is not pushed and keeps its residual.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from gcclient import device
from gcclient.arena import BlockPlace
from gcclient.buckets import plan_of
from gcclient.errors import GradcommError, unanswered
from gcclient.gradients import Brought, check_unchanged, read_gradient
from gcclient.grouping import read_groups
from gcclient.hierarchy import Nodes, Shards
from gcclient.inorder import InOrder
from gcclient.node_group import Cut
from gcclient.parameters import Parameter
from gcclient.scope import Scope
from gcclient.session import SAY_EVERY, Session
from gcclient.sharded import failing, node_group
from gcclient.timing import Timing

#: A bundle is full with so many bytes of gradients: each costs some collectives, and waits for the last of its own.
FULL: Final = 4 << 20


def bundles_of(parameters: Iterable[Parameter], groups: object, named: Sequence[str]) -> list[list[Parameter]]:
    """Parameters that the node's ranks sum together, of one dtype each, in the order in which they become ready.

    ``groups``: as :func:`gcclient.state` takes them; none has parts of two bundles but for its dtypes. ``named``: all
    names in the order of the model.
    """
    known = {p.name: p for p in parameters}
    order = list(reversed(named))
    lists, full = read_groups(groups, order), math.inf
    if lists is None:
        lists, full = [order], FULL
    found: list[list[Parameter]] = []
    for names in lists:
        filling: dict[Any, list[Parameter]] = {}
        for name in names:
            together = filling.setdefault(known[name].dtype, [])
            together.append(known[name])
            if sum(p.tensor.nbytes for p in together) >= full:
                found.append(filling.pop(known[name].dtype))
        found += filling.values()
    return found


class Bundle:
    """Parameters whose gradients go together, and their memory on the way.

    ``whole``: their gradients one after the other, then averages; ``parts``: of it, each one's. ``shard``: this rank's
    of their sum, then of their average; ``pieces``: where it is exchanged.
    """

    def __init__(self, parameters: Sequence[Parameter], nodes: Nodes) -> None:
        sizes = [p.tensor.numel() for p in parameters]
        like = parameters[0].tensor.detach()
        self.parameters = tuple(parameters)
        self.whole = like.new_zeros(sum(sizes))
        self.parts = dict(zip(parameters, self.whole.split(sizes), strict=True))
        self.cut = Cut(sizes, self.whole, nodes)
        self.shard = self.cut.shard[: self.cut.starts[-1] if self.cut.starts else 0]
        self.memory = device.memory_of(self.shard)
        starts = [at * self.shard.element_size() for at in self.cut.starts[:-1]] or [0] * len(parameters)
        self.pieces = {p: plan_of([p], [at]).pieces for p, at in zip(parameters, starts, strict=True)}
        self.by_block = plan_of(parameters, starts).by_block
        self.begin()

    def begin(self) -> None:
        """Another step: nothing of it is there."""
        self.missing = set(self.parameters)
        #: blocks of the shard whose averages are not there
        self.left = len(self.by_block)
        self.arrived, self.over = threading.Event(), threading.Event()
        self.future = device.future_for(self.whole)
        if not self.left:
            self.arrived.set()

    def back(self, blocks: int = 1) -> None:
        """So many more of its blocks are over with."""
        self.left -= blocks
        if not self.left:
            self.arrived.set()


class ShardLayout:
    """What `exchange.Layout` is elsewhere, of a model that was declared in shards."""

    def __init__(
        self, session: Session, shards: Shards, nodes: Nodes, average: bool, groups: object, named: Sequence[str]
    ) -> None:
        """``groups``, ``named``: see :func:`bundles_of`. Raises what torch raises."""
        self.session = session
        self.average = average
        self.domain = shards.domain
        self.parameters = tuple(shards.parameters)
        self.note = shards.note
        # A sum over the nodes' sums is the sum over all.
        self.nodes = nodes if average else replace(nodes, weight=(1, 1))
        self.timing = Timing(self.domain.id, session)
        self.bundles = [Bundle(each, self.nodes) for each in bundles_of(self.parameters, groups, named)]
        self.bundle = {p: bundle for bundle in self.bundles for p in bundle.parameters}
        #: in an order that all ranks have alike, with a shard and without
        self.order = tuple(self.bundle)
        self.by_block: dict[BlockPlace, list[Bundle]] = {}
        for bundle in self.bundles:
            for place in bundle.by_block:
                self.by_block.setdefault(place, []).append(bundle)
        self.node = node_group(session, shards, self.nodes)
        self.summing = InOrder("gcclient-sums", failing(session))
        self.giving = InOrder("gcclient-averages", failing(session)) if self.node.overlap else self.summing

    def begin(self, scale: float) -> ShardExchange:
        """Begin a step; ``scale``: the loss scale of its gradients."""
        return ShardExchange(self, scale)


class ShardStep(Scope):
    """One step as far as this rank's shard goes. ``came``: called with each block whose result is there."""

    def __init__(self, layout: ShardLayout, scale: float, came: Callable[[BlockPlace], None]) -> None:
        super().__init__(layout.session, layout.domain, scale, layout.average)
        self._came = came

    def take(self, place: BlockPlace) -> None:
        self._came(place)


class ShardExchange:
    """What `exchange.Exchange` is elsewhere. ``skipped``: never."""

    skipped = False

    def __init__(self, layout: ShardLayout, scale: float) -> None:
        self.layout, self.session = layout, layout.session
        self.brought: dict[Parameter, Brought] = {}
        self.step = ShardStep(layout, scale, self._take) if layout.nodes.has_shard else None
        for bundle in layout.bundles:
            bundle.begin()
        self._went = 0
        self._later: list[Callable[[], None]] = []
        #: all of the step is pushed, and what some rank used is known
        self._closed = threading.Event()
        #: which parameters those are
        self._used: set[Parameter] = set()
        self._error: GradcommError | None = None
        #: blocks come back in one thread and are known not to be pushed in another
        self._lock = threading.Lock()
        self._said = threading.Event()
        self._left_to_say = len(layout.note.pieces) if layout.note is not None else 0
        #: of bundles that this rank did not bring in full; known to the thread that sums alone, as is all below
        self._held: list[Bundle] = []
        self._finite = True
        self._pushed = 0
        self.session.pending.add(self)

    # ------------------------------------------------------------------------------ in the backward pass
    def bring(self, parameter: Parameter) -> None:
        """Copy a parameter's gradient, and have what is complete with it summed.

        Raises ValueError for a gradient of another dtype or size than its parameter.
        """
        layout = self.layout
        brought = read_gradient(parameter)
        began = layout.timing.clock()
        self.brought[parameter] = brought
        bundle = layout.bundle[parameter]
        bundle.parts[parameter].copy_(brought.flat)
        bundle.missing.discard(parameter)
        while self._went < len(layout.bundles) and not layout.bundles[self._went].missing:
            self._send()
        layout.timing.copied(brought.flat.nbytes, began)
        if self._went == len(layout.bundles):
            self._end()

    def _send(self) -> None:
        """Have the next bundle summed, and its averages given out."""
        layout, bundle = self.layout, self.layout.bundles[self._went]
        self._went += 1
        for parameter in bundle.missing:
            bundle.parts[parameter].zero_()
        bundle.cut.pack(bundle.whole)
        layout.summing.put(partial(self._sum, bundle, layout.node.packed()))
        # Averages must not go beside sums where a library has one order for both.
        give_out = partial(self._give_out, bundle)
        if layout.node.overlap:
            layout.giving.put(give_out)
        else:
            self._later.append(give_out)

    def _end(self) -> None:
        """All bundles went."""
        self.layout.summing.put(self._close)
        for job in self._later:
            self.layout.giving.put(job)
        if self.step is not None:
            self.layout.timing.closed(self.step.step.number)

    # ------------------------------------------------------------------------------------ in other threads
    def _sum(self, bundle: Bundle, packed: Any) -> None:
        if self.session.failure is not None:
            return
        node = self.layout.node
        node.sum(bundle.cut, packed)
        if self.step is None:
            return
        if self._finite and self.layout.nodes.shards > 1:
            self._finite = node.is_finite(bundle.shard)
        if bundle.missing:
            self._held.append(bundle)
        else:
            self._push(self.step, bundle, bundle.parameters)

    def _push(self, step: ShardStep, bundle: Bundle, parameters: Iterable[Parameter]) -> None:
        pieces = [piece for parameter in parameters for piece in bundle.pieces[parameter]]
        step.fill(pieces, bundle.memory)
        step.step.flush()
        self._pushed += sum(piece.hi - piece.lo for piece in pieces)

    def _close(self) -> None:
        """The end of a step: who used what, whether all was finite, and what is left to push."""
        if self.session.failure is not None:
            return
        order, node, nodes = self.layout.order, self.layout.node, self.layout.nodes
        *used, void = node.greatest([*(float(p in self.brought) for p in order), float(not self._finite)])
        here = {parameter for parameter, some in zip(order, used, strict=True) if some}
        self._used = here
        if self.step is not None:
            for bundle in self._held:
                self._push(self.step, bundle, [p for p in bundle.parameters if p in here])
            self._say(self.step, used, bool(void))
            self._used = here | self._fill_up(self.step, [p for p in order if p not in here])
            self.step.step.close()
            self._expect_no_more(self.step)
        if len(here) < len(order) and nodes.shards < len(nodes.local):
            told = node.greatest([float(p in self._used) for p in order])
            self._used = {parameter for parameter, some in zip(order, told, strict=True) if some}
        self._closed.set()

    def _say(self, step: ShardStep, used: list[float], void: bool) -> None:
        """Tell the ranks of this shard what the node used, and make the step void for them if it is for others."""
        assert self.layout.note is not None
        said = torch.tensor([*used, math.nan if void else 0.0], dtype=torch.float64, device=device.HOST)
        step.fill(self.layout.note.pieces, device.memory_of(said))
        step.step.flush()

    def _fill_up(self, step: ShardStep, absent: list[Parameter]) -> set[Parameter]:
        """Push what this node did not use as far as another one did; returns what that is. See `Exchange._fill_up`."""
        pieces = {p: self.layout.bundle[p].pieces[p] for p in absent}
        step.fill((piece for each in pieces.values() for piece in each if piece.unit.scope is step), None)
        step.step.flush()
        if not absent:
            return set()
        self._said.wait()
        if self._error is not None:
            return set()
        assert self.layout.note is not None
        shares = np.concatenate([piece.output.view(np.float64) for piece in self.layout.note.pieces])
        some = {p for p, share in zip(self.layout.order, shares[:-1], strict=True) if share > 0}.intersection(absent)
        wanted = {piece.unit for p in some for piece in pieces[p]}
        lacking = [x for each in pieces.values() for x in each if x.unit in wanted and x.unit.scope is not step]
        step.fill(lacking, None)
        return some

    def _expect_no_more(self, step: ShardStep) -> None:
        """Blocks that nobody pushed do not come back."""
        with self._lock:
            for bundle in self.layout.bundles:
                if never := sum(pieces[0].unit.scope is not step for pieces in bundle.by_block.values()):
                    bundle.back(never)

    def _take(self, place: BlockPlace) -> None:
        """The average of a block is there; called by the reading thread."""
        tracing = self.session.tracing
        began = tracing.now() if tracing.on else 0.0
        bundles = self.layout.by_block.get(place)
        if bundles is None:
            self._left_to_say -= 1
            if not self._left_to_say:
                self._said.set()
            return
        for bundle in bundles:
            for piece in bundle.by_block[place]:
                bundle.memory.store(piece.lo, piece.hi, piece.output)
        if began:
            # Before the last bundle has arrived: after that the place may be another step's.
            tracing.pulled(place, began)
        with self._lock:
            for bundle in bundles:
                bundle.back()

    def _give_out(self, bundle: Bundle) -> None:
        bundle.arrived.wait()
        if self._error is None:
            self.layout.node.give_out(bundle.cut, bundle.whole)
            self.layout.node.complete(bundle.future, bundle.whole)
            bundle.over.set()

    # ------------------------------------------------------------------------------------------ results
    def fail(self, error: GradcommError) -> None:
        """See :class:`gcclient.waiters.Pending`."""
        self._error = error
        self._said.set()
        self._closed.set()
        for bundle in self.layout.bundles:
            bundle.arrived.set()
            bundle.over.set()

    def finish(self) -> None:
        """Send what is left, wait for all results, and write each average to its parameter's gradient.

        See `Exchange.finish`.
        """
        began, layout = time.monotonic(), self.layout
        check_unchanged(self.brought)
        if self._went < len(layout.bundles):
            while self._went < len(layout.bundles):
                self._send()
            self._end()
        for event in (*(bundle.over for bundle in layout.bundles), self._closed):
            self._wait(event, began)
        if self.step is not None:
            # Also where nothing hangs on what others used: the next step is to be pushed where this one was.
            self._wait(self._said, began)
        for bundle in layout.bundles:
            bundle.future.wait()  # on CUDA for what was queued
            for parameter, part in bundle.parts.items():
                self._write(parameter, part.view(parameter.tensor.shape))
        self._over(time.monotonic() - began)

    def _wait(self, event: threading.Event, began: float) -> None:
        session, domain = self.session, self.layout.domain
        while not event.wait(SAY_EVERY):
            session.check()
            if (elapsed := time.monotonic() - began) > session.patience:
                raise unanswered(domain.declared.label, session.label, domain.step, elapsed)
        if self._error is not None:
            raise self._error.again()

    def _write(self, parameter: Parameter, average: torch.Tensor) -> None:
        """An average to where it belongs; a parameter that has no gradient here gets one if another rank had one, or
        if its residual was delivered."""
        if (brought := self.brought.get(parameter)) is not None:
            brought.grad.detach().copy_(average)
        elif parameter in self._used or bool(average.any()):
            parameter.tensor.grad = average.clone(memory_format=torch.contiguous_format)

    def _over(self, waited: float) -> None:
        counters = self.session.counters
        counters.steps += 1
        counters.wait_seconds += waited
        if self.step is not None:
            self.layout.timing.back(self.step.step.number)
            counters.bytes_pushed += self._pushed
            counters.bytes_pulled += self._pushed
        self.session.pending.discard(self)
        self.brought = {}
