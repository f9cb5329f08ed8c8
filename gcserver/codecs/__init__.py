"""Compression codecs and reduction kernels of the daemon.

One file per family (casts, topk, onebit), the interface in ``base``, the uncompressed reductions in
``reduce``, ahead-of-time compilation in ``warmup``. Imports numpy and numba only: nothing here knows
of sockets, torch, or the protocol, so that a kernel can be tested and timed alone.
"""

from gcserver.codecs.base import Codec, CodecError, Encoded, by_id, names, parse, register

__all__ = ["Codec", "CodecError", "Encoded", "by_id", "names", "parse", "register"]
