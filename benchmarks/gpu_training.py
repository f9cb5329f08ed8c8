"""Training on one GPU by two processes, a daemon each: is it right, and do copies hide behind computing?

``python -m benchmarks.gpu_training [--device cuda|cpu] [--systems LIST] [--layers 8] [--width 2048] [--batch 8192]
[--runs 10] [--auto-warmup 300] [--traces FOLDER] [--json FILE] [--quick]``

Every system trains the same model on the same batches, one after the other in the same processes: "compute" exchanges
nothing, "ddp" is DistributedDataParallel over gloo, "hook:CODEC" the same with ``ddp_hook``, "optimizer:CODEC" is
``DistributedOptimizer``, "fsdp2:CODEC" is ``fully_shard`` with ``gcclient.fsdp2``, "hsdp" is ``fully_shard`` over a
mesh whose replicas are averaged through the backend `gc`. "hook:auto" and "optimizer:auto"
leave the plan to the daemons, which have ``--auto-warmup`` steps to settle; what is planned for is the job, which all
systems are of, so only systems that exchange nothing through the daemons may be beside it. A step's time is the longest
of the two ranks, from the begin of the forward pass until the device is idle; the figure is the median.

"off" is the greatest difference of any parameter to "ddp"'s at the end: of lossless systems nothing beyond the last
bits. "alike" is whether both ranks hold the same bits. "copies" is how long a step's copies between device and host
take by torch's profiler, "hidden" the share of that time in which the device computed as well; "pinned" the share of
the arena that is registered with CUDA. The traces themselves, for chrome://tracing, go to ``--traces``.

Without CUDA it runs on the CPU (a small model): that shows that it works, and has no copies.

What may live here: this measurement. What may not: the daemons (``benchmarks.lab``), codecs on the device
(``gpu_codecs``).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import command, common
from benchmarks.lab import daemons, netns, workers

if TYPE_CHECKING:
    from torch import nn

COMPUTE: Final = "compute"
DDP: Final = "ddp"
HSDP: Final = "hsdp"
AUTO: Final = "auto"
#: made with a codec, as KIND:CODEC
KINDS: Final = ("hook", "optimizer", "fsdp2")
#: for which daemons make plans, as KIND:auto
PLANNED: Final = ("hook", "optimizer")
DEFAULT: Final = "compute,ddp,hook:none,optimizer:none,fsdp2:none,hsdp,hook:onebit,fsdp2:topk(ratio=0.01)"
#: steps before those that are timed: torch rebuilds its buckets, and memory is touched first
WARM_UP: Final = 3
#: steps that are profiled, after those that are timed
PROFILED: Final = 3
NODES: Final = 2


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker has to do; crosses to it as JSON. ``traces``: a folder, "" for none."""

    device: str
    systems: tuple[str, ...]
    layers: int
    width: int
    batch: int
    runs: int
    auto_warmup: int
    traces: str


# ------------------------------------------------------------------------------------------------ worker
def worker(task: Task) -> None:
    """Measures all systems; rank 0 prints a JSON line for each."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums in every run
    import torch
    import torch.distributed as dist

    import gcclient

    torch.set_num_threads(1)
    cuda = task.device == "cuda"
    # NCCL takes no two ranks on one GPU: only the groups of one rank that fully_shard has within a node are its.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")  # or the arena could not be pinned
    gcclient.init()
    try:
        group = dist.new_group(backend="gloo")
        wanted: list[torch.Tensor] | None = None
        for system in task.systems:
            line, trained = _measure(task, system, group)
            if system == DDP:
                wanted = trained
            if wanted is not None and system != COMPUTE:
                line["off"] = max(float((a - b).abs().max()) for a, b in zip(trained, wanted, strict=True))
            line["pinned"] = _pinned()
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)
            dist.barrier(group=group)
    finally:
        gcclient.shutdown()
        dist.destroy_process_group()


def _measure(task: Task, system: str, group: Any) -> tuple[dict[str, Any], list[Any]]:
    """One system: what to print of it, and its parameters on the host after training."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    model = _model(task)
    step = _prepared(model, system, group)
    warm_up = WARM_UP + (task.auto_warmup if _planned(system) else 0)
    times = torch.zeros(task.runs, dtype=torch.float64)

    def train(number: int) -> None:
        # On the device, so that no copy of the batch is among those that are looked at.
        made = torch.Generator(task.device).manual_seed(1000 * number + rank)
        x = torch.randn(task.batch, task.width, generator=made, device=task.device)
        _idle(task)
        dist.barrier(group=group)
        start = time.perf_counter()
        step(x)
        _idle(task)
        if 0 <= number - warm_up < task.runs:
            times[number - warm_up] = time.perf_counter() - start

    for number in range(warm_up + task.runs):
        train(number)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    found = {"system": system, "times": times.tolist()}
    if task.device == "cuda":
        found |= copies_of(_profiled(task, system, lambda: train(warm_up + task.runs)), PROFILED)
    trained = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu() for p in model.parameters()]
    # Every rank's digest in a place of its own: gloo sums on the host, whatever device the model is on.
    mine = int.from_bytes(hashlib.sha256(b"".join(p.numpy().tobytes() for p in trained)).digest()[:4], "big")
    seen = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    seen[rank] = mine
    dist.all_reduce(seen, group=group)
    return found | {"alike": system == COMPUTE or bool((seen == seen[0]).all())}, trained


