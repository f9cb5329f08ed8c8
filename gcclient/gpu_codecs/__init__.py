"""Codecs on torch tensors: the daemon's payloads, written and read where the gradient already is.

One file per family; ``make`` is the entrance. Every payload can be decoded by the daemon and the other way round,
and every state is laid out as the daemon's, so that a plan can move a codec from one device to the other with its
residual. Written with torch operations for CUDA, and the same code runs (and is tested) on the CPU. Nothing of
gcserver is imported: what both sides must agree on is in `gcproto.layouts` and `docs/codecs.md`.
"""

# Imported for what they register.
from gcclient.gpu_codecs import casts, quantise, randomk, sidco, signs, topk  # noqa: F401
from gcclient.gpu_codecs.base import Encoded, GpuCodec, GpuCodecError, Pending
from gcclient.gpu_codecs.ops import compile_kernels
from gcclient.gpu_codecs.specs import make, names

__all__ = ["Encoded", "GpuCodec", "GpuCodecError", "Pending", "compile_kernels", "make", "names"]
