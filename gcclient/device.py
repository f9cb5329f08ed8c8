"""Everything that touches the device a tensor lives on: copies between it and the arena.

What may live here: one class per kind of device with the same few methods, and dtype facts. What may not:
protocol, steps, sockets.

On the CPU a copy is one memcpy, single threaded (the daemon's lanes use the other cores) and without the
interpreter lock. On CUDA copies run on a side stream between the device and pinned arena memory.
"""

from __future__ import annotations

import threading
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gcclient.bell import Wait
from gcproto.dtypes import DType

Bytes = npt.NDArray[np.uint8]

#: Where gcclient's own tensors are, whatever the script has told torch.set_default_device.
HOST: Final = torch.device("cpu")

#: Elements of a tensor that are looked at to see whether it was written to.
SAMPLED: Final = 64

DTYPES: dict[torch.dtype, DType] = {
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float64: DType.F64,
    torch.int8: DType.I8,
    torch.int16: DType.I16,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
    torch.uint8: DType.U8,
    torch.bool: DType.BOOL,
}


def elsewhere(tensor: torch.Tensor) -> str:
    """Why the elements of ``tensor`` are not where its own memory is, and what to give instead; empty if they are.

    Subclasses may wrap other tensors: a DTensor its local part, whose address is then the only one. Told by what torch
    asks of such classes, since one without elements has no address either, and importing each of them takes long.
    """
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return ""
    if not is_traceable_wrapper_subclass(tensor) and (tensor.is_meta or not tensor.numel() or tensor.data_ptr()):
        return ""
    why = f"it is a {kind.__name__}, which has no memory of its own"
    if hasattr(tensor, "to_local"):
        return (
            f"{why}: give tensor.to_local(), this rank's part (of a model: gcclient.fsdp2 or gcclient.attach where "
            "fully_shard was applied, DistributedDataParallel(model, device_mesh=) where it is tensor parallel)"
        )
    return f"{why}: give a plain torch.Tensor of its values"


def dtype_of(tensor: torch.Tensor, name: str) -> DType:
    """The wire dtype of ``tensor``. Raises TypeError for one without memory of its own, such as a DTensor, ValueError
    for a dtype that cannot be exchanged."""
    if why := elsewhere(tensor):
        raise TypeError(f"tensor {name!r} cannot be exchanged: {why}")
    try:
        return DTYPES[tensor.dtype]
    except KeyError:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(
            f"tensor {name!r} has dtype {str(tensor.dtype).removeprefix('torch.')}; accepted are {known} "
            "(give a complex tensor as torch.view_as_real of it)"
        ) from None


def check_pushed(tensor: torch.Tensor, name: str | None, average: bool) -> DType:
    """The wire dtype of a tensor that is to be pushed. Raises TypeError and ValueError for what cannot be exchanged or
    averaged."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of layout {tensor.layout} cannot be pushed; use tensor.to_dense()")
    dtype = dtype_of(tensor, name or "(unnamed)")
    if average and not dtype.is_float:
        raise ValueError(
            f"tensor {name or '(unnamed)'} has dtype {dtype.label}, whose average is not exact: pass average=False "
            "for the sum (then divide), or convert the tensor to a floating type"
        )
    return dtype


class Memory(Protocol):
    """The bytes of a flat, contiguous tensor on its device.

    ``load`` copies bytes ``lo:hi`` into arena memory, ``store`` copies them back. Either may only have been
    queued when it returns: after ``settle`` all are done. ``queued`` says how to wait elsewhere for what is queued so
    far; None where nothing is.
    """

    def load(self, lo: int, hi: int, target: Bytes) -> None: ...

    def store(self, lo: int, hi: int, source: Bytes) -> None: ...

    def queued(self) -> Wait | None: ...

    def settle(self) -> None: ...


class _Exported:
    """What numpy asks for the memory of a CPU tensor. Whoever holds the array holds the tensor by it."""

    __slots__ = ("__array_interface__", "flat")

    def __init__(self, flat: torch.Tensor, address: int) -> None:
        self.flat = flat
        self.__array_interface__ = {"data": (address, False), "shape": (flat.nbytes,), "typestr": "|u1", "version": 3}


def host_bytes(flat: torch.Tensor, address: int) -> Bytes:
    """The bytes of a flat, contiguous CPU tensor at ``address`` (its ``data_ptr()``), as uint8[nbytes] of the same
    memory, valid for as long as nobody resizes its storage.

    By address: ``Tensor.numpy()`` would make that storage one that can never be resized again, and it is the user's.
    """
    return np.asarray(_Exported(flat, address))


class HostMemory:
    """A CPU tensor."""

    __slots__ = ("_address", "_data", "_flat")

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._address = flat.data_ptr()
        self._data = host_bytes(flat, self._address)

    def load(self, lo: int, hi: int, target: Bytes) -> None:
        np.copyto(target, self._data[lo:hi])

    def store(self, lo: int, hi: int, source: Bytes) -> None:
        """Raises ValueError when the storage has become too small since the push."""
        address, storage = self._flat.data_ptr(), self._flat.untyped_storage()
        if address + hi > storage.data_ptr() + storage.nbytes():
            raise ValueError(
                f"the storage of a pushed tensor of {self._flat.nbytes} bytes was resized to {storage.nbytes()} before "
                "its result came: synchronize first"
            )
        if address != self._address:
            self._address, self._data = address, host_bytes(self._flat, address)
        np.copyto(self._data[lo:hi], source)

    def queued(self) -> Wait | None:
        return None

    def settle(self) -> None:
        pass


class ResidentMemory(HostMemory):
    """A CPU tensor that lives in its input slots: what is to be pushed is there already."""

    __slots__ = ()

    def load(self, lo: int, hi: int, target: Bytes) -> None:
        pass


class CudaMemory:
    """A CUDA tensor: asynchronous copies on a side stream that waits for the work queued so far."""

    __slots__ = ("_data", "stream")

    def __init__(self, flat: torch.Tensor) -> None:
        self._data = flat.view(torch.uint8)
        self.stream = side_stream(flat.device)
        self.stream.wait_stream(torch.cuda.current_stream(flat.device))
        # The allocator must not hand this memory to the main stream while a copy is queued.
        self._data.record_stream(self.stream)

    def load(self, lo: int, hi: int, target: Bytes) -> None:
        with torch.cuda.stream(self.stream):
            torch.from_numpy(target).copy_(self._data[lo:hi], non_blocking=True)

    def store(self, lo: int, hi: int, source: Bytes) -> None:
        with torch.cuda.stream(self.stream):
            self._data[lo:hi].copy_(torch.from_numpy(source), non_blocking=True)

    def queued(self) -> Wait | None:
        # Who waits sleeps: spinning would take a core from lanes and from the computation.
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        wait: Wait = event.synchronize
        return wait

    def settle(self) -> None:
        self.stream.synchronize()


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of ``tensor`` one after the other, detached: a view where they lie so, else a copy."""
    source = tensor.detach()
    flat = source.reshape(-1) if source.is_contiguous() else source.contiguous().view(-1)
    return flat.resolve_neg()  # bytes are copied, not values


