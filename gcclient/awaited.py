"""Parameters whose averages are on their way: whoever uses one waits for it, and for no other.

What may live here: knowing a use when it happens, taking averages as they come. What may not: what a step is
(`overlap.py`), the exchange (`exchange.py`).

Which layer needs which parameter only its use tells: weights may be shared, and modules use those of others (attention
its output projection's). So while a parameter is awaited, its class is one that torch asks before any of its functions
takes the parameter, and that waits; then it is what it was. A compiled model's graphs break there.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from gcclient.exchange import Exchange, Layout, Target
from gcclient.parameters import Parameter

_Tensor: Any = torch.Tensor
#: What says nothing of the values: nobody needs to wait for it.
HARMLESS: Final = frozenset(
    [
        *(
            getattr(_Tensor, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "layout",
                "requires_grad",
                "is_leaf",
                "ndim",
                "is_sparse",
                "nbytes",
            )
        ),
        *(getattr(_Tensor, name) for name in ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point")),
    ]
)


class AwaitedParameter(torch.nn.Parameter):
    """A parameter that is not stepped yet. Made and unmade by assigning the class, so no method of it goes on being
    one of this class once it has waited."""

    _gradcomm_waits: Callable[[], None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._gradcomm_waits()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._gradcomm_waits()
        return self.__reduce_ex__(protocol)

    @classmethod
    @torch._disable_dynamo  # a compiler that traced this would trace the wait
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for value in pytree.tree_iter((args, kwargs)):
            if type(value) is AwaitedParameter:
                value._gradcomm_waits()
        return func(*args, **kwargs)


class Awaited:
    """The parameters of a layout that wait for the results of one exchange."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        #: There while a parameter is awaited, and not longer: it is the wrapper's, whose hooks are to go with it.
        self._stepped: Callable[[Parameter], None] | None = None
        self._exchange: Exchange | None = None
        self._targets: dict[Parameter, Target] = {}
        #: pieces that have not come, by parameter
        self._left: dict[Parameter, int] = {}
        self._classes: dict[Parameter, type] = {}
        self._taken = 0
        #: seconds that somebody has waited for the exchange
        self._waited = 0.0
        self._lock = threading.RLock()

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._left

    def __bool__(self) -> bool:
        return bool(self._left)

    def launch(self, exchange: Exchange, stepped: Callable[[Parameter], None]) -> None:
        """From now on all of an exchange's parameters are awaited; it is closed, and the one before is over.

        ``stepped`` is called with each of them, by whoever waits, once its gradient is the average.
        """
        with self._lock:
            self._stepped = stepped
            self._exchange, self._targets, self._taken, self._waited = exchange, exchange.targets(), 0, 0.0
            self._left = {parameter: len(parameter.pieces) for parameter in self._targets}
            for parameter in self._targets:
                self._classes[parameter] = type(parameter.tensor)
                parameter.tensor.__class__ = AwaitedParameter
                parameter.tensor._gradcomm_waits = self._waiter(parameter)  # type: ignore[attr-defined]
            for parameter in [p for p, left in self._left.items() if not left]:
                self._come(parameter)

    def _waiter(self, parameter: Parameter) -> Callable[[], None]:
        def wait() -> None:
            self.wait([parameter])

        return wait

    def wait(self, parameters: Iterable[Parameter]) -> None:
        """Until these are stepped. Raises the job's failure; then none is awaited any more, nor stepped."""
        with self._lock:
            for parameter in parameters:
                while parameter in self._left:
                    self._take()

    def clear(self, parameter: Parameter) -> None:
        """Until nothing is under way in the memory that a parameter's next gradient goes to."""
        if self._left:
            places = [place for piece in parameter.pieces for place in piece.unit.places]
            self.wait(p for place in places for p, _ in self._layout.by_block.get(place, ()))

    def before_bringing(self, parameter: Parameter, last: bool) -> None:
        """As :meth:`clear`; of the ``last`` gradient of an exchange until the one before it is over."""
        self.clear(parameter)
        if last:
            # What says who has gradients comes with it, and its memory may still be under way.
            self.finish()

    def finish(self) -> None:
        """Until the exchange is over. Raises the job's failure."""
        with self._lock:
            while self._exchange is not None:
                self._take()

    def _take(self) -> None:
        """Take what has come, something at least."""
        exchange, began = self._exchange, time.monotonic()
        assert exchange is not None
        tracing = exchange.session.tracing
        try:
            if self._taken < exchange.sent:
                for place in exchange.wait(began):
                    self._taken += 1
                    copying = tracing.now() if tracing.on else 0.0
                    for parameter, piece in self._layout.by_block.get(place, ()):
                        self._targets[parameter].memory.store(piece.lo, piece.hi, piece.output)
                        self._left[parameter] -= 1
                        if not self._left[parameter]:
                            self._come(parameter)
                    if copying:
                        tracing.pulled(place, copying)
        except Exception:
            self._let_go()
            raise
        self._waited += time.monotonic() - began
        if self._taken == exchange.sent:
            exchange.over(self._waited)
            self._exchange = None

    def _come(self, parameter: Parameter) -> None:
        """All of a parameter's average is there."""
        self._targets.pop(parameter).complete()
        del self._left[parameter]
        self._unmake(parameter)
        assert self._stepped is not None
        self._stepped(parameter)
        if not self._left:
            self._stepped = None

    def _unmake(self, parameter: Parameter) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            parameter.tensor.__class__ = self._classes.pop(parameter)
            del parameter.tensor._gradcomm_waits  # type: ignore[attr-defined]

    def _let_go(self) -> None:
        """The job has failed: parameters stay what they are, so that a checkpoint can be loaded into them."""
        for parameter in list(self._left):
            self._unmake(parameter)
        self._left.clear()
        self._stepped = None
        self._targets.clear()
        self._exchange = None
