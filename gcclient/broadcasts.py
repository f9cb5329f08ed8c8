"""From one rank to all, bit by bit: tensors, an optimizer's state, any value without pickle.

What may live here: broadcasts, and the stream of bytes that they share with `gather.py`. What may not: averages, how
values become bytes (`objects.py`).

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

from gcclient import device, objects
from gcclient.calls import LOSSLESS, Call, Calls
from gcclient.device import HOST, Bytes
from gcclient.errors import PeerLost, TensorMismatch
from gcclient.plain import Plain, PlainCall, PlainCalls

#: Bytes of the staging areas. The largest travels as one block; two of it take turns.
STAGES: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
#: A list of tensors is not longer than this, bytes of JSON.
MAX_TEXT: Final = 256 << 20
#: what a rank may have against a broadcast
_DIFFERENT: Final = 1
_UNSENT: Final = 2


class Stream:
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


def share(calls: Calls | PlainCalls, stream: Stream, lo: int, hi: int) -> None:
    """Overwrite ``stream``, equally long on all ranks, with what each rank has in bytes ``lo:hi`` of its own.

    Every byte is some rank's, and no two ranks'.
    """
    under_way: list[tuple[Call | PlainCall, int, int]] = []
    at = turn = 0
    while at < stream.nbytes or under_way:
        if at < stream.nbytes:
            n = min(stream.nbytes - at, STAGES[-1])
            stage = next(s for s in STAGES if s >= n)
            buffer = torch.zeros(stage // 8, dtype=torch.int64, device=HOST)
            first = max(at, lo)
            area = buffer.view(torch.uint8).numpy()[first - at :] if first < at + n else None
            if area is not None:
                for offset, piece in stream.pieces(first, min(at + n, hi)):
                    np.copyto(area[offset : offset + piece.nbytes], piece)
            name = f"gcclient.broadcast.{stage}.{turn % 2}"
            under_way.append((calls.start(buffer, name, average=False, in_place=True, codec=LOSSLESS), at, n))
            at, turn = at + n, turn + 1
        if len(under_way) == 2 or at >= stream.nbytes:
            call, start, n = under_way.pop(0)
            area = call.finish().view(torch.uint8).numpy()
            if not lo <= start < start + n <= hi:
                for offset, piece in stream.pieces(start, start + n):
                    np.copyto(piece, area[offset : offset + piece.nbytes])


def _payload(calls: Calls | PlainCalls, arrays: Sequence[Bytes], root: int) -> None:
    """Overwrite ``arrays`` (uint8, of equal lengths on all ranks) with the root's."""
    stream = Stream(arrays)
    share(calls, stream, 0, stream.nbytes if calls.session.me.rank == root else 0)
    _root_is_left(calls, root)


def members(calls: Calls | PlainCalls) -> tuple[int, ...]:
    """The ranks that are in the job, by their first numbers, once that is known of the epoch under way."""
    session = calls.session
    membership = session.membership
    if not isinstance(session, Plain):
        session.wait_for(lambda: membership.current, "the members of a new epoch", "exchange", session.job.deadline)
    return membership.ranks


def check_left(calls: Calls | PlainCalls, ranks: Sequence[int], what: str, advice: str) -> None:
    """Raises :class:`PeerLost` if what was just received may lack the part of any of ``ranks``: it was zeros then.

    ``what``: of the first of them, what it was lost at.
    """
    if lost := sorted(set(ranks) - set(members(calls))):
        raise PeerLost(
            f"rank {lost[0]}{what}",
            job=calls.session.label,
            epoch=calls.session.membership.epoch,
            phase="exchange",
            missing=tuple(f"rank {rank}" for rank in lost),
            advice=advice,
        )


def _root_is_left(calls: Calls | PlainCalls, root: int) -> None:
    advice = "broadcast again from a rank that is left; what was to be overwritten may be half written"
    check_left(calls, (root,), ", the root of a broadcast, was lost", advice)


def _text(calls: Calls | PlainCalls, text: bytes, root: int) -> bytes:
    """The root's ``text``. Raises :class:`TensorMismatch` on all ranks when they name different roots."""
    size, me = calls.session.me.size, calls.session.me.rank
    if not 0 <= root < size:
        raise ValueError(f"root_rank must be within 0..{size - 1}, got {root}")
    head = torch.tensor([len(text) if me == root else 0, root, root * root, 1], device=HOST)
    calls.start(head, "gcclient.broadcast.head", average=False, in_place=True, codec=LOSSLESS).finish()
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


def _agree(calls: Calls | PlainCalls, different: str, unsent: str = "") -> None:
    """Exchange verdicts: with a complaint anywhere, all ranks raise the lowest complaining rank's, TypeError for what
    cannot be sent. One that differs is complained of as such."""
    size, me = calls.session.me.size, calls.session.me.rank
    complaint = different or unsent
    verdicts = torch.zeros(size, dtype=torch.int64, device=HOST)
    verdicts[me] = _DIFFERENT if different else _UNSENT if unsent else 0
    calls.start(verdicts, f"gcclient.broadcast.verdicts.{size}", average=False, in_place=True, codec=LOSSLESS).finish()
    wrong = [int(r) for r in verdicts.nonzero()]
    if wrong:
        message = _text(calls, complaint.encode(), wrong[0]).decode()
        if int(verdicts[wrong[0]]) == _UNSENT:
            raise TypeError(message)
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


def tensors(calls: Calls | PlainCalls, named: Sequence[tuple[str, torch.Tensor]], root: int) -> None:
    """Overwrite ``named`` tensors with the root's (see :func:`gcclient.broadcast_parameters`)."""
    me = calls.session.me.rank
    mine = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in named]
    theirs = json.loads(_text(calls, json.dumps(mine).encode(), root))
    unsent = (
        f"{name!r} on rank {me} cannot be broadcast: {why}" for name, t in named if (why := objects.unsendable(t))
    )
    _agree(calls, _difference(mine, theirs, me, root), next(unsent, ""))
    hosts = [objects.host_bytes(t) for _, t in named]
    _payload(calls, [data for _, data in hosts], root)
    if me != root:
        with torch.no_grad():
            for (_, tensor), (flat, _) in zip(named, hosts, strict=True):
                device.put_back(flat, tensor)


def value(calls: Calls | PlainCalls, mine: Any, root: int) -> Any:
    """The root's ``mine``: its own there, elsewhere made anew, with tensors on the CPU.

    Raises TypeError on every rank where it holds what cannot be sent.
    """
    is_root = calls.session.me.rank == root
    text, arrays = objects.to_text(mine) if is_root else (b"", [])
    packed = json.loads(_text(calls, text, root))
    if "error" in packed:
        raise TypeError(f"rank {root}: {packed['error']}")
    if is_root:
        _payload(calls, arrays, root)
        return mine
    found = objects.empties(packed)
    _payload(calls, [objects.host_bytes(t)[1] for t in found], root)
    return objects.unpack(packed, found)


def optimizer_state(calls: Calls | PlainCalls, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Make ``optimizer``'s state the root's (see :func:`gcclient.broadcast_optimizer_state`)."""
    me = calls.session.me.rank
    groups = [len(g["params"]) for g in optimizer.param_groups]
    theirs = value(calls, groups, root)
    different = theirs != groups
    _agree(
        calls,
        f"the optimizer has parameter groups of {groups} parameters on rank {me}, of {theirs} on rank {root}"
        if different
        else "",
    )
    state = value(calls, optimizer.state_dict() if me == root else None, root)
    if me != root:
        optimizer.load_state_dict(state)
