"""The backend `gc` of torch.distributed: a process group whose all-reduces go through the daemon.

What may live here: torch's process group and work, which collectives are carried. What may not: carrying them
(`collectives.py`).

Sums and averages of dense tensors of known dtypes are carried, losslessly unless `attaching.py` says otherwise. All
else goes through a gloo group for tensors on the CPU and an NCCL group for those on CUDA.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from gcclient import api, device
from gcclient.collectives import Collectives, Reduction
from gcclient.errors import JoinRefused
from gcclient.plain import Plain
from gcclient.session import Session

NAME: Final = "gc"
#: so much of a group's name tells it from others; torch calls some groups by a hash of 40 digits
_NAME: Final = 16


@dataclass(frozen=True, slots=True)
class Mark:
    """How to carry a tensor that an attached module is about to reduce. ``memory``: its own; gradients that only add up
    are not reduced, and what is in their place once that is gone is another tensor."""

    memory: weakref.ref[torch.UntypedStorage]
    carry: Callable[[torch.Tensor, bool], Reduction]


#: by the address and size of their memory
marked: dict[tuple[int, int], Mark] = {}


class Work(dist.Work):
    """What torch waits for."""

    def __init__(self, op: Reduction) -> None:
        super().__init__()
        self.op = op

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until the result is there; the job's deadline bounds it. Raises the job's failure."""
        self.op.finish()
        return True

    def is_completed(self) -> bool:
        return self.op.over

    def is_success(self) -> bool:
        return self.op.over and self.op.error is None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = self.op.future
        return future


class Failed(dist.Work):
    """An all-reduce that could not begin. DDP's reducer does not outlive an exception where it begins one."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises why."""
        raise self.error

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return False

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_exception(self.error)  # type: ignore[arg-type]
        value: Callable[[torch.futures.Future[list[torch.Tensor]]], list[torch.Tensor]] = lambda f: f.value()  # noqa: E731
        return future.then(value)


class Copied(dist.Work):
    """A collective of gloo's on a copy of a tensor's elements, which go back into it once they are there."""

    def __init__(self, work: dist.Work, flat: torch.Tensor, target: torch.Tensor) -> None:
        super().__init__()
        self.work = work

        def settle(over: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
            over.value()  # raises what it ended with
            device.put_back(flat, target)
            return [target]

        self.future: torch.futures.Future[list[torch.Tensor]] = work.get_future().then(settle)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until the result is in the tensor. Raises what gloo does."""
        done: bool = self.work.wait(timeout)
        self.future.wait()
        return done

    def is_completed(self) -> bool:
        return self.future.done()

    def is_success(self) -> bool:
        return self.future.done() and bool(self.work.is_success())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self.future


class InARow:
    """What gloo is given of ``tensors``, one or a list of one, for a collective in place: it takes the elements of any
    tensor to lie in a row. NCCL refuses what it cannot do."""

    def __init__(self, tensors: Any) -> None:
        self.given, self._flat = tensors, None
        one = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if len(one) == 1 and one[0].layout is torch.strided and not one[0].is_cuda and not one[0].is_contiguous():
            self._flat, self._target = device.flattened(one[0]), one[0].detach()
            self.given = self._flat if one[0] is tensors else [self._flat]

    def back(self, work: dist.Work) -> dist.Work:
        """What to wait for until the results are in ``tensors``."""
        return work if self._flat is None else Copied(work, self._flat, self._target)


class Group(dist.ProcessGroup):
    """A process group of the backend. ``ranks``: in torch's world; ``known_as``: its name in torch, on all of them."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.known_as = str(options.group_id)[:_NAME]
        self.collectives: Collectives | None = None
        store, rank, size = options.store, options.group_rank, options.group_size
        # What is not carried goes through a group that no Python class extends: torch enqueues a collective of one that
        # a class does extend with the GIL held, for which gloo's worker may wait with its queue locked.
        self._others: Any = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options.timeout)
        self._has(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        for group in (self, self._others):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options.timeout)
            self._has(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)

    def _has(self, where: torch.device, kind: Any, backend: Any) -> None:
        for group in (self, self._others):
            group._register_backend(where, kind, backend)

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:  # type: ignore[override]
        """Sum or average a tensor in place; as torch calls it. Results are of the same bytes on every rank."""
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        one = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        average = bool(op == dist.ReduceOp.AVG)
        if self.size() > 1 and len(one) == 1 and (average or op == dist.ReduceOp.SUM) and _carried(one[0], average):
            work = self._carry(one[0], average)
            if work is not None:
                return work
        if average and len(one) == 1 and not one[0].is_cuda and one[0].is_floating_point():
            # of which gloo knows nothing before some release of torch
            tensors, opts, more, named = [one[0].div_(self.size())], None, (), {}
        row = InARow(tensors)
        return row.back(self._others.allreduce(row.given, *(() if opts is None else (opts, *more)), **named))

    def broadcast(self, tensors: Any, *options: Any, **named: Any) -> Any:  # type: ignore[override]
        """As torch calls it."""
        row = InARow(tensors)
        return row.back(self._others.broadcast(row.given, *options, **named))

    def reduce(self, tensors: Any, *options: Any, **named: Any) -> Any:  # type: ignore[override]
        """As torch calls it."""
        row = InARow(tensors)
        return row.back(self._others.reduce(row.given, *options, **named))

    def _carry(self, tensor: torch.Tensor, average: bool) -> dist.Work | None:
        """None where there is no daemon."""
        try:
            session = api.joined()
            if isinstance(session, Plain):
                return None
            mark = marked.pop((tensor.data_ptr(), tensor.numel()), None)
            if mark is not None and mark.memory() is not None:
                return Work(mark.carry(tensor, average))
            return Work(collectives_of(self, session).start(tensor, average))
        except Exception as error:
            return Failed(error)


def _to_others(name: str) -> Callable[..., Any]:
    def collective(self: Group, *given: Any, **named: Any) -> Any:
        return getattr(self._others, name)(*given, **named)

    return collective


# What torch asks the class for, by the names of all its releases; of the rest it asks the backends at once. Callers in
# C++ get these works in one that passes on waiting and futures, and no more.
for _name in (
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall_base",
    "barrier",
    "recv",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "send",
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(Group, _name, _to_others(_name))


def collectives_of(group: Group, session: Session) -> Collectives:
    """A group's domains in a session. Raises :class:`JoinRefused` where torch's world is not the job's."""
    known = group.collectives
    if known is None or known.session is not session:
        if dist.get_world_size() != session.me.size:
            raise JoinRefused(
                f"torch.distributed spans {dist.get_world_size()} ranks and the job {session.me.size}: who is in a "
                "process group is not known",
                job=session.label,
                phase="declare",
                advice="initialise torch.distributed over all ranks of the job before gcclient.init()",
            )
        known = group.collectives = Collectives(session, tuple(sorted(group.ranks)), group.known_as)
    return known


def _carried(tensor: torch.Tensor, average: bool) -> bool:
    """Whether sums (averages) of ``tensor`` are the daemon's."""
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return False
    dtype = device.DTYPES.get(tensor.dtype)
    return dtype is not None and tensor.dtype is not torch.bool and (dtype.is_float or not average)


def register() -> None:
    """Make `gc` known to torch.distributed. Once a process."""
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    try:
        dist.Backend.register_backend(
            NAME, lambda options, _: Group(options), extended_api=True, devices=["cpu", "cuda"]
        )
    except (AttributeError, TypeError, RuntimeError) as error:  # of a torch that has it otherwise
        warnings.warn(
            f"the backend {NAME!r} cannot be registered with torch {torch.__version__}: {error}", stacklevel=2
        )
