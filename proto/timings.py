"""What a worker measured of a step and tells its daemon.

What may live here: that message and its bounds. What may not: how it is measured (`gcclient.timing`), what is made of
it (`gcserver.runtime.profiler`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gcproto.manifest import MAX_TENSORS
from gcproto.packed import Message

Micros = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]


class TensorTimes(Message, frozen=True, tag="times"):
    """When gradients were ready in one step that a worker measured; all in microseconds, -1: not known.

    ``ready``: from the step's first gradient to each tensor's, tensors in the order of the domain's sections (-1: it
    brought none), less what copying took. ``forward``: from the end of the results before to the first gradient.
    ``copied`` bytes went into the arena in ``copying``. None of these counts what the worker waited for a core.
    ``between``: from the end of the backward pass before to this one's, all of it; ``typical``: the median of these
    over the last steps. ``buckets``: bytes of those in which gradients were brought, in order; empty where they were
    brought as they got ready. ``tolerant``: whether the worker's optimizers are known to stand gradients that come
    many steps late.
    """

    domain: int
    step: int
    ready: Annotated[tuple[Micros, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    forward: Micros = -1
    between: Micros = -1
    typical: Micros = -1
    copied: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    copying: Micros = 0
    buckets: Annotated[tuple[Bytes, ...], msgspec.Meta(max_length=MAX_TENSORS)] = ()
    tolerant: bool = False
