"""From every rank to all, bit by bit.

What may live here: gathering bytes, tensors and values. What may not: averages, how values become bytes (`objects.py`).

Every rank pushes its bytes with zeros in place of the others', as in a broadcast, so that the sum is all of them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from gcclient import objects
from gcclient.broadcasts import Stream, check_left, members, share
from gcclient.calls import LOSSLESS, Calls
from gcclient.device import HOST, Bytes
from gcclient.errors import TensorMismatch
from gcclient.plain import PlainCalls


def byte_strings(calls: Calls | PlainCalls, mine: bytes) -> dict[int, bytes]:
    """Every rank's bytes, by its number at the start of the job. Raises :class:`PeerLost` if one is lost meanwhile."""
    me, size = calls.session.me.rank, calls.session.me.size
    ranks = members(calls)
    lengths = torch.zeros(size, dtype=torch.int64, device=HOST)
    lengths[me] = len(mine)
    calls.start(lengths, f"gcclient.gather.lengths.{size}", average=False, in_place=True, codec=LOSSLESS).finish()
    ends = lengths.cumsum(0).tolist()
    data = np.zeros(ends[-1], np.uint8)
    lo = ends[me] - len(mine)
    data[lo : ends[me]] = np.frombuffer(mine, np.uint8)
    share(calls, Stream([data]), lo, ends[me])
    _nobody_was_lost(calls, ranks)
    return {rank: data[ends[rank] - int(lengths[rank]) : ends[rank]].tobytes() for rank in ranks}


def _nobody_was_lost(calls: Calls | PlainCalls, before: tuple[int, ...]) -> None:
    check_left(calls, before, " was lost while tensors were gathered", "gather again from those that are left")


def values(calls: Calls | PlainCalls, mine: Any) -> list[Any]:
    """Every rank's value, in rank order. Raises TypeError on every rank where one of them cannot be sent."""
    out = []
    for rank, data in byte_strings(calls, objects.encode(mine)).items():
        try:
            out.append(objects.decode(data))
        except TypeError as error:
            raise TypeError(f"rank {rank}: {error}") from None
    return out


def tensors(calls: Calls | PlainCalls, mine: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, one after the other along the first dimension (see :func:`gcclient.allgather`)."""
    if mine.layout is not torch.strided or not mine.dim():
        raise ValueError(
            f"a tensor of shape {list(mine.shape)} and layout {mine.layout} cannot be gathered: expected a dense one "
            "with one dimension at least, such as tensor.reshape(1)"
        )
    if why := objects.unsendable(mine):
        raise TypeError(f"a tensor of shape {list(mine.shape)} cannot be gathered: {why}")
    me = calls.session.me.rank
    spec = [list(mine.shape), str(mine.dtype).removeprefix("torch.")]
    specs = {rank: json.loads(data) for rank, data in byte_strings(calls, json.dumps(spec).encode()).items()}
    first, (shape, dtype) = next(iter(specs.items()))
    for rank, (other, kind) in specs.items():
        if (other[1:], kind) != (shape[1:], dtype):
            raise TensorMismatch(
                f"tensors to be gathered differ in more than their first dimension: shape {other} dtype {kind} on rank "
                f"{rank}, shape {shape} dtype {dtype} on rank {first}",
                job=calls.session.label,
                phase="declare",
                missing=(f"rank {rank}",),
                advice="gather tensors that differ in their first dimension only",
            )
    rows = {rank: other[0] for rank, (other, _) in specs.items()}
    result = torch.empty((sum(rows.values()), *mine.shape[1:]), dtype=mine.dtype, device=HOST)
    _, data = objects.host_bytes(result)
    row = data.nbytes // max(sum(rows.values()), 1)
    lo = row * sum(n for rank, n in rows.items() if rank < me)
    own: Bytes = objects.host_bytes(mine)[1]
    np.copyto(data[lo : lo + own.nbytes], own)
    share(calls, Stream([data]), lo, lo + own.nbytes)
    _nobody_was_lost(calls, tuple(rows))
    return result.to(mine.device)
