"""What the workers of test_advice.py do (see cluster.py): they ask for plans and for advice, and train a little.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

import gcclient
from gcclient.api import current
from tests.integration.cluster import mark, wait_for


def train(stop: str, steps: int) -> dict[str, Any]:
    """``steps`` steps of a job whose rank 0 wants automatic plans; then waits for the file ``stop``.

    Returns whether the model was declared whole, the refusal of advice before the first step, and the advice after the
    last: verdict, seconds of computing, (bandwidth, measured, plan, seconds) of each row, the table's lines.
    """
    torch.set_num_threads(1)
    torch.manual_seed(7)
    first = int(os.environ["RANK"]) == 0
    gcclient.init(deadline=60, plan="auto" if first else "static", quality="fast" if first else None)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
    optimizer = gcclient.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    (domain,) = current().domains.values()
    refused = ""
    try:
        gcclient.advise()
    except gcclient.NoAdvice as error:
        refused = str(error)
    x = torch.ones(8, 64)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
    advice = gcclient.advise(model, bandwidths=["100mbit", 1.25e9])
    mark("advised")
    wait_for(stop)
    gcclient.shutdown()
    return {
        "whole": domain.declared.whole,
        "refused": refused,
        "verdict": advice.verdict,
        "compute": advice.compute_seconds,
        "rows": [(r.bandwidth, r.measured, r.plan, r.step_seconds) for r in advice.rows],
        "lines": str(advice).splitlines(),
    }
