"""One spec at least of every codec, with a learning rate at which it trains a small model.

What may live here: that table. What may not: training (`ddp_workers.py`, `tests/soak/kill_worker.py`).
"""

from __future__ import annotations

#: spec and the learning rate at which it trains the small model: what sends bare signs takes steps of that length
RATES = {
    "none": 0.5,
    "fp16": 0.5,
    "bf16": 0.5,
    "topk(ratio=0.01)": 0.5,
    "topk(ratio=0.01,packed=1,values=16)": 0.5,
    "topk(ratio=0.01)+momentum": 0.05,
    "randomk(ratio=0.1)": 0.5,
    "randomk(ratio=0.5,unbiased=1)": 0.2,
    "dgc(ratio=0.01)": 0.05,
    "threshold(value=0.001)": 0.5,
    "redsync(ratio=0.01)": 0.5,
    "gaussiank(ratio=0.01)": 0.5,
    "sidco-e(ratio=0.01)": 0.5,
    "sidco-gp(ratio=0.01)": 0.5,
    "sidco-p(ratio=0.01)+ef(decay=0.9)": 0.5,
    "onebit": 0.2,
    "signsgd": 0.002,
    "signum": 0.002,
    "efsignsgd": 0.2,
    "qsgd": 0.5,
    "qsgd(bits=2)+ef": 0.2,
    "terngrad": 0.2,
    "natural": 0.5,
    "powersgd(rank=4)": 0.5,
    "powersgd(rank=4,values=16)": 0.5,
}
