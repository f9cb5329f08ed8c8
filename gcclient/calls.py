"""One tensor, one call: declared names, pushes, and handles to results.

What may live here: push_pull of a single tensor from call to result. What may not: the module-level API
(`api.py`), many tensors at once (`broadcasts.py`, `ddp.py`), which domain serves a call (`call_domains.py`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch

from gcclient import arguments, device, windows
from gcclient.arena import BlockPlace
from gcclient.call_domains import CALLS, EXACT, LOSSLESS, domain_of, exact_domain, read_codec
from gcclient.domain import Domain
from gcclient.errors import GradcommError, StepSkipped
from gcclient.places import Places, Tensor, UnderWay, declare, push
from gcclient.results import Results
from gcclient.session import GRACE, Session
from gcclient.size_classes import ShapesDiffer, await_verdict
from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareSection
from gcproto.wire import Flag

UNNAMED: Final = "push_pull.noname."


class Call(UnderWay):
    """Handle of one push_pull. ``result`` is valid after :meth:`finish`.

    Results are copied out by whoever waits, block by block as they arrive.
    """

    __slots__ = ("result", "skipped", "_flat", "_memory", "_ready", "_left", "_lock", "_error")
    kind = "push_pull"
    again = "push it again"

    def __init__(
        self, session: Session, tensor: Tensor, flat: torch.Tensor, memory: device.Memory, result: torch.Tensor
    ) -> None:
        super().__init__(session, tensor, tuple(result.shape))
        self.result = result
        self.skipped = False
        self._flat = flat
        self._memory = tensor.memory(self.spec, memory)
        self._ready: deque[BlockPlace] = deque()
        self._left = len(tensor.places)
        self._lock = threading.RLock()
        self._error: GradcommError | None = None

    def deliver(self, places: list[BlockPlace]) -> None:
        self._ready.extend(places)

    def fail(self, error: GradcommError) -> None:
        self._error = error

    @property
    def arrived(self) -> bool:
        """Whether :meth:`finish` would not wait."""
        return self.over or self._error is not None or len(self._ready) == self._left

    def finish(self) -> torch.Tensor:
        """Wait for the result and copy it out. Raises the job's failure."""
        with self._lock:
            if self.over:
                if self.skipped:
                    raise self._given_up()
                return self.result
            session, began = self.session, time.monotonic()
            tracing = session.tracing
            while self._left:
                if not self._ready:
                    self._wait(lambda: bool(self._ready) or self._error is not None, began)
                    if self._error is not None and not self._ready:
                        raise self._error.again()
                while self._ready:
                    place = self._ready[0]
                    self.skipped |= place.skipped
                    at = place.block.start * place.block.dtype.itemsize
                    copying = tracing.now() if tracing.on else 0.0
                    if not place.skipped:
                        self._store(at, place)
                    if copying:
                        tracing.pulled(place, copying)
                    self._ready.popleft()  # only now: a store that raises can be tried again
                    place.op = None
                    self._left -= 1
            self._memory.settle()
            if not self.skipped:
                self._write_back()
            self._end()
            session.counters.wait_seconds += time.monotonic() - began
            session.counters.bytes_pulled += self._flat.nbytes
            if self.skipped:
                session.counters.skipped_steps += 1
                raise self._given_up()
            return self.result

    def _store(self, at: int, place: BlockPlace) -> None:
        try:
            self._memory.store(at, at + place.block.nbytes, place.output)
        except ShapesDiffer:
            assert self.tensor.shared is not None
            raise await_verdict(self.session, self.tensor.shared, self.spec) from None

    def _write_back(self) -> None:
        """What was copied out becomes the result."""
        if self._flat.dtype is torch.bool:
            # Summed as bytes; torch expects a bool to be 0 or 1.
            self._flat.view(torch.uint8).ne_(0)
        device.put_back(self._flat, self.result)


def read_arguments(name: object, average: object) -> tuple[str | None, bool]:
    """(name, average) from two arguments in either order: BytePS has ``average`` first, and types tell them apart."""
    if isinstance(name, bool):
        name, average = (None if average is True else average), name
    if not (name is None or isinstance(name, str)) or not isinstance(average, bool | int):
        raise TypeError(
            "push_pull takes (tensor, name: str or None, average: bool), got "
            f"name={name!r}, average={average!r}; give them by keyword: push_pull(tensor, name=..., average=...)"
        )
    return None if name is None else arguments.read_name(name), bool(average)


def _alike(tensor: torch.Tensor, resident: torch.Tensor | None) -> bool:
    """Whether both are the same elements in the same order."""
    return resident is not None and (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) == (
        resident.data_ptr(),
        resident.dtype,
        resident.shape,
        resident.stride(),
    )


def _view(tensor: torch.Tensor) -> str:
    """For messages."""
    return f"shape {list(tensor.shape)} strides {list(tensor.stride())} {tensor.dtype} at {tensor.data_ptr():#x}"