def _planned(system: str) -> bool:
    """Whether its daemons make its plans."""
    return system.partition(":")[2] == AUTO


def _model(task: Task) -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(task.layers) for layer in (nn.Linear(task.width, task.width), nn.Tanh())]
    return nn.Sequential(*layers).to(task.device)


def _prepared(model: nn.Module, system: str, group: Any) -> Callable[[Any], None]:
    """One training step of ``model`` by ``system``, on a batch."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import gcclient

    kind, _, named = system.partition(":")
    codec = None if named == AUTO else named
    called: nn.Module = model
    device = next(model.parameters()).device.type
    if kind in (DDP, "hook"):
        called = ddp = DistributedDataParallel(model, process_group=group)
        if kind == "hook":
            ddp.register_comm_hook(gcclient.state(ddp, compression=codec), gcclient.ddp_hook)
    elif kind in ("fsdp2", HSDP):
        override = {"replicate": "gc"} if kind == HSDP else None
        names = ("replicate", "shard")
        mesh = init_device_mesh(device, (NODES, 1), mesh_dim_names=names, backend_override=override)
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh if kind == HSDP else mesh["shard"])
        fully_shard(model, mesh=mesh if kind == HSDP else mesh["shard"])
        if kind == "fsdp2":
            gcclient.fsdp2(model, codec)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if kind == "optimizer":
        optimizer = gcclient.DistributedOptimizer(optimizer, model.named_parameters(), compression=codec)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        called(x).square().mean().mul(x.shape[1]).backward()
        optimizer.step()

    return step


def _idle(task: Task) -> None:
    import torch

    if task.device == "cuda":
        torch.cuda.synchronize()


def _profiled(task: Task, system: str, train: Callable[[], None]) -> list[dict[str, Any]]:
    """The events of some steps, as torch's profiler writes them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            train()
    with tempfile.TemporaryDirectory() as folder:
        rank = os.environ["RANK"]
        path = Path(task.traces or folder) / f"{system.replace(':', '-')}.{rank}.json"
        found.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _pinned() -> float:
    """The share of this worker's arena that is registered with CUDA."""
    from gcclient.api import current

    arenas = [arena for domain in current().domains.values() for arena in domain.arenas]
    held = sum(chunk.nbytes for arena in arenas for chunk in arena.chunks)
    return sum(arena.pinned_bytes for arena in arenas) / held if held else 0.0


