"""One worker of the soak with faults: pushes integer-valued gradients, checks every bit, logs every step and its end.

What may live here: what one rank does, and the lines it writes. What may not: starting anything, judging.

One JSON value a line: ``{"t": s, "joined": rank}`` once, ``{"t", "step", "wrong": elements that differ}`` a step, and
at its end ``{"t", "left": steps}`` or ``{"t", "error": name, "typed": whether gcclient's, "text"}``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

import gcclient
from tests.soak.worker import Gradients, differing

#: Small enough that links, not processors, are what a step of four nodes waits for. Blocks are tiny, odd, and several
#: of some size.
SHAPES = ((1000,), (33, 77), (1 << 17,), (100_003,))


def train(log: TextIO, seed: int, first: int, stop: Path) -> None:
    """Steps from ``first`` on, until ``stop`` exists. Every second tensor has no name, so that it travels as it is,
    the others in the job's codec."""

    def say(**line: Any) -> None:
        log.write(json.dumps({"t": time.monotonic(), **line}) + "\n")

    gcclient.init()
    rank = gcclient.rank()
    say(joined=rank)
    gradients = Gradients(gcclient.size(), seed, SHAPES)
    step, last = first, False
    while not last:
        pushed = gradients.pushed(rank, step)
        handles = [gcclient.push_pull_async(g, name=f"g{i}" if i % 2 else None) for i, g in enumerate(pushed)]
        # the sum is the same everywhere, so all leave after the same step
        over = gcclient.push_pull(torch.tensor([int(rank == 0 and stop.exists())]), name="over", average=False)
        last = bool(over.item())
        wrong = 0
        for handle, want in zip(handles, gradients.average(step), strict=True):
            wrong += differing(gcclient.synchronize(handle), want)
        say(step=step, wrong=wrong)
        step += 1
    gcclient.shutdown()
    say(left=step - first)


def main() -> int:
    """Exit status: 0 when it left in good order, 3 after a typed error, 1 after any other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="of the gradients; another one in every life")
    parser.add_argument("--first", type=int, required=True, help="the first step, as after a checkpoint")
    parser.add_argument("--stop", type=Path, required=True, help="rank 0 ends the job when this file is there")
    parser.add_argument("--log", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with args.log.open("w", buffering=1) as log:
        try:
            train(log, args.seed, args.first, args.stop)
        except Exception as error:
            typed = isinstance(error, gcclient.GradcommError)
            line = {"t": time.monotonic(), "error": type(error).__name__, "typed": typed, "text": str(error)}
            log.write(json.dumps(line) + "\n")
            if not typed:
                raise
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
