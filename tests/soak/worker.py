"""One worker of the soak: pushes integer-valued gradients and checks every bit of every aggregate.

What may live here: what one rank pushes, what must come back, the comparison. What may not: starting anything,
judging memory or speed (``throughput``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence

import torch

import gcclient

#: Elements of the tensors pushed each step: tiny, odd, one block, several blocks with an uneven end.
SHAPES = ((1000,), (33, 77), (1 << 18,), (3, 500_001))


class Gradients:
    """What each rank pushes in each step, computable by every rank.

    ``a * base + b`` with ``base`` fixed random integers in [-250, 250], ``a`` 1 or -1 and ``b`` in [-100, 100] drawn
    for (rank, step): elements in the wrong place, of another step or of another rank give other numbers. Sums of up to
    eight ranks, and averages over 2, 4 or 8, are exact in fp32; over 2 and 4 ranks in fp16 too (magnitudes up to 350,
    steps of a quarter).
    """

    def __init__(self, ranks: int, seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        if ranks not in (1, 2, 4, 8):
            raise ValueError(f"{ranks} ranks: expected 1, 2, 4 or 8, whose averages of integers are exact")
        self.ranks, self.seed = ranks, seed
        generator = torch.Generator().manual_seed(seed)
        self.base = [torch.randint(-250, 251, shape, generator=generator).float() for shape in shapes]

    def factors(self, rank: int, step: int) -> Iterator[tuple[int, int]]:
        """(a, b) of each tensor."""
        for index in range(len(self.base)):
            # a small integer hash, so that no rank needs to draw what the others drew
            x = (self.seed * 1_000_003 + rank * 8_191 + step * 131_071 + index * 524_287) * 2_654_435_761 & 0xFFFFFFFF
            yield 1 if x & 0x8000 else -1, (x >> 16) % 201 - 100

    def pushed(self, rank: int, step: int) -> list[torch.Tensor]:
        """float32, one of each shape."""
        return [base * a + b for base, (a, b) in zip(self.base, self.factors(rank, step), strict=True)]

    def average(self, step: int) -> list[torch.Tensor]:
        """What must come back, to the bit; zeros are positive, as sums of opposites are."""
        every = [list(self.factors(rank, step)) for rank in range(self.ranks)]
        out = []
        for index, base in enumerate(self.base):
            a = sum(factors[index][0] for factors in every)
            b = sum(factors[index][1] for factors in every)
            out.append((base * a + b) / self.ranks + 0.0)
        return out


def differing(got: torch.Tensor, want: torch.Tensor) -> int:
    """Elements whose bits differ."""
    return int((got.view(torch.int32) != want.view(torch.int32)).sum())


def main() -> int:
    """Runs until rank 0's time is over on every rank; prints a JSON line about once a second. Exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    gcclient.init()
    rank, size = gcclient.rank(), gcclient.size()
    gradients = Gradients(size, args.seed)
    step_bytes = sum(base.nbytes for base in gradients.base)
    began = said = time.monotonic()
    step = wrong = 0
    while True:
        step += 1
        pushed = gradients.pushed(rank, step)
        handles = [gcclient.push_pull_async(g, name=f"g{i}") for i, g in enumerate(pushed)]
        # whoever's time is over tells all: the sum is the same everywhere, so all leave after the same step
        over = torch.tensor([int(rank == 0 and time.monotonic() - began >= args.seconds)])
        over = gcclient.push_pull(over, name="over", average=False)
        for index, (handle, want) in enumerate(zip(handles, gradients.average(step), strict=True)):
            bad = differing(gcclient.synchronize(handle), want)
            if bad:
                wrong += 1
                text = f"rank {rank} step {step} tensor {index}: {bad} of {want.numel()} elements differ"
                print(text, file=sys.stderr, flush=True)
        last = bool(over.item())
        if last or wrong > 20 or time.monotonic() - said >= 1.0:
            said = time.monotonic()
            line = {"s": said - began, "steps": step, "bytes": step * step_bytes, "wrong": wrong, "last": last}
            print(json.dumps(line), flush=True)
        if last or wrong > 20:
            break
    gcclient.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
