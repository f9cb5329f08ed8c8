"""Steps that only make an optimizer's state: torch takes one to get or set the state of an optimizer that has none.

What may live here: telling such a step from one of training. What may not: what a wrapper does with it (`averaging.py`,
`overlap.py`).

`torch.distributed.checkpoint.state_dict` gives all parameters zeros for gradients, steps with a learning rate of 0, and
puts both back. An optimizer that keeps nothing, SGD without momentum, never has a state: each save does it. An exchange
then would deliver residuals to a step that throws them away, count as a step, and wait for ranks that save nothing.

Who calls tells it, and nothing else could: in training a rank whose learning rate still is 0 may bring zeros, too,
while others bring gradients and wait for it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

_CALLER: Final = "torch.distributed.checkpoint.state_dict"


def only_makes_state() -> bool:
    """Whether what is running was called by torch's functions for the state of models and optimizers."""
    frame: FrameType | None = sys._getframe(1) if _CALLER in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _CALLER:
            return True
        frame = frame.f_back
    return False
