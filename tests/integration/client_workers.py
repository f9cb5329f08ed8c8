"""What the workers of test_client_*.py do: each function runs in its own process (see cluster.py).

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import torch

import gcclient
from gcclient.api import current
from gcclient.call_domains import EXACT
from gcclient.places import SHAPES
from tests.integration.cluster import mark
from tests.integration.workers import digest

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")


def _values(dtype: torch.dtype, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 + rank)
    values = torch.randint(0, 2 if dtype is torch.bool else 9, shape, generator=made)
    return values.to(dtype)


def sums() -> dict[str, Any]:
    """Every dtype and many shapes, summed and averaged; returns what differs from the exact result, and a hash."""
    gcclient.init()
    rank, size = gcclient.rank(), gcclient.size()
    wrong: list[str] = []
    seen = hashlib.sha256()

    def check(what: str, got: torch.Tensor, wanted: torch.Tensor, alike: bool = True) -> None:
        kinds = [(t.device, t.shape, t.dtype) for t in (got, wanted)]
        if kinds[0] != kinds[1] or not torch.equal(got, wanted):
            wrong.append(f"{what}: {got.flatten()[:5]} for {wanted.flatten()[:5]}")
        if alike:
            seen.update(digest(got).encode())

    shapes = ((), (1,), (0,), (3, 0, 2), (7,), (5, 3, 2), (300_001,))
    for label in DTYPES:
        dtype = getattr(torch, label)
        for shape in shapes:
            inputs = [_values(dtype, shape, r) for r in range(size)]
            total = torch.stack([i.to(torch.float64) for i in inputs]).sum(0)
            exact = total.ne(0) if dtype is torch.bool else total.to(dtype)
            name = None if len(shape) == 1 else f"{label}{list(shape)}"
            check(f"sum {label} {shape}", gcclient.push_pull(inputs[rank], name, average=False), exact)
            if dtype.is_floating_point:
                mean = (total / size).to(dtype)
                got = gcclient.push_pull(inputs[rank], name)
                seen.update(digest(got).encode())
                if not torch.allclose(got.double(), mean.double(), rtol=1e-6 if dtype.itemsize >= 4 else 1e-2):
                    wrong.append(f"mean {label} {shape}")
    base = torch.arange(24.0).view(4, 6) * (rank + 1)
    total = torch.arange(24.0).view(4, 6) * sum(range(1, size + 1))
    check("transposed", gcclient.push_pull(base.t(), "t", average=False), total.t())
    strided = base.clone()
    returned = gcclient.push_pull_(strided[:, ::2], "s", average=False)
    check("strided in place", strided[:, ::2], total[:, ::2])
    check("strided, the rest", strided[:, 1::2], base[:, 1::2], alike=False)
    check("returned", returned, total[:, ::2])
    leaf = torch.full((3,), float(rank), requires_grad=True)
    gcclient.push_pull_(leaf, "leaf", average=False)
    check("leaf in place", leaf.detach(), torch.full((3,), float(sum(range(size)))))
    handles = [gcclient.push_pull_async(torch.full((n + 1,), float(n)), f"async{n}") for n in range(20)]
    handles.append(gcclient.push_pull_async_(base, "async base", average=False))
    for n in reversed(range(20)):
        check(f"async {n}", gcclient.synchronize(handles[n]), torch.full((n + 1,), float(n)))
    while not gcclient.poll(handles[-1]):
        time.sleep(0.001)
    check("async in place", gcclient.synchronize(handles[-1]), total)
    first = gcclient.push_pull_async(torch.full((4,), 1.0), "again")
    second = gcclient.push_pull_async(torch.full((4,), 2.0), "again")
    check("first of two", gcclient.synchronize(first), torch.full((4,), 1.0))
    check("second of two", gcclient.synchronize(second), torch.full((4,), 2.0))
    for elements in (0, 5, 300_001):  # none, one and several blocks
        resident = gcclient.empty(f"resident{elements}", elements)
        for factor in (1.0, 2.0):
            resident.copy_(torch.arange(float(elements)) * (factor * (rank + 1)))
            wanted = torch.arange(float(elements), device=resident.device) * (factor * sum(range(1, size + 1)))
            check("resident", gcclient.push_pull(resident, f"resident{elements}", average=False), wanted)
        check("resident in place", gcclient.push_pull_(resident, f"resident{elements}", average=False), wanted)
    for _ in range(600):  # more steps than doorbells are kept for
        got = gcclient.push_pull(torch.full((8,), float(rank)), "many", average=False)
    check("many", got, torch.full((8,), float(sum(range(size)))))
    refused = []
    for tensor, average in ((torch.ones(2, dtype=torch.int32), True), (torch.ones(2, dtype=torch.complex64), False)):
        try:
            gcclient.push_pull(tensor, "refused", average)
        except ValueError as error:
            refused.append(str(error))
    place = (rank, size, gcclient.local_rank(), gcclient.local_size())
    stats = gcclient.stats()
    gcclient.shutdown()
    return {"wrong": wrong, "digest": seen.hexdigest(), "place": place, "refused": refused, "stats": stats}


def unnamed() -> dict[str, Any]:
    """Unnamed calls whose results each rank fetches at other times: at once, by polling, late, or not at all."""
    gcclient.init()
    rank, size = gcclient.rank(), gcclient.size()
    wrong: list[str] = []
    under_way: list[tuple[int, Any]] = []

    def fetch(i: int, handle: Any) -> None:
        elements = 300_000 if i % 5 == 0 else 16
        if not torch.equal(gcclient.synchronize(handle), torch.full((elements,), float(i * size + sum(range(size))))):
            wrong.append(f"call {i}")

    for i in range(100):
        elements = 300_000 if i % 5 == 0 else 16
        handle = gcclient.push_pull_async(torch.full((elements,), float(i + rank)), average=False)
        if rank == 0:
            fetch(i, handle)
        else:
            under_way.append((i, handle))
        if rank == 1:
            while under_way and gcclient.poll(under_way[0][1]):
                fetch(*under_way.pop(0))
    for i, handle in reversed(under_way):
        fetch(i, handle)
    gcclient.shutdown()
    return {"wrong": wrong}


def lengths() -> dict[str, Any]:
    """Unnamed tensors of more shapes than have places of their own, several under way; what that took of the arena."""
    gcclient.init()
    rank, size = gcclient.rank(), gcclient.size()
    wrong: list[str] = []
    under_way: list[tuple[torch.Tensor, Any]] = []

    def fetch() -> None:
        wanted, handle = under_way.pop(0)
        if not torch.equal(gcclient.synchronize(handle), wanted):
            wrong.append(f"{wanted.dtype} {list(wanted.shape)}")

    for i in range(400):
        dtype = getattr(torch, DTYPES[i % len(DTYPES)] if i % 3 == 0 else "float32")
        shape = (500 + 7 * i, 1 + i % 3, 40 if i % 50 == 0 else 1)
        inputs = [_values(dtype, shape, r) for r in range(size)]
        total = torch.stack([t.to(torch.float64) for t in inputs]).sum(0)
        wanted = total.ne(0) if dtype is torch.bool else total.to(dtype)
        under_way.append((wanted, gcclient.push_pull_async(inputs[rank], average=False)))
        if len(under_way) > 3 + 2 * rank:
            fetch()
    while under_way:
        fetch()
    domain = current().domains[EXACT]
    names = [m.section.tensors[0].name for m in domain.sections]
    arena = sum(sum(lane.plan.chunks) for lane in domain.arenas)
    gcclient.shutdown()
    return {"wrong": wrong, "own": sum(".any." not in n for n in names), "sections": len(names), "arena": arena}


def mismatch(kind: str) -> None:
    """Rank 1 does something else than the others; what is raised is the outcome."""
    if gcclient.is_initialized():
        gcclient.shutdown()
    gcclient.init(deadline=20)
    odd = gcclient.rank() == 1
    gcclient.push_pull(torch.ones(4), "before")
    if kind == "shape":
        gcclient.push_pull(torch.ones(5 if odd else 4), "layer.weight")
    elif kind == "dtype":
        gcclient.push_pull(torch.ones(4, dtype=torch.float64 if odd else torch.float32), "layer.weight")
    elif kind == "order":
        gcclient.push_pull(torch.ones(4), "second" if odd else "first")
    elif kind == "known order":
        gcclient.push_pull(torch.ones(4), "other")
        gcclient.push_pull(torch.ones(4), "before" if odd else "other")
    elif kind == "asynchronous order":
        for name in ("first", "second"):
            gcclient.allreduce(torch.ones(4), name=name)
        names = ("second", "first") if odd else ("first", "second")
        for handle in [gcclient.allreduce_async(torch.ones(4), name=name) for name in names]:
            gcclient.synchronize(handle)
    elif kind == "another shape":
        for tensor, name in ((torch.ones(5), None), (torch.ones(6), None), (torch.ones(5), "of 5")):
            assert torch.equal(gcclient.push_pull(tensor, name), tensor)
        gcclient.push_pull(torch.ones(5), "before")  # on every rank
    elif kind == "known shape":
        gcclient.push_pull(torch.ones(5 if odd else 4), "before")
    elif kind in ("unnamed shape", "shared place"):
        for elements in range(5, 6 if kind == "unnamed shape" else 6 + SHAPES):
            gcclient.push_pull(torch.ones(elements))
        handle = gcclient.push_pull_async(torch.ones(3, 2) if odd else torch.ones(2, 3))
        gcclient.synchronize(handle)
    elif kind == "average":
        gcclient.push_pull(torch.ones(4), "before", average=odd)
    elif kind == "model":
        gcclient.state(torch.nn.Linear(3, 5 if odd else 4))
    elif kind == "codec":
        gcclient.state(torch.nn.Linear(3, 4), compression="nosuchcodec")
    elif kind == "broadcast":
        gcclient.broadcast_parameters({"w": torch.ones(3 if odd else 4)})
    elif kind == "root":
        gcclient.broadcast_parameters({"w": torch.ones(4)}, root_rank=1 if odd else 0)
    elif kind == "gather":
        gcclient.allgather(torch.ones(2, 5 if odd else 4))
    raise AssertionError("nothing was raised")


def vanish() -> None:
    """Rank 1 ends by an exception in the middle of the job; the others wait for it."""
    gcclient.init(deadline=30)
    gcclient.push_pull(torch.ones(4), "t")
    if gcclient.rank() == 1:
        raise RuntimeError("the training script has a bug")
    began = time.monotonic()
    try:
        gcclient.push_pull(torch.ones(4), "t")
    except gcclient.GradcommError as error:
        if time.monotonic() - began > 10:
            raise AssertionError("the others heard of it too late") from error
        try:
            gcclient.push_pull(torch.ones(4), "t")
        except type(error):
            raise error from None
    raise AssertionError("nothing was raised")


def broadcasts() -> dict[str, Any]:
    """Parameters and optimizer state from rank 1 to all, bit by bit."""
    gcclient.init()
    rank = gcclient.rank()
    made = torch.Generator().manual_seed(rank)
    specials = torch.tensor([float("nan"), -0.0, float("inf"), 1e-42, 1.0])
    values = {
        "specials": specials * (1 if rank == 1 else 0),
        "half": torch.randn(7, 3, generator=made).half(),
        "brain": torch.randn(5, generator=made).bfloat16(),
        "count": torch.tensor(rank),
        "empty": torch.zeros(0),
        "flags": torch.rand(9, generator=made) > 0.5,
        "complex": torch.randn(4, generator=made, dtype=torch.complex64),
        "strided": torch.randn(6, 8, generator=made).t(),
        "large": torch.randn(3_000_000, generator=made),
        "not a tensor": 3,
    }
    if rank == 1:
        values["specials"] = specials
    gcclient.broadcast_parameters(values, root_rank=1)
    hashes = {k: digest(v) for k, v in values.items() if isinstance(v, torch.Tensor) and v.numel()}
    model = torch.nn.Linear(3, 2)
    gcclient.broadcast_parameters(model.named_parameters())
    adam = torch.optim.Adam(model.parameters(), lr=0.1 if rank == 0 else 0.7, betas=(0.5, 0.6 + rank / 10))
    if rank == 0:
        model(torch.ones(3)).sum().backward()
        adam.step()
        model.zero_grad()
    gcclient.broadcast_parameters(model.state_dict())
    gcclient.broadcast_optimizer_state(adam)
    model(torch.full((3,), 2.0)).sum().backward()
    adam.step()
    options = {k: v for k, v in adam.param_groups[0].items() if k != "params"}
    refused = ""
    adam.param_groups[0]["odd"] = object() if rank == 0 else None
    try:
        gcclient.broadcast_optimizer_state(adam)
    except TypeError as error:
        refused = str(error)
    gcclient.shutdown()
    return {
        "hashes": hashes,
        "model": digest(torch.cat([p.flatten() for p in model.parameters()])),
        "options": repr(options),
        "refused": refused,
    }


def with_default_device() -> dict[str, Any]:
    """A script that has torch make tensors on a device without contents unless it says otherwise, as it does for all of
    its own: whatever gcclient makes for itself has to be elsewhere."""
    torch.set_default_device("meta")
    gcclient.init()
    rank, size = gcclient.rank(), gcclient.size()
    with torch.device("cpu"):
        ones, values = torch.ones(3, 2), {"w": torch.full((5,), float(rank)), "none": torch.zeros(0)}
        net = torch.nn.Linear(4, 3)
        x = torch.arange(4.0) + rank
    total = gcclient.push_pull(ones * rank, "t", average=False)
    gcclient.broadcast_parameters(values, root_rank=1)
    gcclient.broadcast_parameters(net.state_dict())
    gathered = gcclient.allgather(ones[: rank + 1])
    told = gcclient.broadcast_object({"at": ones} if rank == 0 else None)
    objects = gcclient.allgather_object([rank, ones])
    resident = gcclient.empty("resident", 3)
    resident.fill_(1.0)
    resident = gcclient.push_pull(resident, "resident", average=False)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = gcclient.DistributedOptimizer(sgd, net.named_parameters())
    for _ in range(2):
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gcclient.barrier()
    gcclient.shutdown()
    return {
        "total": total.tolist(),
        "told": [values["w"].tolist(), told["at"].tolist(), [tensor.tolist() for _, tensor in objects]],
        "rows": len(gathered),
        "resident": (resident.tolist(), size),
        "net": digest(*net.parameters()),
    }


def counting(steps: int, elements: int, pause: float = 0.0) -> dict[str, Any]:
    """Integer-valued gradients under two names, every sum checked exactly; marks each step."""
    gcclient.init(deadline=60)
    rank, size = gcclient.rank(), gcclient.size()
    wrong = 0
    factor = sum(r + 1 for r in range(size))
    ramp = torch.arange(elements, dtype=torch.float32) % 1000
    for step in range(1, steps + 1):
        got = gcclient.push_pull(ramp * (rank + 1) + step, "ramp", average=False)
        wrong += int(not torch.equal(got, ramp * factor + step * size))
        small = gcclient.push_pull(torch.full((10,), float(step)), "small")
        wrong += int(not torch.equal(small, torch.full((10,), float(step))))
        mark(f"step {step}")
        if pause:
            time.sleep(pause)
    stats = gcclient.stats()
    gcclient.shutdown()
    return {"wrong": wrong, "reconnects": stats["reconnects"]}


def launched(by: str, port: int) -> dict[str, Any]:
    """Without torch.distributed, as mpirun or srun start it; init_process_group() afterwards meets there too."""
    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    names = {"mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "srun": ("SLURM_PROCID", "SLURM_NTASKS")}
    os.environ |= dict(zip(names[by], (rank, size), strict=True)) | {"SLURM_STEP_ID": "0", "MASTER_PORT": str(port)}
    gcclient.init(deadline=60)
    total = float(gcclient.push_pull(torch.tensor([float(rank) + 1]), average=False))
    gcclient.shutdown()
    gcclient.init(deadline=60)
    total += float(gcclient.push_pull(torch.tensor([1.0]), average=False))
    for _ in range(2):
        torch.distributed.init_process_group("gloo", rank=int(rank), world_size=int(size))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        # torch's store is rank 0's: who comes back to the same port before it is gone would be lost with it.
        gcclient.push_pull(torch.zeros(1))
    return {"total": total, "place": [gcclient.rank(), gcclient.size(), gcclient.local_rank(), gcclient.local_size()]}


def with_token(tokens: list[str]) -> dict[str, str]:
    """Each rank joins with its own token; how that ended."""
    os.environ["GC_JOB_TOKEN"] = tokens[int(os.environ["RANK"])]
    try:
        gcclient.init(deadline=5)
    except gcclient.GradcommError as error:
        return {"error": type(error).__name__, "message": str(error)}
    gcclient.shutdown()
    return {"error": "", "message": ""}
