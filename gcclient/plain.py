"""Torch's own collectives behind gcclient's calls, where GC_DISABLE says so: no daemon, nothing compressed.

What may live here: the session and single tensors without a daemon. What may not: training with models
(`plain_training.py`), anything of the daemon's protocol.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from gcclient import arguments, device
from gcclient.call_domains import read_codec
from gcclient.calls import read_arguments
from gcclient.counters import Counters
from gcclient.errors import GradcommError, JoinRefused, NotInitialized
from gcclient.membership import Membership
from gcclient.ranks import World

#: What is summed as something else: torch's collectives do not know int16, and half precision is to be summed as the
#: daemon does.
_SUMMED_AS: Final = {
    torch.int16: torch.int32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.uint8,
}


class Plain:
    """What a :class:`gcclient.session.Session` is elsewhere, of a job without daemons."""

    def __init__(self, label: str, world: World, reduce: Callable[[torch.Tensor, Any], Any] | None) -> None:
        self.label = label
        self.me = world
        self.failure: GradcommError | None = None
        self.pid = os.getpid()
        self.counters = Counters()
        ranks = tuple(range(world.size))
        self.membership = Membership(epoch=1, ranks=ranks, since=dict.fromkeys(ranks, 1))
        self._reduce = reduce
        self._closed = False

    def check(self) -> None:
        """Raise if this session cannot be used any more."""
        if self._closed or os.getpid() != self.pid:
            raise NotInitialized("gcclient is not initialised in this process", advice="call gcclient.init() first")

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Begin to reduce a contiguous tensor over all ranks, in place. Returns what can be waited for, None if nothing
        can."""
        return None if self._reduce is None else self._reduce(tensor, op)

    def close(self, orderly: bool) -> None:
        self._closed = True


def join(label: str, world: World, patience: float) -> Plain:
    """A session over torch.distributed's default group, or over a group of its own where there is none.

    ``patience``: how long that may take to form, seconds. Raises :class:`JoinRefused` where ranks cannot meet.
    """
    if world.size == 1:
        return Plain(label, world, None)
    if not dist.is_available():
        raise JoinRefused("GC_DISABLE=1 needs a torch with torch.distributed", job=label, phase="join")
    if dist.is_initialized():
        if dist.get_world_size() != world.size:
            raise JoinRefused(
                f"GC_DISABLE=1, and torch.distributed spans {dist.get_world_size()} of the job's {world.size} ranks",
                job=label,
                phase="join",
                advice="initialise torch.distributed over all ranks, or train with daemons (without GC_DISABLE)",
            )
        # The library's own tensors are on the CPU, which a default group of NCCL alone does not reach.
        on_cpu = None if _reaches_cpu() else dist.new_group(backend="gloo")

        def over_torch(tensor: torch.Tensor, op: Any) -> Any:
            return dist.all_reduce(tensor, op, on_cpu if tensor.device.type == "cpu" else None, async_op=True)

        return Plain(label, world, over_torch)
    try:
        group = _own_group(world, timedelta(seconds=patience))
    except (ValueError, RuntimeError) as error:
        raise JoinRefused(
            f"GC_DISABLE=1, and the ranks cannot meet: {error}",
            job=label,
            phase="join",
            advice="use torchrun, set MASTER_ADDR and MASTER_PORT, or call init_process_group() before init()",
        ) from None

    def reduce(tensor: torch.Tensor, op: Any) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return group.allreduce([tensor], options)

    return Plain(label, world, reduce)


def _reaches_cpu() -> bool:
    """Whether torch's default group has a backend for tensors on the CPU."""
    try:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


#: by process, rank and size; ranks that leave a job and join the next one need not meet again
_groups: dict[tuple[int, int, int], Any] = {}


def _own_group(world: World, limit: timedelta) -> Any:
    """A gloo group that is not torch's default one, which the script may still want to make. Raises ValueError and
    RuntimeError where ranks cannot meet."""
    key = (os.getpid(), world.rank, world.size)
    if key not in _groups:
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=limit))
        _groups[key] = dist.ProcessGroupGloo(dist.PrefixStore("gcclient", store), world.rank, world.size, limit)
    return _groups[key]


@dataclass(slots=True)
class PlainCall:
    """Handle of one push_pull; see :class:`gcclient.calls.Call`. ``under_way``: the newest of each name, until over."""

    session: Plain
    under_way: dict[str, PlainCall]
    name: str | None
    result: torch.Tensor
    flat: torch.Tensor
    average: bool
    work: Any
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def arrived(self) -> bool:
        """Whether :meth:`finish` would not wait."""
        return self.over or self.work is None or bool(self.work.is_completed())

    def finish(self) -> torch.Tensor:
        """Wait for the result and copy it out."""
        with self.lock:
            if not self.over:
                began = time.monotonic()
                if self.work is not None:
                    self.work.wait()
                if self.average:
                    self.flat /= self.session.me.size
                device.put_back(self.flat, self.result)
                self.session.counters.wait_seconds += time.monotonic() - began
                self.session.counters.bytes_pulled += self.result.nbytes
                self.over = True
                if self.name is not None and self.under_way.get(self.name) is self:
                    del self.under_way[self.name]
            return self.result


class PlainCalls:
    """What :class:`gcclient.calls.Calls` is elsewhere."""

    def __init__(self, session: Plain) -> None:
        self.session = session
        self._under_way: dict[str, PlainCall] = {}
        self._empties: dict[str, torch.Tensor] = {}

    def start(
        self, tensor: torch.Tensor, name: str | None, average: bool, in_place: bool, codec: str | None = None
    ) -> PlainCall:
        """Begin to sum ``tensor`` over all ranks, losslessly whatever ``codec`` says. Raises as with a daemon."""
        name, average = read_arguments(name, average)
        read_codec(codec)
        session = self.session
        session.check()
        device.check_pushed(tensor, name, average)
        if name is not None and (earlier := self._under_way.get(name)) is not None:
            earlier.finish()
        source = tensor.detach()
        flat = source.to(_SUMMED_AS.get(tensor.dtype, tensor.dtype), copy=True, memory_format=torch.contiguous_format)
        flat = flat.view(-1)
        result = source if in_place else torch.empty_like(source, memory_format=torch.contiguous_format)
        # The sum of bools is a logical or.
        op = dist.ReduceOp.MAX if tensor.dtype is torch.bool else dist.ReduceOp.SUM
        call = PlainCall(session, self._under_way, name, result, flat, average, session.all_reduce(flat, op))
        if name is not None:
            self._under_way[name] = call
        session.counters.calls += 1
        session.counters.bytes_pushed += source.nbytes
        return call

    def empty(self, name: str, shape: tuple[int | Sequence[int], ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor of that name; the same one at every call."""
        name, read = arguments.read_name(name), arguments.read_shape(shape)
        if dtype not in device.DTYPES:
            raise ValueError(f"tensor {name!r} needs a dtype that can be exchanged, got {dtype}")
        known = self._empties.get(name)
        if known is None or (known.shape, known.dtype) != (read, dtype):
            known = self._empties[name] = torch.empty(read, dtype=dtype, device=device.HOST)
        return known

    def admit(self) -> tuple[int, ...]:
        """Nobody comes back."""
        self.session.check()
        return ()
