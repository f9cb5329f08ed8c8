"""A wrapped optimizer's exchanges: when each begins and ends, and what users may do in between.

What may live here: the life of an exchange from the first gradient to the step, and the class that wrapped optimizers
derive from. What may not: the exchange itself (`exchange.py`, `sharded_exchange.py`), making a wrapper
(`optimizer.py`), steps of single parameters (`overlap.py`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gcclient.api import is_current
from gcclient.auditor import Auditor
from gcclient.errors import NotInitialized
from gcclient.exchange import Exchange, Layout
from gcclient.loaded import Shared
from gcclient.parameters import Parameter
from gcclient.plain_training import PlainExchange, PlainLayout
from gcclient.sharded_exchange import ShardExchange, ShardLayout
from gcclient.state_steps import only_makes_state

#: by the daemon, in shards through it, without one
Layouts = Layout | ShardLayout | PlainLayout
Exchanges = Exchange | ShardExchange | PlainExchange


class Averaging:
    """The exchanges of one wrapped optimizer. ``open``: gradients came that are not averaged yet."""

    def __init__(self, layout: Layouts, passes: int, scaler: Any, auditor: Auditor | None) -> None:
        self.layout = layout
        self.auditor = auditor
        self.passes = passes
        self.scaler = scaler
        self.open = False
        #: the gradients are averages that no step has used yet
        self.averaged = False
        #: they are not: the step was given up with a lost node
        self.skipped = False
        #: step() is to take the gradients as they are
        self.skipping = False
        #: ids of the parameters that are exchanged
        self.known = frozenset(id(p.tensor) for p in layout.parameters)
        #: backward passes only add up
        self.resting = False
        self._left = dict.fromkeys(layout.parameters, passes)
        self._exchange: Exchanges | None = None
        #: called with a parameter whose gradient is about to be pushed, and whether it is the last of the exchange
        self.before_bringing: Callable[[Parameter, bool], None] = lambda parameter, last: None
        #: autograd may run the hooks of several devices at once
        self._lock = threading.Lock()

    def watch(self) -> None:
        """From now on gradients are exchanged as they become ready, for as long as the wrapper lives."""
        mine = weakref.ref(self)
        # Its clocks first: they are to run before gradients are copied.
        handles = self.layout.timing.watch(p.tensor for p in self.layout.parameters)
        handles += [p.tensor.register_post_accumulate_grad_hook(_hook(mine, p)) for p in self.layout.parameters]
        weakref.finalize(self, _remove, handles)

    def on_gradient(self, parameter: Parameter) -> None:
        """A backward pass has added to a parameter's gradient. No affair of this wrapper once its job was left: it may
        live on, held by a scheduler for instance, beside whatever the parameters belong to now."""
        if not is_current(self.layout.session):
            return
        with self._lock:
            self.layout.session.check()
            if self.resting:
                self._rest(parameter)
                return
            if not self._left[parameter]:
                raise RuntimeError(
                    f"a gradient of {parameter.name!r} was computed more than backward_passes_per_step={self.passes} "
                    "times before optimizer.step(): raise it to accumulate gradients, or call step() in between"
                )
            self.open, self.averaged, self.skipped = True, False, False
            self._left[parameter] -= 1
            if not self._left[parameter]:
                self._bring(parameter)

    def _rest(self, parameter: Parameter) -> None:
        if self._exchange is not None and parameter in self._exchange.brought:
            raise RuntimeError(
                f"a gradient of {parameter.name!r} was computed within no_sync() while an earlier one is being "
                "exchanged: call optimizer.step() before it, or leave the pass that exchanges for the end"
            )
        self.open, self.averaged, self.skipped = True, False, False

    def _begun(self) -> Exchanges:
        if self._exchange is None:
            scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
            self._exchange = self.layout.begin(scale)
        return self._exchange

    def bring_rest(self) -> Exchanges:
        """Push what was not yet; returns the exchange, whose results may be under way."""
        self.check()
        exchange = self._begun()
        for parameter in self.layout.parameters:
            if parameter not in exchange.brought and parameter.tensor.grad is not None:
                self._bring(parameter)
        return exchange

    def _bring(self, parameter: Parameter) -> None:
        brought = {} if self._exchange is None else self._exchange.brought
        last = len(brought) + 1 == len(self.layout.parameters) and parameter not in brought
        self.before_bringing(parameter, last)
        self._begun().bring(parameter)

    def over(self) -> None:
        """Whoever has the exchange sees to its end; the next gradient begins another."""
        self._exchange = None
        self._left = dict.fromkeys(self.layout.parameters, self.passes)
        self.open, self.averaged = False, False

    def average(self) -> None:
        """Exchange what was not yet, and wait: every gradient is the average over all ranks."""
        exchange = self.bring_rest()
        exchange.finish()
        self.over()
        self.skipped = exchange.skipped
        self.averaged = True
        if self.auditor is not None:
            # Here and not before the next step: ranks come here alike, but may differ in what they do until they push.
            assert isinstance(self.layout, Layout)
            start = time.perf_counter()
            self.auditor.look_back()
            self.layout.timing.stood(start)

    def check(self) -> None:
        """Raises the job's failure, and :class:`NotInitialized` once this process has left the job."""
        session = self.layout.session
        if not is_current(session):
            raise NotInitialized(
                "the job that this optimizer was wrapped in is over",
                job=session.label,
                advice="after init() give DistributedOptimizer the optimizer that was wrapped, and step its result",
            )
        session.check()

    def check_closed(self, what: str) -> None:
        """Raises RuntimeError between backward() and step()."""
        if self.open:
            self.check()
            raise RuntimeError(
                f"{what} was called after backward() and before optimizer.step() or optimizer.synchronize(), while "
                "gradients are being exchanged: call it before backward() or after step()"
            )


