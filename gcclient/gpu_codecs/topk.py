"""topk on tensors: exactly the k elements of largest magnitude of each segment.

What may live here: the codec. Equal to the daemon's payload to the bit.
"""

from __future__ import annotations

from gcclient.gpu_codecs.base import Pending, Work, register
from gcclient.gpu_codecs.ops import count_nonfinite
from gcclient.gpu_codecs.sparse import Sparse, joined, largest
from gcproto.layouts import CodecId


@register
class TopK(Sparse):
    """k elements and their indices; ties go to the lowest index."""

    id, name = CodecId.TOPK, "topk"

    def compress(self, work: Work) -> Pending:
        v, counts = work.v, self.counts_of(work)
        chosen = [largest(v[a:b], k) + a for (a, b), k in zip(work.parts, counts, strict=True) if k]
        return self.write(work, counts, joined(chosen, v.device), count_nonfinite(v))
