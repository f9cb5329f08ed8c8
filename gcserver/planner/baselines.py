"""What Espresso is compared with: other systems' strategies and its own with something left out (sections 5.1, 5.3).

What may live here: how each baseline decides. What may not: Espresso's search, the timeline.

All are priced by the same tables and timed on the same timeline. Each returns a plan: the option of every tensor.
Tensors that a baseline does not compress take the dense scheme that is quickest for them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gcserver.planner.costs import Cluster, CodecCosts
from gcserver.planner.espresso import Flags, algorithm1, prepare, quickest, select
from gcserver.planner.offload import offload_to_cpu
from gcserver.planner.options import Constraints, Device, Option, options
from gcserver.planner.options_cost import Ints, OptionTable, compile_table
from gcserver.planner.options_schemes import ALLTOALL_ALLTOALL, HITOPKCOMM, INTER_ALLGATHER, INTER_ALLTOALL, scheme
from gcserver.planner.timeline import Training
from gcserver.planner.trace import Trace

Plan = tuple[Option, ...]

#: Elements from which BytePS-Compress compresses; the shipped value, and the one it uses for ResNet101.
BYTEPS_THRESHOLD, BYTEPS_RESNET101 = 1 << 18, 1 << 14
#: Elements from which HiTopKComm compresses.
HITOPKCOMM_THRESHOLD = 512


def _device(cluster: Cluster) -> Device:
    return Device.GPU if cluster.gpu else Device.CPU


def _above(trace: Trace, cluster: Cluster, codec: CodecCosts, option: Option, chosen: Callable[[int], bool]) -> Plan:
    """``option`` where ``chosen(elements)``, the quickest dense scheme elsewhere."""
    dense = options(Constraints(gpu=False, cpu=False))
    training = Training(trace, compile_table(cluster, codec, dense))
    plan = quickest(training, np.ones(len(dense), np.bool_))
    return tuple(option if chosen(t.elements) else dense[c] for t, c in zip(trace.tensors, plan.tolist(), strict=True))


def fp32(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """No compression."""
    return _above(trace, cluster, codec, scheme(INTER_ALLTOALL, _device(cluster)), lambda n: False)


def hitopkcomm(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """HiTopKComm: the shard of each GPU is compressed once, for all but tiny tensors."""
    option = scheme(HITOPKCOMM, _device(cluster))
    return _above(trace, cluster, codec, option, lambda n: n >= HITOPKCOMM_THRESHOLD)


def byteps_compress(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """BytePS-Compress: push and pull compressed by the CPU, for tensors above a threshold."""
    least = BYTEPS_RESNET101 if trace.model == "resnet101" else BYTEPS_THRESHOLD
    return _above(trace, cluster, codec, scheme(INTER_ALLTOALL, Device.CPU), lambda n: n >= least)


def hipress(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """HiPress: compress a tensor if the cost model of its selective compression says so (SeCoPa).

    Per tensor and alone, over K = 1..N partitions: gather + broadcast of x/K, against the same of the payload plus
    min(K+1, N) encodings and min(N-1+K, 2(N-1)) decodings of x/K. A gather or broadcast of y bytes is N-1 sends.
    """
    device, n, link = _device(cluster), cluster.nodes, cluster.inter
    costs = codec.on(device)

    def sends(nbytes: float) -> float:
        return 2 * (n - 1) * (link.latency + nbytes / link.bandwidth)

    def wins(elements: int) -> bool:
        if n == 1:
            return False
        plain = min(sends(4.0 * elements / k) for k in range(1, n + 1))
        best = min(
            sends(codec.wire(elements / k))
            + min(k + 1, n) * costs.encode(elements / k)
            + min(n - 1 + k, 2 * (n - 1)) * costs.decode(elements / k)
            for k in range(1, n + 1)
        )
        return best < plain

    return _above(trace, cluster, codec, scheme(INTER_ALLTOALL, device), wins)


def myopic(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """Every tensor takes the option that is quickest for it alone, interactions left aside."""
    table = prepare(cluster, codec).everything
    plan = quickest(Training(trace, table), np.ones(len(table.options), np.bool_))
    return tuple(table.options[c] for c in plan.tolist())


def _restricted(trace: Trace, table: OptionTable, main: Flags, to_cpu: Ints) -> Plan:
    """Algorithms 1 and 2 with the options of ``table`` only, from no compression where that is among them."""
    training = Training(trace, table)
    compresses = np.array([o.compressions > 0 for o in table.options])
    start = quickest(training, main if compresses.all() else ~compresses)
    plan, _, _ = algorithm1(training, compresses, main, start)
    plan = offload_to_cpu(training, to_cpu, plan).plan
    return tuple(table.options[c] for c in plan.tolist())


def _only(trace: Trace, cluster: Cluster, codec: CodecCosts, texts: Sequence[str]) -> Plan:
    """Espresso's algorithms with the dense schemes and those that ``texts`` spell."""
    devices = [Device.GPU] * cluster.gpu + [Device.CPU]
    chosen = [*options(Constraints(gpu=False, cpu=False)), *(scheme(t, d) for d in devices for t in texts)]
    main = np.array([o.devices <= {devices[0]} for o in chosen])
    to_cpu = np.array([chosen.index(o.on(Device.CPU)) if o.devices else -1 for o in chosen], np.int64)
    return _restricted(trace, compile_table(cluster, codec, chosen), main, to_cpu)


