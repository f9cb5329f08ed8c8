"""What the workers of test_peek.py do: each function runs in its own process (see cluster.py).

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import time

import numpy as np
import torch

import gcclient
from tests.integration.cluster import mark

SHAPES = {"w": (700, 900), "v": (70_000,)}


def gradient(name: str, rank: int) -> np.ndarray:
    """What ``rank`` pushes of ``name``, float32."""
    return np.random.default_rng((len(name), rank, SHAPES[name][0])).standard_normal(SHAPES[name], np.float32)


def push_and_pause(compression: str) -> None:
    """One step, then nothing until killed."""
    gcclient.init()
    for name in SHAPES:
        gcclient.push_pull(torch.from_numpy(gradient(name, gcclient.rank())), name, compression=compression)
    mark("paused")
    time.sleep(600)


def push_and_leave() -> None:
    gcclient.init()
    gcclient.push_pull(torch.ones(10), "x")
    mark("pushed")
    time.sleep(0.5)
