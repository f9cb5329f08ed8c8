"""Python values as JSON and tensors beside it: what is broadcast or gathered without pickle.

What may live here: from a value to JSON and back, and both in one string of bytes. What may not: sending.

Pickle would run code that another rank chose. So a value is what JSON can hold, with tensors in any place of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from gcclient import device
from gcclient.device import Bytes

_LENGTH: Final = struct.Struct("<Q")
ACCEPTED: Final = "tensors, numbers, strings, None and lists, tuples and dictionaries of them"


def pack(value: Any, found: list[torch.Tensor]) -> Any:
    """``value`` as JSON; tensors are put aside, tuples and non-string keys marked. Raises TypeError."""
    if isinstance(value, torch.Tensor):
        if why := unsendable(value):
            raise TypeError(f"a tensor of shape {list(value.shape)} cannot be sent to other ranks: {why}")
        found.append(value)
        return {"tensor": len(found) - 1, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [pack(v, found) for v in value]}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, int | str) or isinstance(key, bool):
                raise TypeError(f"a dictionary's key must be a number or a string to be sent, got {key!r}")
        return {"dict": [[k, pack(v, found)] for k, v in value.items()]}
    raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks, and nothing is pickled: {ACCEPTED} can")


def unsendable(tensor: torch.Tensor) -> str:
    """Why the bytes of a tensor are not all there is to it; empty where they are."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}, send tensor.to_dense()"
    if why := device.elsewhere(tensor):
        return why
    if tensor.is_quantized:
        return "it is quantized, send tensor.dequantize()"
    return "it has no values (device meta)" if tensor.is_meta else ""


def to_text(value: Any) -> tuple[bytes, list[Bytes]]:
    """:func:`pack` as text, and the bytes of the tensors; the text of ``{"error": why}`` where something of the value
    cannot be sent, or its bytes not be had: every rank is to hear of it, and has nothing but the text to hear it by."""
    found: list[torch.Tensor] = []
    try:
        return json.dumps(pack(value, found)).encode(), [host_bytes(t)[1] for t in found]
    except TypeError as error:
        why = str(error)
    # Of lists within themselves, numbers too long for text, devices, and whatever a class of the user's own raises.
    except Exception as error:
        why = f"a value cannot be sent to other ranks: {error}"
    return json.dumps({"error": why}).encode(), []


def unpack(packed: Any, found: Sequence[torch.Tensor]) -> Any:
    """What :func:`pack` was given, with the tensors ``found`` in their places."""
    ((kind, value), *_) = packed.items()
    if kind == "tensor":
        return found[value]
    if kind == "list":
        return [unpack(v, found) for v in value]
    if kind == "tuple":
        return tuple(unpack(v, found) for v in value)
    if kind == "dict":
        return {k: unpack(v, found) for k, v in value}
    return value


def empties(packed: Any) -> list[torch.Tensor]:
    """CPU tensors for those in ``packed``, in their order, uninitialised."""
    if "tensor" in packed:
        return [torch.empty(packed["shape"], dtype=getattr(torch, packed["dtype"]), device=device.HOST)]
    children = packed.get("list") or packed.get("tuple") or [v for _, v in packed.get("dict", ())]
    return [tensor for child in children for tensor in empties(child)]


def host_bytes(tensor: torch.Tensor) -> tuple[torch.Tensor, Bytes]:
    """(contiguous CPU tensor, its bytes); shares memory with ``tensor`` where that is one already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).resolve_conj().resolve_neg()
    return flat, device.host_bytes(flat, flat.data_ptr())


def encode(value: Any) -> bytes:
    """``value`` in one string: the length of its JSON, that, and the bytes of its tensors. What cannot be sent is
    encoded as why."""
    text, arrays = to_text(value)
    return b"".join((_LENGTH.pack(len(text)), text, *(a.tobytes() for a in arrays)))


def decode(data: bytes) -> Any:
    """What :func:`encode` was given, with tensors of their own on the CPU. Raises TypeError with what could not be
    sent."""
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    packed = json.loads(data[_LENGTH.size : at])
    if "error" in packed:
        raise TypeError(packed["error"])
    found = empties(packed)
    for tensor in found:
        into = host_bytes(tensor)[1]
        np.copyto(into, np.frombuffer(data, np.uint8, into.nbytes, at))
        at += into.nbytes
    return unpack(packed, found)
