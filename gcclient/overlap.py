"""Cross-barrier: the next forward pass begins while averages still come.

What may live here: a wrapped optimizer that steps each parameter by itself, what cannot go with that, what stands in
for it without a daemon. What may not: knowing when a parameter is used (`awaited.py`), the exchange (`exchange.py`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import torch
from torch.optim import Optimizer

from gcclient import tolerance
from gcclient.audit import Audit
from gcclient.averaging import Distributed
from gcclient.awaited import Awaited
from gcclient.exchange import Exchange, Layout
from gcclient.gradients import check_unchanged
from gcclient.hierarchy import AUTO, Hierarchy
from gcclient.parameters import Parameter
from gcclient.plain import Plain
from gcclient.session import Session
from gcclient.state_steps import only_makes_state

log = logging.getLogger("gcclient")
_LATE: Final = "with overlap_forward parameters are stepped one by one, as their averages come"


def check_fit(
    session: Session | Plain, optimizer: Optimizer, scaler: Any, audit: Audit | None, parameters: Sequence[torch.Tensor]
) -> None:
    """Raises ValueError that names what cannot go with ``overlap_forward=True``, and what would do."""
    if isinstance(session, Session) and session.job.commits:
        raise ValueError(
            "overlap_forward=True needs on_loss='fail': in this job no result counts before all of a step do"
        )
    if scaler is not None:
        raise ValueError(f"overlap_forward=True and scaler: {_LATE}, and a scaler skips a step for all or for none")
    if audit is not None:
        raise ValueError(f"overlap_forward=True and audit (or GC_AUDIT): {_LATE}, and an audit waits for all of them")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError(f"overlap_forward=True and hooks of the optimizer's steps, which see all averages: {_LATE}")
    for tensor in parameters:
        if type(tensor) not in (torch.nn.Parameter, torch.Tensor):
            raise ValueError(f"overlap_forward=True: expected torch's own parameters, got a {type(tensor).__name__}")


def check_flat(hierarchy: Hierarchy) -> Hierarchy:
    """What of ``hierarchy`` goes with ``overlap_forward=True``: nothing. Raises ValueError where that was asked for."""
    why = f"does not go with overlap_forward=True: {_LATE}, and a node's ranks take them together, in one order"
    if hierarchy is True:
        raise ValueError(f"hierarchy=True {why}; leave one of them out")
    if hierarchy == AUTO:
        log.info("hierarchy='auto': gradients are not summed within the node first: it %s", why)
    return False


class Refusing(Distributed):
    """What ``overlap_forward=True`` does not go with, alike with daemons and without (GC_DISABLE)."""

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """What a GradScaler asks first. Raises RuntimeError."""
        raise RuntimeError(f"scaler.step(optimizer): {_LATE}, and a scaler skips a step for all or for none")

    def _refuse_closure(self, closure: Callable[[], Any] | None) -> None:
        if closure is not None:
            raise RuntimeError(f"optimizer.step(closure): {_LATE}, and a closure needs all of them stepped")

    def synchronize(self) -> None:
        """Wait until every parameter is stepped; ranks need not call it alike. Raises RuntimeError between
        ``backward()`` and :meth:`step`: averages cannot be changed before they are used; and the job's failure."""
        if self._averaging.open:
            self._averaging.check()
            raise RuntimeError(
                f"optimizer.synchronize() before optimizer.step(): {_LATE}, so that nothing, clipping by a global norm "
                "for instance, can be done to all averages before; use the wrapper without overlap_forward"
            )

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises RuntimeError: there are no averages before :meth:`step`."""
        raise RuntimeError(f"optimizer.skip_synchronize(): {_LATE}; use the wrapper without overlap_forward")
        yield

    def register_step_pre_hook(self, hook: Any) -> NoReturn:
        """Raises RuntimeError: there is no moment at which all averages are there."""
        raise RuntimeError(f"a hook of optimizer.step(): {_LATE}; use the wrapper without overlap_forward")

    register_step_post_hook = register_step_pre_hook


class PlainOverlapped(Refusing):
    """The same without a daemon: nothing tells when one of torch's averages has come, so :meth:`step` waits for all,
    and nothing is left for :meth:`synchronize` to wait for."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the averages, then step. Raises as :meth:`Overlapped.step` does."""
        self._refuse_closure(closure)
        if only_makes_state():
            return self._make_state()
        Distributed.synchronize(self)
        return super().step()

    # Its own hooks run within the optimizer's step(); torch would run them twice.
    step.hooked = True  # type: ignore[attr-defined]


