"""Many tensors from one rank to all, bit by bit.

What may live here: broadcasts of bytes, of named tensors and of an optimizer's state. What may not: averages.

The root pushes its bytes as integers, the others push zeros, and the sum is what the root pushed: exact for
NaN, -0.0 and every dtype. Bytes go through small staging areas in turns, so that a large model does not need
its size again in shared memory. What is to come is agreed first: the root's list of names, shapes and dtypes
goes ahead, every rank compares, and the verdict is exchanged, so that a difference is an error everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from gcclient import device
from gcclient.calls import Call, Calls
from gcclient.device import Bytes
from gcclient.errors import PeerLost, TensorMismatch
from gcclient.plain import Plain, PlainCall, PlainCalls

#: Bytes of the staging areas. The largest travels as one block; two of it take turns.
STAGES: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
#: A list of tensors is not longer than this, bytes of JSON.
MAX_TEXT: Final = 256 << 20


class _Stream:
    """Several byte arrays as one."""

    def __init__(self, arrays: Sequence[Bytes]) -> None:
        self.arrays = arrays
        self.nbytes = sum(a.nbytes for a in arrays)

    def pieces(self, lo: int, hi: int) -> list[tuple[int, Bytes]]:
        """(offset in lo:hi, view) of what lies in bytes ``lo:hi``."""
        out, start = [], 0
        for array in self.arrays:
            a, b = max(lo, start), min(hi, start + array.nbytes)
            if a < b:
                out.append((a - lo, array[a - start : b - start]))
            start += array.nbytes
            if start >= hi:
                break
        return out


def _payload(calls: Calls | PlainCalls, arrays: Sequence[Bytes], root: int) -> None:
    """Overwrite ``arrays`` (uint8, of equal lengths on all ranks) with the root's."""
    stream = _Stream(arrays)
    is_root = calls.session.me.rank == root
    under_way: list[tuple[Call | PlainCall, int, int]] = []
    at = turn = 0
    while at < stream.nbytes or under_way:
        if at < stream.nbytes:
            n = min(stream.nbytes - at, STAGES[-1])
            stage = next(s for s in STAGES if s >= n)
            buffer = torch.zeros(stage // 8, dtype=torch.int64)
            if is_root:
                area = buffer.view(torch.uint8).numpy()
                for offset, piece in stream.pieces(at, at + n):
                    np.copyto(area[offset : offset + piece.nbytes], piece)
            name = f"broadcast.{stage}.{turn % 2}"
            under_way.append((calls.start(buffer, name, average=False, in_place=True, exact=True), at, n))
            at, turn = at + n, turn + 1
        if len(under_way) == 2 or at >= stream.nbytes:
            call, lo, n = under_way.pop(0)
            area = call.finish().view(torch.uint8).numpy()
            if not is_root:
                for offset, piece in stream.pieces(lo, lo + n):
                    np.copyto(piece, area[offset : offset + piece.nbytes])
    _root_is_left(calls, root)


def _root_is_left(calls: Calls | PlainCalls, root: int) -> None:
    """Raises :class:`PeerLost` if what was just received may lack the root's part: it was zeros then."""
    session = calls.session
    if isinstance(session, Plain):
        return
    membership = session.membership
    session.wait_for(lambda: membership.current, "the members of a new epoch", "exchange", session.job.deadline)
    if root not in membership.ranks:
        raise PeerLost(
            f"rank {root}, the root of a broadcast, was lost",
            job=session.label,
            epoch=membership.epoch,
            phase="exchange",
            missing=(f"rank {root}",),
            advice="broadcast again from a rank that is left; what was to be overwritten may be half written",
        )


def _text(calls: Calls | PlainCalls, text: bytes, root: int) -> bytes:
    """The root's ``text``. Raises :class:`TensorMismatch` on all ranks when they name different roots."""
    size, me = calls.session.me.size, calls.session.me.rank
    if not 0 <= root < size:
        raise ValueError(f"root_rank must be within 0..{size - 1}, got {root}")
    head = torch.tensor([len(text) if me == root else 0, root, root * root, 1])
    calls.start(head, "broadcast.head", average=False, in_place=True, exact=True).finish()
    length, total, squares, ranks = (int(v) for v in head)
    _root_is_left(calls, root)
    if total != ranks * root or squares != ranks * root * root:
        raise TensorMismatch(
            f"ranks name different roots for a broadcast (rank {me}: {root})",
            job=calls.session.label,
            phase="declare",
            advice="give the same root_rank on every rank",
        )
    if length > MAX_TEXT:
        raise TensorMismatch(f"the root's list of tensors has {length} bytes, at most {MAX_TEXT} are accepted")
    data = np.frombuffer(text, np.uint8).copy() if me == root else np.zeros(length, np.uint8)
    _payload(calls, [data], root)
    return data.tobytes()


def _agree(calls: Calls | PlainCalls, complaint: str) -> None:
    """Exchange verdicts: with a complaint anywhere, all ranks raise the lowest complaining rank's."""
    size, me = calls.session.me.size, calls.session.me.rank
    verdicts = torch.zeros(size, dtype=torch.int64)
    verdicts[me] = 1 if complaint else 0
    calls.start(verdicts, f"broadcast.verdicts.{size}", average=False, in_place=True, exact=True).finish()
    wrong = [int(r) for r in verdicts.nonzero()]
    if wrong:
        message = _text(calls, complaint.encode(), wrong[0]).decode()
        raise TensorMismatch(
            message,
            job=calls.session.label,
            phase="declare",
            missing=tuple(f"rank {r}" for r in wrong),
            advice="give the same tensors in the same order on every rank",
        )


def _difference(mine: list[Any], theirs: list[Any], me: int, root: int) -> str:
    """One sentence naming the first tensor in which this rank's list differs from the root's; empty if none does."""
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return (
                f"tensor {i} of a broadcast differs: {a[0]!r} shape {a[1]} dtype {a[2]} on rank {me}, "
                f"{b[0]!r} shape {b[1]} dtype {b[2]} on rank {root}"
            )
    if len(mine) != len(theirs):
        extra, where = (mine, me) if len(mine) > len(theirs) else (theirs, root)
        first = extra[min(len(mine), len(theirs))]
        return (
            f"rank {me} gives {len(mine)} tensors to a broadcast, rank {root} {len(theirs)}; "
            f"{first[0]!r} is only on rank {where}"
        )
    return ""


def _host_bytes(tensor: torch.Tensor) -> tuple[torch.Tensor, Bytes]:
    """(contiguous CPU tensor, its bytes); shares memory with ``tensor`` where that is one already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).resolve_conj().resolve_neg()
    return flat, device.host_bytes(flat, flat.data_ptr())


def tensors(calls: Calls | PlainCalls, named: Sequence[tuple[str, torch.Tensor]], root: int) -> None:
    """Overwrite ``named`` tensors with the root's (see :func:`gcclient.broadcast_parameters`)."""
    me = calls.session.me.rank
    mine = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in named]
    theirs = json.loads(_text(calls, json.dumps(mine).encode(), root))
    _agree(calls, _difference(mine, theirs, me, root))
    hosts = [_host_bytes(t) for _, t in named]
    _payload(calls, [data for _, data in hosts], root)
    if me != root:
        with torch.no_grad():
            for (_, tensor), (flat, _) in zip(named, hosts, strict=True):
                if tensor.numel() and flat.data_ptr() != tensor.data_ptr():
                    tensor.copy_(flat.view(tensor.shape))