def inter_allgather(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """Compression for the inter link alone, by all-gather."""
    return _only(trace, cluster, codec, [INTER_ALLGATHER])


def inter_alltoall(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """Compression for the inter link alone, by all-to-all and all-gather."""
    return _only(trace, cluster, codec, [INTER_ALLTOALL])


def alltoall_alltoall(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """Compression for both links: all-to-all within and between nodes, the last all-gather compressed or not."""
    return _only(trace, cluster, codec, ALLTOALL_ALLTOALL)


def _one_device(trace: Trace, cluster: Cluster, codec: CodecCosts, constraints: Constraints) -> Plan:
    space = prepare(cluster, codec, constraints)
    return _restricted(trace, space.table, space.main, np.full(len(space.main), -1, np.int64))


def gpu_only(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """Algorithm 1 alone; without GPU, what ``cpu_only`` does."""
    return _one_device(trace, cluster, codec, Constraints(cpu=not cluster.gpu))


def cpu_only(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """Algorithm 1 with the CPU instead of the GPU."""
    return _one_device(trace, cluster, codec, Constraints(gpu=False))


def all_compress(trace: Trace, cluster: Cluster, codec: CodecCosts) -> Plan:
    """Every tensor is compressed somehow: Algorithms 1 and 2 without the dense options."""
    space = prepare(cluster, codec)
    kept = [o for o, c in zip(space.table.options, space.compresses, strict=True) if c]
    main = np.array([o.devices <= {_device(cluster)} for o in kept])
    at = {o: i for i, o in enumerate(kept)}
    to_cpu = np.array([at.get(o.on(Device.CPU), -1) for o in kept], np.int64)
    return _restricted(trace, compile_table(cluster, codec, kept), main, to_cpu)


Baseline = Callable[[Trace, Cluster, CodecCosts], Plan]
#: Other systems.
SYSTEMS: dict[str, Baseline] = {
    "fp32": fp32,
    "byteps-compress": byteps_compress,
    "hitopkcomm": hitopkcomm,
    "hipress": hipress,
}
#: Espresso with something left out (section 5.3).
CRIPPLED: dict[str, Baseline] = {
    "all-compress": all_compress,
    "myopic": myopic,
    "gpu-only": gpu_only,
    "cpu-only": cpu_only,
    "inter-allgather": inter_allgather,
    "inter-alltoall": inter_alltoall,
    "alltoall+alltoall": alltoall_alltoall,
}


def plan_time(trace: Trace, cluster: Cluster, codec: CodecCosts, plan: Plan) -> float:
    """Seconds of an iteration in which each tensor takes its option of ``plan``."""
    used = list(dict.fromkeys(plan))
    training = Training(trace, compile_table(cluster, codec, used))
    return training.time(np.array([used.index(o) for o in plan], np.int64))


def upper_bound(trace: Trace, cluster: Cluster, codec: CodecCosts, plan: Plan) -> float:
    """Seconds of an iteration if compression took no time (the paper's upper bound on throughput).

    The best that the search finds then; also tried: ``plan``, so that no strategy already known is better.
    """
    free = codec.free()
    found = select(trace, prepare(cluster, free)).seconds
    return min(found, plan_time(trace, cluster, free, plan), plan_time(trace, cluster, codec, plan))
