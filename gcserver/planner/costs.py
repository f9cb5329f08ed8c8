"""What communication and compression cost: alpha-beta links, collectives, codec curves, clusters (Espresso, 4.3).

What may live here: costs of single operations and the default figures. What may not: options, timelines, decisions.

A collective among p ranks takes ``steps * latency + volume * held / bandwidth``, ``held`` being the bytes one rank
has before it (Thakur et al. 2005; rings for all-reduce, pipelined trees for reduce and broadcast)::

    allreduce       2 (p-1)      2 (p-1)/p          allgather   p-1          p-1
    reduce-scatter  p-1          (p-1)/p            alltoall    p-1          (p-1)/p
    reduce          ceil(log2 p) 1                  gather      p-1          p-1   (at the root)
    broadcast       ceil(log2 p) 1

Adding up received dense values is part of the link's time, as it is where such links are measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gcserver.planner.options import Device, Routine
from gcserver.planner.profile import Curve, ProfileError


class CostError(ValueError):
    """A cluster, curve or codec that cannot be priced: says what was expected and what came."""


@dataclass(frozen=True, slots=True)
class Link:
    """``latency``: seconds a step of a collective takes at least; ``bandwidth``: bytes a second and direction."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise CostError(f"link with latency {self.latency} s and {self.bandwidth} bytes/s: expected >= 0 and > 0")

    @classmethod
    def gbit(cls, latency_us: float, gbit: float) -> Link:
        return cls(latency_us * 1e-6, gbit * 1e9 / 8)


