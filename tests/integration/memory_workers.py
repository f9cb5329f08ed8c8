"""What the workers of test_memory.py do: each function runs in its own process (see cluster.py).

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import torch

import gcclient
from gcclient import api
from gcclient.calls import calls_domain
from gcproto.dtypes import DType
from gcproto.manifest import TensorSpec


def too_much() -> None:
    """Declare a tensor of 256 GiB (declared only: nobody has it)."""
    gcclient.init()
    session = api.current()
    session.declare(calls_domain(session), (TensorSpec("huge", (1 << 36,), int(DType.F32)),))


def little() -> float:
    gcclient.init()
    return float(gcclient.push_pull(torch.full((10,), 2.0), "x")[0])