class Overlapped(Refusing):
    """A wrapped optimizer whose :meth:`step` returns at once.

    What uses a parameter, a layer of the next forward pass or ``state_dict()``, waits until that one is averaged and
    stepped, with the options (learning rate, ...) there were when :meth:`step` was called. Weights are bit for bit
    those of the wrapper that waits, for optimizers that treat each parameter by itself.

    What needs all averages before the first parameter is stepped is refused: a GradScaler, gradients that were changed
    after ``backward()`` or are to be changed after :meth:`synchronize` (clipping by a global norm), closures, audits,
    hooks of steps, options that change within a step. A step in which some parameter has no gradient here waits.
    """

    _awaited: Awaited
    #: by parameter the group's options when step() was called
    _options: dict[int, dict[str, Any]]
    #: what zero_grad() is to do with an average once it was used: nothing, or as its argument says
    _zeroing: dict[Parameter, bool]

    def _prepare(self) -> None:
        averaging = self._averaging
        layout = averaging.layout
        assert isinstance(layout, Layout)  # without a daemon it would be a wrapper that waits
        self._awaited = Awaited(layout)
        self._options, self._zeroing = {}, {}
        averaging.before_bringing = self._awaited.before_bringing
        layout.session.leaving.add(self._awaited)
        if "_optimizer_load_state_dict_pre_hooks" in vars(self):
            self.register_load_state_dict_pre_hook(_finishing(weakref.ref(self._awaited)))

    # ------------------------------------------------------------------------------------------- steps
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each parameter once its average has come; returns at once. See the class for what is refused.

        Raises RuntimeError for a ``closure`` and for gradients that were changed since ``backward()``, and the job's
        failure.
        """
        averaging = self._averaging
        self._refuse_closure(closure)
        self._awaited.finish()
        if only_makes_state():
            return self._make_state()
        self._check_known()
        tolerance.steps(self)  # torch's hooks do not run here
        exchange = averaging.bring_rest()
        assert isinstance(exchange, Exchange)
        check_unchanged(exchange.brought)
        self._options = {id(p): group for group in self._snapshots() for p in group.pop("params")}
        if exchange.absent:
            exchange.finish()
            for parameter in averaging.layout.parameters:
                self._step_one(parameter)
        else:
            self._awaited.launch(exchange, self._step_one)
        averaging.over()
        self._shared.stepped()
        return None

    # Its hooks would run for every parameter; torch adds them to steps that have not this mark.
    step.hooked = True  # type: ignore[attr-defined]

    def _snapshots(self) -> Iterator[dict[str, Any]]:
        for group in self.param_groups:
            yield {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()}

    def _step_one(self, parameter: Parameter) -> None:
        """Step a parameter as the optimizer would if it had no other. Raises RuntimeError for one that keeps something
        in its options."""
        tensor, groups = parameter.tensor, self.param_groups
        options = self._options[id(tensor)]
        alone = {**options, "params": [tensor]}
        inner: Any = super(Distributed, self).step.__func__  # type: ignore[attr-defined]
        if getattr(inner, "hooked", False):
            inner = inner.__wrapped__  # without what torch does around a whole step
        self.param_groups = [alone]
        try:
            # Whoever waits may be anywhere in a forward pass, evaluation included.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
                inner(self)
        finally:
            self.param_groups = groups
        if changed := [k for k in options if alone[k] is not options[k]]:
            raise RuntimeError(
                f"overlap_forward=True: {type(self).__name__} changes {changed[0]!r} of its parameter groups in a step,"
                " and every parameter is stepped by itself here: use the wrapper without overlap_forward"
            )
        if parameter in self._zeroing:
            _zero(tensor, self._zeroing.pop(parameter))

    # ----------------------------------------------------------------------------------- what users may do
    def synchronize(self) -> None:
        super().synchronize()
        self._awaited.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's, without waiting: of awaited parameters once they are stepped. Raises RuntimeError between
        ``backward()`` and :meth:`step`."""
        self._averaging.check_closed("optimizer.zero_grad()")
        awaited = {id(p.tensor): p for p in self._averaging.layout.parameters if p in self._awaited}
        for group in self.param_groups:
            for tensor in group["params"]:
                if (parameter := awaited.get(id(tensor))) is not None:
                    self._zeroing[parameter] = set_to_none
                else:
                    _zero(tensor, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's, once every parameter is stepped. Raises the job's failure."""
        self._awaited.finish()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's, once every parameter is stepped. Raises the job's failure."""
        self._awaited.finish()
        super().load_state_dict(state_dict)


def _finishing(awaited: weakref.ref[Awaited]) -> Callable[[Optimizer, dict[str, Any]], None]:
    def finish(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """The optimizer that was wrapped may be what loads: steps that are left belong before it all the same."""
        if (living := awaited()) is not None:
            living.finish()

    return finish


def _zero(tensor: torch.Tensor, set_to_none: bool) -> None:
    if tensor.grad is None:
        return
    if set_to_none:
        tensor.grad = None
    else:
        tensor.grad = tensor.grad.detach()
        tensor.grad.zero_()