def shape(routine: Routine, ranks: int) -> tuple[int, float]:
    """(steps, volume) of a collective among ``ranks``: see the table above; nothing at all for one rank."""
    if ranks == 1:
        return 0, 0.0
    ring, share = ranks - 1, (ranks - 1) / ranks
    return {
        Routine.ALLREDUCE: (2 * ring, 2 * share),
        Routine.REDUCE_SCATTER: (ring, share),
        Routine.ALLTOALL: (ring, share),
        Routine.ALLGATHER: (ring, float(ring)),
        Routine.GATHER: (ring, float(ring)),
        Routine.REDUCE: ((ranks - 1).bit_length(), 1.0),
        Routine.BROADCAST: ((ranks - 1).bit_length(), 1.0),
    }[routine]


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` machines of ``ranks`` each; ``intra`` joins the ranks of a machine, ``inter`` the machines.

    ``inter`` is one machine's network card, which its ranks share. ``gpu``: computation and, if a codec has figures
    for it, compression run on accelerators; otherwise only the CPU compresses.
    """

    name: str
    nodes: int
    ranks: int
    intra: Link
    inter: Link
    gpu: bool = True

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks < 1:
            raise CostError(f"cluster {self.name!r} has {self.nodes} nodes of {self.ranks} ranks: expected at least 1")


class RisingCurve(Curve, frozen=True):
    """A curve that does not fall at its end, so that large tensors never cost less than nothing. Raises CostError."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ProfileError as error:
            raise CostError(str(error)) from None
        if len(self.points) > 1 and self.points[-1][1] < self.points[-2][1]:
            raise CostError(f"curve {self.points}: the last points fall, so large tensors would cost less than nothing")


def line(fixed: float, per_element: float) -> RisingCurve:
    """``fixed + per_element * elements`` seconds."""
    return RisingCurve(((0, fixed), (1 << 30, fixed + per_element * (1 << 30))))


ZERO = line(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """One codec on one device. ``decode``: the first payload of a region; ``decode_add``: elements of further ones.

    Curves of a CPU are those of all its cores together and contain the copies from and to an accelerator.
    """

    encode: RisingCurve
    decode: RisingCurve
    decode_add: RisingCurve


FREE = DeviceCosts(ZERO, ZERO, ZERO)


@dataclass(frozen=True, slots=True)
class CodecCosts:
    """A codec: its curves, and the bytes of a payload of n elements, ``max(minimum, per_element * n) + header``."""

    name: str
    per_element: float
    minimum: float
    header: float
    gpu: DeviceCosts | None
    cpu: DeviceCosts | None

    def wire(self, elements: float) -> float:
        """Bytes of one payload."""
        return max(self.minimum, self.per_element * elements) + self.header

    def on(self, device: Device) -> DeviceCosts:
        """Raises :class:`CostError` if the codec has no figures for ``device``."""
        costs = self.gpu if device is Device.GPU else self.cpu
        if costs is None:
            raise CostError(f"codec {self.name} has no figures for {device.name}: rule the device out or measure it")
        return costs

    def free(self) -> CodecCosts:
        """The same payloads at no cost of compression: the paper's upper bound (section 5.1)."""
        return replace(self, gpu=self.gpu and FREE, cpu=self.cpu and FREE)


M = 1 << 20
#: Microseconds on one V100 at 2**20 and at 2**23 elements, (encode, decode), constant below: Espresso's artifact.
V100_US = {
    "randomk": ((54.0, 34.0), (846.0, 66.0)),
    "dgc": ((356.0, 34.0), (944.0, 66.0)),
    "efsignsgd": ((130.0, 140.0), (260.0, 280.0)),
}
#: Microseconds per 2**20 elements of every further payload on a V100: what its memory traffic takes at 700 GB/s.
V100_ADD_US = {"randomk": 1.0, "dgc": 1.5, "efsignsgd": 12.0}
#: GB/s of fp32 on one core: encode with error feedback, decode, decode_add, as measured on 2026-11-21, before kernels
#: got faster (docs/benchmarks.md). The study's figures are of these; live plans measure their own.
CORE_GBS = {"randomk": (7.8, 21.7, 50.6), "dgc": (3.1, 25.2, 107.2), "efsignsgd": (5.9, 26.2, 23.3)}
#: Bytes per element at a ratio of 1 %, at least, header: values only for the shared seed of randomk.
WIRE = {"randomk": (0.04, 4.0, 0.0), "dgc": (0.08, 8.0, 0.0), "efsignsgd": (0.125, 1.0, 4.0)}


def v100(codec: str) -> DeviceCosts:
    """``codec`` on one V100; a copy decoded with others shares their launch."""
    (encode1, decode1), (encode8, decode8) = V100_US[codec]
    return DeviceCosts(
        RisingCurve(((M, encode1 * 1e-6), (8 * M, encode8 * 1e-6))),
        RisingCurve(((M, decode1 * 1e-6), (8 * M, decode8 * 1e-6))),
        line(0.0, V100_ADD_US[codec] * 1e-6 / M),
    )


def cores(codec: str, count: int, copy: float | None = None, fixed: float = 20e-6) -> DeviceCosts:
    """``codec`` on ``count`` cores of this project's daemon; ``copy``: bytes/s between accelerator and memory.

    Copying overlaps with coding, so the slower of the two counts.
    """
    encode, decode, add = (4.0 / (gbs * 1e9 * count) for gbs in CORE_GBS[codec])
    moved = 0.0 if copy is None else 4.0 / copy
    return DeviceCosts(line(fixed, max(encode, moved)), line(fixed, max(decode, moved)), line(0.0, add))


def codec_costs(codec: str, cluster: Cluster) -> CodecCosts:
    """randomk, dgc or efsignsgd at 1 % on the default machines: V100 with 16 cores, or one core without GPU.

    Raises :class:`CostError` for any other codec.
    """
    if codec not in WIRE:
        raise CostError(f"no default figures for codec {codec!r}: expected one of {sorted(WIRE)}, or measure it")
    cpu = cores(codec, 16, copy=10e9) if cluster.gpu else cores(codec, 1)
    return CodecCosts(codec, *WIRE[codec], v100(codec) if cluster.gpu else None, cpu)


def clusters(nodes: int) -> tuple[Cluster, ...]:
    """The four kinds of machines the planner is measured on; NVLink and PCIe as Espresso's artifact has them."""
    nvlink, pcie, none = Link(3e-6, 50e9), Link(6e-6, 2.5e9), Link(0.0, 1e12)
    return (
        Cluster("nvlink+100g", nodes, 8, nvlink, Link.gbit(15, 100)),
        Cluster("pcie+25g", nodes, 8, pcie, Link.gbit(20, 25)),
        Cluster("cpu+10g", nodes, 1, none, Link.gbit(25, 10), gpu=False),
        Cluster("cpu+1g", nodes, 1, none, Link.gbit(50, 1), gpu=False),
    )
