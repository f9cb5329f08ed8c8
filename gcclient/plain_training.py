"""Training with models where GC_DISABLE says so: gradients averaged by torch's own collectives.

What may live here: what stands in for `buckets.State` and for `exchange.py` then. What may not: sessions and single
tensors (`plain.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from gcclient import device
from gcclient.gradients import Brought, Passes, check_unchanged, read_gradient
from gcclient.parameters import Parameter
from gcclient.plain import Plain


class PlainState:
    """What `buckets.State` is otherwise: they go through torch's all-reduce, as without a hook, never ``skipped``."""

    skipped = False

    def __init__(
        self, session: Plain, group: dist.ProcessGroup | None, passes: int, parameters: Iterable[torch.Tensor]
    ) -> None:
        self.session = session
        self.group = group
        self.passes = Passes(passes, parameters)
        self.ranks = dist.get_world_size(group) if session.me.size > 1 else 1

    def on_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; what the hook does."""
        self.session.check()
        buffer = bucket.buffer()
        if not self.passes.exchanges(bucket.is_last()):
            return device.unchanged(buffer)
        counters = self.session.counters
        if buffer.layout is torch.strided:
            counters.bytes_pushed += buffer.nbytes
            counters.bytes_pulled += buffer.nbytes
        counters.steps += bucket.is_last()
        work = dist.all_reduce(buffer.div_(self.ranks), group=self.group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda f: f.value()[0])


class _NoTiming:
    """Nobody asks when gradients are ready."""

    def watch(self, parameters: Iterable[torch.Tensor]) -> list[RemovableHandle]:
        return []


class PlainLayout:
    """What `exchange.Layout` is elsewhere: an optimizer's parameters, by name."""

    def __init__(self, session: Plain, named: Iterable[tuple[str, torch.Tensor]], average: bool) -> None:
        self.session = session
        self.average = average
        self.parameters = tuple(
            Parameter(name, tensor, device.dtype_of(tensor, name), ()) for name, tensor in reversed(list(named))
        )
        self.timing = _NoTiming()

    def begin(self, scale: float) -> PlainExchange:
        """An exchange of all gradients; their scale makes no difference to sums."""
        return PlainExchange(self)


class PlainExchange:
    """What `exchange.Exchange` is elsewhere. Ranks bring gradients in different orders: all go in :meth:`finish`."""

    skipped = False

    def __init__(self, layout: PlainLayout) -> None:
        self.layout = layout
        self.brought: dict[Parameter, Brought] = {}

    def bring(self, parameter: Parameter) -> None:
        """Note a gradient. Raises ValueError for one of another dtype or size than its parameter."""
        self.brought[parameter] = read_gradient(parameter)

    def finish(self) -> None:
        """Average or sum all gradients; what no rank has stays None. Raises RuntimeError if one was changed since."""
        check_unchanged(self.brought)
        layout, session, began = self.layout, self.layout.session, time.monotonic()
        used = torch.tensor([float(p in self.brought) for p in layout.parameters], device=device.HOST)
        _wait(session.all_reduce(used))
        flats: list[tuple[Parameter, torch.Tensor, Any]] = []
        for parameter, some in zip(layout.parameters, used.tolist(), strict=True):
            if not some:
                continue
            if (brought := self.brought.get(parameter)) is not None:
                flat = brought.flat
            else:
                parameter.tensor.grad = torch.zeros_like(parameter.tensor, memory_format=torch.contiguous_format)
                flat = parameter.tensor.grad.view(-1)
            flats.append((parameter, flat, session.all_reduce(flat)))
        for parameter, flat, work in flats:
            _wait(work)
            if layout.average:
                flat /= session.me.size
            grad = parameter.tensor.grad
            assert grad is not None
            device.put_back(flat, grad)
            session.counters.bytes_pushed += flat.nbytes
            session.counters.bytes_pulled += flat.nbytes
        session.counters.steps += 1
        session.counters.wait_seconds += time.monotonic() - began
        self.brought = {}


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