# --------------------------------------------------------------------------------------- what traces say
Interval = tuple[float, float]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not touch, ascending."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common_time(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """How long both are at work; each as :func:`united` gives them."""
    together, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        together += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return together


def copies_of(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """Seconds a step of copies to and from the device, and the share of them beside which it computed.

    ``events``: of a Chrome trace of torch's profiler: ``cat``, ``ts`` and ``dur`` in us.
    """
    kernels, copies = list[Interval](), list[Interval]()
    for event in events:
        kind = event.get("cat")
        if event.get("ph") != "X" or kind not in ("kernel", "gpu_memcpy"):
            continue
        if kind == "gpu_memcpy" and not any(way in event["name"] for way in ("DtoH", "HtoD")):
            continue
        (kernels if kind == "kernel" else copies).append((event["ts"], event["ts"] + event["dur"]))
    copied = united(copies)
    seconds = sum(end - begin for begin, end in copied) / 1e6
    hidden = common_time(copied, united(kernels)) / 1e6
    return {"copies_s": seconds / steps, "hidden": hidden / seconds if seconds else math.nan}


# ------------------------------------------------------------------------------------------------ parent
def measure(args: argparse.Namespace) -> Iterator[list[common.Row]]:
    """Starts daemons and workers; yields a row for each system."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.open_network(NODES, args.network))
        planned = {"plan.mode": "auto"} if any(map(_planned, args.systems)) else {}
        cluster = stack.enter_context(daemons.Daemons(lab.hosts, planned | dict(args.set)))
        traces = str(args.traces.resolve()) if args.traces else ""
        task = Task(args.device, args.systems, args.layers, args.width, args.batch, args.runs, args.auto_warmup, traces)
        base = math.nan
        for line in workers.results("gpu_training", lab.hosts, cluster, lambda _: task):
            more = {"device": args.device, "bytes": 4 * args.layers * (args.width + 1) * args.width}
            more |= {name: value for name, value in line.items() if name not in ("system", "times")}
            row = common.median_row(line["system"], line["times"], **more)
            base = row["median_s"] if row["system"] == DDP else base
            row["ratio_ddp"] = base / row["median_s"]
            yield [row]


TABLE = common.Table(
    {"system": 22, "step": 10, "x ddp": 7, "off": 9, "alike": 6, "copies": 10, "hidden": 7, "pinned": 7}
)


def show(row: common.Row) -> str:
    """The row as a line of the table."""
    copied = "copies_s" in row
    return TABLE.line(
        row["system"],
        common.show_seconds(row["median_s"]),
        "-" if math.isnan(row["ratio_ddp"]) else f"{row['ratio_ddp']:.2f}",
        f"{row['off']:.1e}" if "off" in row else "-",
        "yes" if row["alike"] else "NO",
        common.show_seconds(row["copies_s"]) if copied else "-",
        f"{row['hidden']:.0%}" if copied and not math.isnan(row["hidden"]) else "-",
        f"{row['pinned']:.0%}",
    )


def _systems(text: str) -> tuple[str, ...]:
    found = tuple(command.listed(text))
    for system in found:
        kind, colon, codec = system.partition(":")
        kinds = PLANNED if codec == AUTO else KINDS
        if system not in (COMPUTE, DDP, HSDP) and not (kind in kinds and colon and codec):
            some = ", ".join(
                [COMPUTE, DDP, HSDP, *(f"{kind}:CODEC" for kind in KINDS), *(f"{kind}:{AUTO}" for kind in PLANNED)]
            )
            raise argparse.ArgumentTypeError(f"expected some of {some}, got {system!r}")
    exchanging = [system for system in found if system not in (COMPUTE, DDP)]
    if len(exchanging) > 1 and any(map(_planned, exchanging)):
        raise argparse.ArgumentTypeError(
            f"a plan is made for all that a run exchanges: expected {COMPUTE} and {DDP} beside one KIND:{AUTO}, "
            f"got {', '.join(exchanging)}"
        )
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__, "a small model, three systems, three repetitions")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--systems", type=_systems, default=_systems(DEFAULT), help=f"default {DEFAULT}")
    parser.add_argument("--layers", type=command.count, help="of the model (default 8; on the CPU 4)")
    parser.add_argument("--width", type=command.count, help="of a layer (default 2048; on the CPU 256)")
    parser.add_argument("--batch", type=command.count, help="rows (default 8192; on the CPU 32)")
    parser.add_argument("--runs", type=command.count, default=10, help="timed steps (default 10)")
    parser.add_argument(
        "--auto-warmup",
        type=command.count,
        default=300,
        help="steps in which a plan of the daemons may settle (default 300)",
    )
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="keep the profiler's traces of every rank")
    args = parser.parse_args(argv)
    if args.worker is not None:
        return args
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    small = args.quick or args.device == "cpu"
    if args.quick:
        args.systems, args.runs = _systems("ddp,hook:none,fsdp2:none"), 3
    args.layers = args.layers or (4 if small else 8)
    args.width = args.width or (256 if small else 2048)
    args.batch = args.batch or (32 if small else 8192)
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if command.worked(args, worker, Task):
        return 0
    heading = f"{NODES} processes on {args.device}, {args.layers} layers of {args.width}, batches of {args.batch}"
    parts = [(f"{heading}\n{TABLE.head()}", measure(args))]
    return command.run(args, command.written("gpu_training", argv), parts, show)


if __name__ == "__main__":
    sys.exit(main())