def _hook(averaging: weakref.ref[Averaging], parameter: Parameter) -> Callable[[torch.Tensor], None]:
    def on_gradient(tensor: torch.Tensor) -> None:
        living = averaging()
        if living is not None:
            living.on_gradient(parameter)

    return on_gradient


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class Distributed(Optimizer):
    """What :func:`DistributedOptimizer` adds to an optimizer; its classes derive from this and from the optimizer's."""

    _averaging: Averaging
    _shared: Shared

    def _prepare(self) -> None:
        """Called once, when everything of the optimizer that is wrapped is here."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks: it must not look for infinities before gradients are averages, as it does for those
        that unscale themselves. Raises RuntimeError where it would unscale what averages are about to overwrite, which
        leaves no trace at the gradients."""
        averaging = self._averaging
        if averaging.scaler is None and averaging.open:
            averaging.check()
            raise RuntimeError(
                "scaler.step(optimizer) before the gradients are averaged, by a GradScaler that the wrapper does not "
                "know: averages of scaled gradients would be stepped; give it to DistributedOptimizer as scaler=scaler"
            )
        return False

    def synchronize(self) -> None:
        """Wait until every gradient is the average over all ranks; :meth:`step` then does not exchange again.

        For whatever changes averaged gradients, clipping for instance. All ranks must call it alike. Raises
        RuntimeError if a gradient was changed since its backward pass or is of a parameter that is not exchanged, and
        the job's failure.
        """
        self._check_known()
        self._averaging.average()

    def _check_known(self) -> None:
        """Raises RuntimeError for a gradient that nobody averages: with its step ranks would part."""
        known = self._averaging.known
        for i, group in enumerate(self.param_groups):
            for j, tensor in enumerate(group["params"]):
                if id(tensor) not in known and tensor.requires_grad and tensor.grad is not None:
                    raise RuntimeError(
                        f"parameter {j} of the optimizer's group {i}, of shape {list(tensor.shape)}, has a gradient "
                        "that is not exchanged: it needed none, or was not there, when the optimizer was given to "
                        "DistributedOptimizer; do that once all parameters are there and need gradients (they may be "
                        "frozen afterwards)"
                    )

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it :meth:`step` takes the gradients as they are, after :meth:`synchronize`."""
        self._averaging.skipping = True
        try:
            yield
        finally:
            self._averaging.skipping = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within it only add up gradients; the next one outside brings the sum.

        They do not count as passes of ``backward_passes_per_step``. All ranks must do alike.
        """
        self._averaging.resting = True
        try:
            yield
        finally:
            self._averaging.resting = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the averages, then step. With a ``closure``, its gradients are averaged each time it is called.

        A step that was given up with a lost node (``on_loss="skip"``) changes nothing here, on all ranks that are left;
        with a closure its gradients are zeros. ``gcclient.stats()["skipped_steps"]`` counts them. A step by which torch
        only makes the optimizer's state, for a checkpoint, exchanges nothing.
        Raises RuntimeError within :meth:`skip_synchronize` without :meth:`synchronize` before, or with a ``closure``
        there, and what :meth:`synchronize` raises.
        """
        if only_makes_state():
            return self._make_state()
        averaging = self._averaging
        if averaging.skipping and closure is not None:
            raise RuntimeError(
                "optimizer.step(closure) within skip_synchronize(): the closure computes gradients that nobody would "
                "average; leave skip_synchronize() out, each call of the closure averages"
            )
        if averaging.skipping:
            averaging.check_closed("optimizer.step() within skip_synchronize()")
        elif (closure is None or averaging.open) and not averaging.averaged:
            self.synchronize()
        if averaging.skipped and closure is None:
            averaging.averaged = averaging.skipped = False
            self._shared.stepped()
            return None
        result = super().step(None if closure is None else self._averaged(closure))
        averaging.averaged = False
        self._shared.stepped()
        return result

    # Its own hooks run within the optimizer's step(), when gradients are averages; torch would run them twice.
    step.hooked = True  # type: ignore[attr-defined]

    def _make_state(self) -> Any:
        """Step as the optimizer does, which no other rank hears of; not where it has a state by now, by parameters that
        were still awaited when torch looked for one."""
        return None if self.state else super().step(None)

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's. Raises RuntimeError between backward() and :meth:`step` or :meth:`synchronize`."""
        self._averaging.check_closed("optimizer.zero_grad()")
        self._averaging.averaged = False
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's, into the groups and the state that it shares with the one it was made from. Raises
        RuntimeError between backward() and :meth:`step`."""
        self._averaging.check_closed("optimizer.load_state_dict()")
        super().load_state_dict(state_dict)
        self._shared.take(self)  # an optimizer's own load_state_dict() may call no hooks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: what is exchanged was declared on all ranks when the optimizer was wrapped."""
        raise RuntimeError("add parameters to the optimizer before it is given to DistributedOptimizer")
