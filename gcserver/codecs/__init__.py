"""Compression codecs and reduction kernels of the daemon.

One file per family, found by `registry`; the interface in ``base``, spec strings in ``spec``, the
uncompressed reductions in ``reduce``, ahead-of-time compilation in ``warmup``. Imports numpy and numba
only: nothing here knows of sockets, torch, or the protocol, so that a kernel can be tested and timed alone.
"""

from gcserver.codecs.base import Codec, CodecError, Encoded, Param, register
from gcserver.codecs.registry import by_id, names, parse

__all__ = ["Codec", "CodecError", "Encoded", "Param", "by_id", "names", "parse", "register"]