# ------------------------------------------------------------------------------------------ optimizers
def _pack(value: Any, found: list[torch.Tensor]) -> Any:
    """``value`` as JSON; tensors are put aside, tuples and non-string keys marked. Raises TypeError."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return {"tensor": len(found) - 1, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_pack(v, found) for v in value]}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, int | str) or isinstance(key, bool):
                raise TypeError(f"an optimizer state's key must be a number or a string, got {key!r}")
        return {"dict": [[k, _pack(v, found)] for k, v in value.items()]}
    raise TypeError(
        f"an optimizer state holds a {type(value).__name__}; tensors, numbers, strings, None and lists, tuples and "
        "dictionaries of them can be broadcast"
    )


def _unpack(packed: Any, found: Sequence[torch.Tensor]) -> Any:
    ((kind, value), *_) = packed.items()
    if kind == "tensor":
        return found[value]
    if kind == "list":
        return [_unpack(v, found) for v in value]
    if kind == "tuple":
        return tuple(_unpack(v, found) for v in value)
    if kind == "dict":
        return {k: _unpack(v, found) for k, v in value}
    return value


def _specs(packed: Any) -> list[tuple[list[int], str]]:
    """Shapes and dtypes of the tensors in ``packed``, in their order."""
    if "tensor" in packed:
        return [(packed["shape"], packed["dtype"])]
    children = packed.get("list") or packed.get("tuple") or [v for _, v in packed.get("dict", ())]
    return [spec for child in children for spec in _specs(child)]


def optimizer_state(calls: Calls | PlainCalls, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Make ``optimizer``'s state the root's (see :func:`gcclient.broadcast_optimizer_state`)."""
    me = calls.session.me.rank
    mine: list[torch.Tensor] = []
    groups = [len(g["params"]) for g in optimizer.param_groups]
    text = b""
    if me == root:
        try:
            packed = {"groups": groups, "state": _pack(optimizer.state_dict(), mine)}
        except TypeError as error:
            packed = {"error": str(error)}
        text = json.dumps(packed).encode()
    theirs = json.loads(_text(calls, text, root))
    if "error" in theirs:
        raise TypeError(f"rank {root}: {theirs['error']}")
    different = theirs["groups"] != groups
    _agree(
        calls,
        f"the optimizer has parameter groups of {groups} parameters on rank {me}, of {theirs['groups']} on rank {root}"
        if different
        else "",
    )
    if me != root:
        mine = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in _specs(theirs["state"])]
    _payload(calls, [_host_bytes(t)[1] for t in mine], root)
    if me != root:
        optimizer.load_state_dict(_unpack(theirs["state"], mine))