class Calls:
    """Names, unnamed places and pushes of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        #: by domain and name
        self._named: dict[tuple[int, str], Tensor] = {}
        self._unnamed = Places(session, lambda: exact_domain(session), UNNAMED)
        #: names of tensors that live in the arena, by their first address
        self._residents: dict[int, str] = {}
        self._results = Results()
        self._lock = threading.RLock()
        if EXACT in session.found:
            self._unnamed.come_into()

    def start(
        self, tensor: torch.Tensor, name: str | None, average: bool, in_place: bool, codec: str | None = None
    ) -> Call:
        """Push ``tensor``; returns its handle. ``codec``: for it alone, LOSSLESS for none (default: the job's). Without
        a name it is pushed losslessly in any case.

        Raises ValueError for what cannot be exchanged or averaged, TypeError for a tensor without memory of its own and
        for arguments in another order.
        """
        name, average = read_arguments(name, average)
        own = read_codec(codec)
        session = self.session
        session.check()
        dtype = device.check_pushed(tensor, name, average)
        if not own and (name is not None or self._residents):
            name = self._name_of(tensor, name)
        flat = device.flattened(tensor)
        with self._lock:
            domain = domain_of(session, name, own)
            known = self._find(domain, name, tuple(tensor.shape), dtype)
            known.vacate()
            memory = device.memory_of(flat)
            if known.resident is not None:
                memory = device.ResidentMemory(flat)
            if in_place:
                call = Call(session, known, flat, memory, tensor.detach())
            else:
                target = self._results.like(flat)
                call = Call(session, known, target, device.memory_of(target), target.view(tensor.shape))
            known.call = call
            session.pending.add(call)
            pushed = known.memory(call.spec, memory)
            call.step = push(domain, known, call, pushed, int(Flag.AVERAGE) if average else 0)
            session.counters.calls += 1
            session.counters.bytes_pushed += flat.nbytes
        if session.failure is not None:
            call.fail(session.failure.again())
        return call

    def _name_of(self, tensor: torch.Tensor, name: str | None) -> str | None:
        """The name to push ``tensor`` under: a resident's own if it is that tensor, shape and strides included; part
        of one, or another view, is a tensor like any other. Raises ValueError for another one under that name."""
        if name is None:
            name = self._residents.get(tensor.data_ptr())
            return name if name is not None and _alike(tensor, self._named[CALLS, name].resident) else None
        known = self._named.get((CALLS, name))
        if known is not None and known.resident is not None and not _alike(tensor, known.resident):
            raise ValueError(
                f"{name!r} lives in the arena since gcclient.empty(), as {_view(known.resident)}; got {_view(tensor)}: "
                "push the tensor that empty() returned, or another one under another name"
            )
        return name

    def empty(self, name: str, shape: tuple[int | Sequence[int], ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor that lives in the input slots of ``name``; the same one at every call. All ranks together."""
        name, shape = arguments.read_name(name), arguments.read_shape(shape)
        code = device.DTYPES.get(dtype)
        if code is None:
            raise ValueError(f"tensor {name!r} in the arena needs a dtype that can be exchanged, got {dtype}")
        with self._lock:
            known = self._find(domain_of(self.session, name), name, shape, code)
            known.vacate()
            if known.resident is None:
                raw = windows.inputs(known.places)
                empty = torch.empty(0, dtype=dtype, device=device.HOST)
                flat = torch.from_numpy(raw).view(dtype) if raw.size else empty
                known.resident = flat.view(shape)
                if known.places:
                    self._residents[flat.data_ptr()] = name
            return known.resident

    def admit(self) -> tuple[int, ...]:
        """See :func:`gcclient.admit`."""
        session = self.session
        session.check()
        if not session.job.commits:
            return ()
        if session.pending:
            raise RuntimeError("admit() was called while results are awaited: synchronize handles before it")
        # Daemons hear of who waits at different moments; ranks must find it alike.
        waits = torch.tensor([int(session.membership.waiting)], device=device.HOST)
        try:
            self.start(waits, "gcclient.admit", average=False, in_place=True, codec=LOSSLESS).finish()
        except StepSkipped:
            return ()
        return session.admission.point() if int(waits) else ()

    # ------------------------------------------------------------------------------------------ names
    def _find(self, domain: Domain, name: str | None, shape: tuple[int, ...], dtype: DType) -> Tensor:
        if name is None:
            return self._unnamed.find(shape, dtype)
        key = (domain.id, name)
        known = self._named.get(key)
        spec = TensorSpec(name, shape, int(dtype))
        if known is None:
            known = self._named[key] = declare(self.session, domain, spec)
        elif known.spec != spec:
            self._contradict(domain, known.index, spec)
        return known

    def _contradict(self, domain: Domain, index: int, tensor: TensorSpec) -> None:
        """A tensor of agreed section ``index`` is something else here: let the daemon tell all ranks so."""
        self.session.daemon.control.post(DeclareSection(domain.id, Section(index, (tensor,))))
        self.session.wait_for(lambda: False, f"the daemon to refuse {tensor.describe()}", "declare", GRACE)