def put_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """What became of :func:`flattened`'s elements of a detached tensor goes back into it, where they are a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def sample(tensor: torch.Tensor) -> bytes:
    """At most SAMPLED elements of a tensor, evenly spread over its memory: equal at two times if nobody wrote to them.

    Empty where looking costs more or cannot be done: on other devices than the CPU, with gaps between elements, with a
    storage that became too small.
    """
    if tensor.device.type != "cpu" or not _is_dense(tensor):
        return b""
    address, storage = tensor.data_ptr(), tensor.untyped_storage()
    if address + tensor.nbytes > storage.data_ptr() + storage.nbytes():
        return b""
    elements = host_bytes(tensor, address).view(f"V{tensor.element_size()}")
    # At an odd distance: rows have even lengths, mostly, and not all of these elements are to be of one column.
    return elements[:: -(-len(elements) // SAMPLED) | 1].tobytes()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each once, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def memory_of(flat: torch.Tensor) -> Memory:
    """The memory of a flat, contiguous, detached tensor. Raises ValueError for an unknown device."""
    if flat.device.type == "cpu":
        return HostMemory(flat)
    if flat.device.type == "cuda":
        return CudaMemory(flat)
    raise ValueError(f"tensors on {flat.device.type!r} cannot be exchanged; accepted are cpu and cuda")


_streams: dict[torch.device, torch.cuda.Stream] = {}
_streams_lock = threading.Lock()


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream gcclient's copies of ``device`` run on."""
    with _streams_lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        return _streams[device]


def pin(chunk: Bytes) -> bool:
    """Register an arena chunk with CUDA, so that copies from and to it are asynchronous.

    Without CUDA in use nothing is done. Returns whether it is pinned; copies are correct either way.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    code: Any = torch.cuda.cudart().cudaHostRegister(chunk.ctypes.data, chunk.nbytes, 0)
    return int(code) == 0


def unpin(chunk: Bytes) -> None:
    """Undo :func:`pin`; call before the mapping goes away."""
    torch.cuda.cudart().cudaHostUnregister(chunk.ctypes.data)


def future_for(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """An incomplete Future for results on ``tensor``'s device."""
    if tensor.device.type == "cpu":
        return torch.futures.Future()
    return torch.futures.Future(devices=[tensor.device])


def unchanged(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A complete Future of ``tensor`` as it is."""
    future = future_for(tensor)
    future.set_result(tensor)
    return future


def complete(future: torch.futures.Future[torch.Tensor], result: torch.Tensor, memory: Memory) -> None:
    """Complete ``future`` with ``result`` once what was queued on ``memory`` is done.

    On CUDA nobody waits here: the future takes the side stream's position with it, and whoever uses the result
    makes its own stream wait for that. Raises what the device does; whoever waits for the future hears of it as well.
    """
    try:
        if isinstance(memory, CudaMemory):
            with torch.cuda.stream(memory.stream):
                future.set_result(result)
        else:
            future.set_result(result)
    except BaseException as error:
        if not future.done():
            future.set_exception(error)  # type: ignore[arg-type]
        raise
