"""A training script as torchrun starts it: no process group, no arguments.

It writes what it found to $GC_TEST_OUT.<rank>; nothing else belongs here.
"""

from __future__ import annotations

import json
import os

import torch

import gcclient

gcclient.init()
total = gcclient.push_pull(torch.tensor([float(2 ** gcclient.rank())]), "bits", average=False)
found = {
    "rank": gcclient.rank(),
    "place": [gcclient.rank(), gcclient.size(), gcclient.local_rank(), gcclient.local_size()],
    "node": gcclient.stats()["node"],
    "total": float(total),
}
with open(f"{os.environ['GC_TEST_OUT']}.{gcclient.rank()}", "w") as out:
    json.dump(found, out)
gcclient.shutdown()
