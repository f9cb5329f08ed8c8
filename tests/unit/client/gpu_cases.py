"""What the tests of the GPU codecs share: the same encode on both sides, and what is compared.

The GPU's side is on CPU tensors, unless ``TEST_DEVICE`` names another device, as ``cuda`` where there is one.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from gcclient.gpu_codecs import make
from gcserver.codecs import parse

#: where the GPU's side is
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
#: specs whose payloads are equal to the bit: nothing in them is a sum
EXACT = [
    "fp16",
    "bf16",
    "topk(ratio=0.1)",
    "topk(ratio=0.01)+ef(decay=0.5)",
    "topk(ratio=0.3)+ef(decay=0)",
    "topk(ratio=0.05,packed=1)",
    "topk(ratio=0.05,values=16)",
    "topk(ratio=0.05,packed=1,values=8)",
    "topk(ratio=0.1)+momentum(m=0.9)",
    "topk(ratio=0.1,values=8)+momentum(m=0.5,nesterov=1)",
    "randomk(ratio=0.1)",
    "randomk(ratio=0.1,values=16)",
    "randomk(ratio=0.1,unbiased=1)",
    "randomk(ratio=0.1)+momentum(m=0.9)",
    "qsgd(bits=4)",
    "qsgd(bits=3,kind=max)",
    "qsgd(bits=2,bucket=64)+ef",
    "qsgd(bits=7,bucket=0)+ef(decay=0.5)",
    "qsgd(bits=8,kind=max)+ef",
    "qsgd(levels=5,kind=max)",
    "terngrad(clip=0)",
    "terngrad(clip=0,bucket=128)",
]
#: and those with a mean or a norm in them
SUMMED = [
    "onebit",
    "onebit+ef(decay=0.5)",
    "onebit+ef(decay=0)",
    "efsignsgd",
    "qsgd(bits=4,kind=l2)",
    "qsgd(bits=6,kind=l2,bucket=512)+ef",
    "qsgd(levels=3)",
    "terngrad",
    "terngrad(bucket=640)",
]


class Sides:
    """One codec on both sides, with their states, step after step."""

    def __init__(self, spec, bounds):
        self.cpu, self.gpu = parse(spec), make(spec)
        self.bounds, self.n, self.m = np.asarray(bounds, np.int64), int(bounds[-1]), len(bounds) - 1
        floats = self.cpu.state_floats(self.n, self.m)
        assert self.gpu.state_floats(self.n, self.m) == floats
        self.old = np.zeros(floats, np.float32) if floats else None
        self.old_gpu = torch.zeros(floats, device=DEVICE) if floats else None

    def encode(self, x, scale=1.0, seed=0, levels=None):
        """(daemon's result, payload, state), (GPU's ...): from the states, without settling them."""
        new = None if self.old is None else np.empty_like(self.old)
        new_gpu = None if self.old_gpu is None else torch.full_like(self.old_gpu, torch.nan)
        size = self.cpu.max_bytes(self.n, self.m) if levels is None else 16 * self.n + 64 * self.m + 64
        out, out_gpu = np.zeros(size, np.uint8), torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        each = None if levels is None else np.asarray(levels, np.uint32)
        ours = self.cpu.encode(x, self.old, new, out, self.bounds, scale, seed, each)
        tensor = torch.from_numpy(x.copy()).to(DEVICE)
        pending = self.gpu.encode(tensor, self.old_gpu, new_gpu, out_gpu, self.bounds.tolist(), scale, seed, levels)
        theirs = pending.settle()
        assert theirs.nbytes == pending.nbytes and np.array_equal(tensor.cpu().numpy(), x, equal_nan=True)
        self.new, self.new_gpu = new, new_gpu
        return (
            (ours, out[: ours.nbytes].copy(), new),
            (theirs, out_gpu[: theirs.nbytes].cpu().numpy(), None if new_gpu is None else new_gpu.cpu().numpy()),
        )

    def settle(self):
        self.old, self.old_gpu = self.new, self.new_gpu


def decoded(sides, payload, scale=0.25):
    """What a payload decodes to, after checking that both sides say the same to the bit, and that adding does too."""
    n, data = sides.n, torch.from_numpy(payload.copy()).to(DEVICE)
    ours, theirs = np.full(n, np.nan, np.float32), torch.full((n,), torch.nan, device=DEVICE)
    sides.cpu.decode(payload, ours, scale)
    sides.gpu.decode(data, theirs, scale)
    assert ours.tobytes() == (theirs + 0.0).cpu().numpy().tobytes() or np.array_equal(ours, theirs.cpu().numpy())
    acc = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    acc_gpu = torch.from_numpy(acc.copy()).to(DEVICE)
    sides.cpu.decode_add(payload, acc)
    sides.gpu.decode_add(data, acc_gpu)
    assert np.array_equal(acc, acc_gpu.cpu().numpy())
    return ours
