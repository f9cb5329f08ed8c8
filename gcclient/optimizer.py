"""The optimizer wrapper: gradients are averaged while the backward pass runs, and before the optimizer steps.

What may live here: when an exchange begins and ends, what users may do in between. What may not: the exchange itself
(`exchange.py`).

    optimizer = gcclient.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gcclient import arguments
from gcclient.api import joined
from gcclient.audit import Audit, read_audit
from gcclient.auditor import Auditor
from gcclient.exchange import Exchange, Layout
from gcclient.grouping import Groups
from gcclient.parameters import Parameter, declare
from gcclient.plain import Plain
from gcclient.plain_training import PlainExchange, PlainLayout


class Averaging:
    """The exchanges of one wrapped optimizer. ``open``: gradients came that are not averaged yet."""

    def __init__(self, layout: Layout | PlainLayout, passes: int, scaler: Any, auditor: Auditor | None) -> None:
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
        self._left = dict.fromkeys(layout.parameters, passes)
        self._exchange: Exchange | PlainExchange | None = None
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
        """A backward pass has added to a parameter's gradient."""
        with self._lock:
            self.layout.session.check()
            if not self._left[parameter]:
                raise RuntimeError(
                    f"a gradient of {parameter.name!r} was computed more than backward_passes_per_step={self.passes} "
                    "times before optimizer.step(): raise it to accumulate gradients, or call step() in between"
                )
            self.open, self.averaged, self.skipped = True, False, False
            self._left[parameter] -= 1
            if not self._left[parameter]:
                self._begun().bring(parameter)

    def _begun(self) -> Exchange | PlainExchange:
        if self._exchange is None:
            scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
            self._exchange = self.layout.begin(scale)
        return self._exchange

    def average(self) -> None:
        """Exchange what was not yet, and wait: every gradient is the average over all ranks."""
        self.layout.session.check()
        exchange = self._begun()
        for parameter in self.layout.parameters:
            if parameter not in exchange.brought and parameter.tensor.grad is not None:
                exchange.bring(parameter)
        exchange.finish()
        self.skipped = exchange.skipped
        self._exchange = None
        self._left = dict.fromkeys(self.layout.parameters, self.passes)
        self.open, self.averaged = False, True
        if self.auditor is not None:
            # Here and not before the next step: ranks come here alike, but may differ in what they do until they push.
            assert isinstance(self.layout, Layout)
            start = time.perf_counter()
            self.auditor.look_back()
            self.layout.timing.stood(start)

    def check_closed(self, what: str) -> None:
        """Raises RuntimeError between backward() and step()."""
        if self.open:
            self.layout.session.check()
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

    def synchronize(self) -> None:
        """Wait until every gradient is the average over all ranks; :meth:`step` then does not exchange again.

        For whatever changes averaged gradients, clipping for instance. All ranks must call it alike. Raises
        RuntimeError if a gradient was changed since its backward pass, and the job's failure.
        """
        self._averaging.average()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it :meth:`step` takes the gradients as they are, after :meth:`synchronize`."""
        self._averaging.skipping = True
        try:
            yield
        finally:
            self._averaging.skipping = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the averages, then step. With a ``closure``, its gradients are averaged each time it is called.

        A step that was given up with a lost node (``on_loss="skip"``) changes nothing here, on all ranks that are left;
        with a closure its gradients are zeros. ``gcclient.stats()["skipped_steps"]`` counts them.
        Raises RuntimeError within :meth:`skip_synchronize` without :meth:`synchronize` before, and what that raises.
        """
        averaging = self._averaging
        if averaging.skipping:
            averaging.check_closed("optimizer.step() within skip_synchronize()")
        elif (closure is None or averaging.open) and not averaging.averaged:
            self.synchronize()
        if averaging.skipped and closure is None:
            averaging.averaged = averaging.skipped = False
            return None
        evaluate = closure
        if closure is not None and not averaging.skipping:
            evaluate = self._averaged(closure)
        result = super().step(evaluate)
        averaging.averaged = False
        return result

    # Its own hooks run within the optimizer's step(), when gradients are averages; torch would run them twice.
    step.hooked = True  # type: ignore[attr-defined]

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
        """As the optimizer's. Raises RuntimeError between backward() and :meth:`step`."""
        self._averaging.check_closed("optimizer.load_state_dict()")
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: what is exchanged was declared on all ranks when the optimizer was wrapped."""
        raise RuntimeError("add parameters to the optimizer before it is given to DistributedOptimizer")


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: str | None = None,
    groups: Groups = None,
    backward_passes_per_step: int = 1,
    scaler: Any = None,
    whole: bool | None = None,
    audit: Audit | None = None,
) -> Any:
    """``optimizer`` with gradients averaged over all ranks of the job before each step. Call it on every rank.

    The result is of a class derived from the optimizer's own and shares its state and parameter groups. Gradients are
    copied out as the backward pass makes them; ``step()`` waits for the averages and writes them to ``.grad``. It must
    be called equally often on every rank; without a backward pass before it a rank brings the gradients it has.

    ``named_parameters``: ``model.named_parameters()``, the same names on every rank (default: names by position);
    parameters that need no gradient are left out. ``compression``, ``whole``, ``groups`` and ``audit``: as
    :func:`gcclient.state` takes them; a group's gradients are pushed when the last of them is there.
    ``backward_passes_per_step``: gradients of so many passes are added up before they are exchanged, in the last of
    them. ``scaler``: the GradScaler in use, if any: it then unscales averages, and residuals are kept unscaled.

    Raises TypeError and ValueError that name the argument, and what :func:`gcclient.state` raises.
    """
    session = joined()
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={optimizer!r}: expected a torch optimizer, got a {type(optimizer).__name__}")
    if isinstance(optimizer, Distributed):
        raise ValueError("the optimizer is wrapped already: give DistributedOptimizer the one it was made from")
    passes = arguments.read_whole(backward_passes_per_step, "backward_passes_per_step")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: expected 1 or more")
    named = _named(optimizer, named_parameters)
    options = read_audit(audit, os.environ)
    averaging: Averaging
    if isinstance(session, Plain):
        averaging = Averaging(PlainLayout(session, named), passes, scaler, None)
    else:
        ranks = tuple(range(session.me.size))
        domain, parameters = declare(session, "optimizer", named, ranks, compression, whole, groups, options)
        auditor = None if options is None else Auditor(session, domain, options)
        averaging = Averaging(Layout(session, domain, parameters), passes, scaler, auditor)
    base = type(optimizer)
    made: Any = object.__new__(type(base.__name__, (Distributed, base), {"__module__": base.__module__}))
    # A learning rate scheduler's patch of step() belongs to the optimizer it was made for.
    made.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    made._averaging = averaging
    # A scaler must not look for infinities before gradients are averages, as it does for those that unscale themselves.
    made._step_supports_amp_scaling = False
    averaging.watch()
    if scaler is not None:
        _average_before_unscaling(scaler, made)
    return made


def _named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters that need gradients. Raises ValueError where names are missing, or nothing is left."""
    own = {
        id(p): (f"parameter.{i}.{j}", p)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    }
    named = list(own.values())
    if named_parameters is not None:
        named = [(name, p) for name, p in named_parameters if id(p) in own]
        if missing := own.keys() - {id(p) for _, p in named}:
            raise ValueError(
                f"named_parameters: {len(missing)} of the optimizer's {len(own)} parameters have no name; give "
                "model.named_parameters() of the model that the optimizer was made for"
            )
    named = [(name, p) for name, p in named if p.requires_grad]
    if not named:
        raise ValueError("the optimizer has no parameter that requires a gradient")
    return named


def _average_before_unscaling(scaler: Any, optimizer: Distributed) -> None:
    """Make ``scaler`` unscale averages: what it finds in them, infinities above all, is then the same on all ranks."""
    unscale, wrapped = scaler.unscale_, weakref.ref(optimizer)

    def unscale_(given: Optimizer) -> None:
        if given is wrapped() and not given._averaging.averaged:
            given.synchronize()
        unscale(given)

    scaler.unscale_ = unscale_
