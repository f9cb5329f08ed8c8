"""What the workers of test_client_push_pull.py and test_disabled.py do under Horovod's names.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

from typing import Any

import torch

import gcclient as hvd


def collectives() -> dict[str, Any]:
    """Averages, sums, gathers and values from and to every rank; what differs from what was expected."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    wrong: list[str] = []

    def check(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        if got.dtype is not wanted.dtype or not torch.equal(got, wanted):
            wrong.append(f"{what}: {got} for {wanted}")

    def of(r: int) -> torch.Tensor:
        return torch.arange(6.0).view(2, 3) + r

    total = sum(of(r) for r in range(size))
    assert isinstance(total, torch.Tensor)
    check("average", hvd.allreduce(of(rank), name="a"), total / size)
    check("sum", hvd.allreduce(of(rank), op=hvd.Sum), total)
    check("in place", hvd.allreduce_(of(rank), average=False, name="a"), total)
    handles = [hvd.allreduce_async(of(rank) * n, name=f"async.{n}", op=hvd.Sum) for n in range(5)]
    for n, handle in enumerate(handles):
        check(f"async {n}", hvd.synchronize(handle), total * n)
    for n, each in enumerate(hvd.grouped_allreduce([of(rank), of(rank).long()], name="g", op=hvd.Sum)):
        check(f"group {n}", each, (total, total.long())[n])
    # Two codecs for one name, both with values that they send as they are. Blocks under 64 KiB are not compressed.
    large = torch.zeros(1 << 16)
    large[rank] = 1.5
    place = torch.zeros(1 << 16)
    place[:size] = 1.5
    check("fp16", hvd.allreduce(large, name="large", op=hvd.Sum, compression=hvd.Compression.fp16), place)
    check("topk", hvd.push_pull(large, "large", False, compression="topk(ratio=0.001)"), place)
    check("BytePS's order", hvd.push_pull(of(rank), False, "order"), total)
    # rank 1 has no rows
    rows = [r * 2 if r != 1 else 0 for r in range(size)]
    mine = torch.full((rows[rank], 2, 3), float("nan") if rank == 0 else -0.0 * rank).half()
    gathered = hvd.allgather(mine)
    if gathered.shape != (sum(rows), 2, 3) or gathered.dtype is not torch.float16:
        wrong.append(f"gathered {gathered.shape}")
    check("gathered signs", gathered.signbit(), torch.ones(sum(rows), 2, 3, dtype=torch.bool))
    check("gathered ranks", hvd.allgather(torch.full((3, 1), rank).t()), torch.arange(size).view(-1, 1).expand(-1, 3))
    objects = hvd.allgather_object({"rank": rank, "parts": (torch.full((rank,), rank), "x" * rank)})
    if [o["rank"] for o in objects] != list(range(size)) or [len(o["parts"][1]) for o in objects] != list(range(size)):
        wrong.append(f"objects {objects}")
    for r, each in enumerate(objects):
        check(f"tensor of {r}", each["parts"][0], torch.full((r,), r, device="cpu"))
    told = hvd.broadcast_object({"epoch": 3, "best": (0.5, torch.arange(4))} if rank == 1 else None, root_rank=1)
    if told["epoch"] != 3 or told["best"][0] != 0.5:
        wrong.append(f"told {told}")
    check("told", told["best"][1].cpu(), torch.arange(4, device="cpu"))  # the root has its own
    check("broadcast", hvd.broadcast(of(rank), size - 1), of(size - 1))
    mine = of(rank).t()
    hvd.broadcast_(mine, root_rank=1, name="mine")
    check("broadcast in place", mine, of(1).t())
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    refused = []
    for attempt in (
        lambda: hvd.broadcast_object(object() if rank == 1 else None, 1),
        lambda: hvd.allgather_object({1} if rank == size - 1 else 0),
        lambda: hvd.broadcast_object({"a": freed} if rank == 1 else None, 1),
        lambda: hvd.broadcast_(torch.eye(3).to_sparse() if rank == 1 else torch.eye(3)),
    ):
        try:
            attempt()
        except TypeError as error:
            refused.append(str(error))
    hvd.barrier()
    hvd.shutdown()
    return {"wrong": wrong, "refused": refused}
