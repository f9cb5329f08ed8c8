"""The parameter groups and the state that an optimizer and its wrapper share stay shared when a state is loaded, and
what schedulers ask of either.

What may live here: that. What may not: making a wrapper (`optimizer.py`), what it does (`averaging.py`).

Torch's ``load_state_dict`` puts new groups and a new state in the place of the old ones, on the optimizer that it is
called on alone. A scheduler that was made for the other one would go on steering the old groups, which no step reads:
after a broadcast of the state on every rank but the root, whose learning rate alone would go on changing.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer


class Shared:
    """What ``optimizer`` has when it is wrapped, and both are to have for good."""

    def __init__(self, optimizer: Optimizer) -> None:
        # An optimizer that shows another one's by properties keeps them there: nothing parts then.
        has = vars(optimizer)
        self._groups = has.get("param_groups")
        self._state = has.get("state")
        self._wrapped = weakref.ref(optimizer)

    def keep(self, optimizer: Optimizer) -> None:
        """Have what either loads written into what both share.

        The hook is the wrapper's too, which has the optimizer's hooks. It comes first: other hooks see what is shared.
        """
        if "_optimizer_load_state_dict_post_hooks" in vars(optimizer):
            optimizer.register_load_state_dict_post_hook(self.take, prepend=True)

    def stepped(self) -> None:
        """The wrapper has stepped: a scheduler of the wrapped optimizer, which asks that one, is to know it."""
        wrapped: Any = self._wrapped()
        if wrapped is not None:
            wrapped._opt_called = True

    def take(self, loaded: Optimizer) -> None:
        """Write what was loaded into one of them into what both share, and give it that again."""
        has = vars(loaded)
        if self._groups is not None and (new := has["param_groups"]) is not self._groups:
            for own, group in zip(self._groups, new, strict=True):
                own.clear()
                own.update(group)
            has["param_groups"] = self._groups
        if self._state is not None and (state := has["state"]) is not self._state:
            self._state.clear()
            self._state.update(state)
            has["state"] = self._state
