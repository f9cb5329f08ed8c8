"""topk on tensors: exactly the k elements of largest magnitude of each segment.

What may live here: the codec. Equal to the daemon's payload to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcclient.gpu_codecs.base import Pending, register
from gcclient.gpu_codecs.ops import count_nonfinite
from gcclient.gpu_codecs.sparse import Sparse, largest
from gcproto.layouts import CodecId, wanted


@register
class TopK(Sparse):
    """k elements and their indices; ties go to the lowest index."""

    id, name = CodecId.TOPK, "topk"

    def encode(
        self,
        x: Tensor,
        state_in: Tensor | None,
        state_out: Tensor | None,
        out: Tensor,
        segments: Sequence[int] | None = None,
        scale: float = 1.0,
        seed: int = 0,
        levels: Sequence[int] | None = None,
    ) -> Pending:
        parts, each = self.prepare(x, state_in, state_out, out, segments, levels)
        state = self.correct(x, state_in, state_out, scale)
        counts = [wanted(stop - start, level) for (start, stop), level in zip(parts, each, strict=True)]
        chosen = [largest(state[0][a:b], k) + a for (a, b), k in zip(parts, counts, strict=True) if k]
        index = torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=x.device)
        bad = count_nonfinite(state[0])
        return self.write(out, counts, index, state, bad, kept=state_out is not None)
