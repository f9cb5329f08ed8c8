"""The systems that ``benchmarks.training`` compares, and how they are written on a command line.

What may live here: names, what they stand for. What may not: running any, torch.

A system is ``compute`` (every rank for itself), ``ddp`` (gloo, float32), ``ddp-fp16`` and ``ddp-powersgd`` (torch's own
hooks), ``auto`` (the daemon's planner decides), or a codec of gradcomm's such as ``none`` or ``topk(ratio=0.01)``.
gradcomm's may end in ``@`` and how DDP's buckets are cut: ``@torch`` as torch does by default, ``@layers`` one for
each tensor, ``@merged`` two of equally many tensors (MergeComp's naive partition), ``@3`` three, and so on;
``@mergecomp`` as MergeComp proposes, of what daemons measured while the model trained on the same links before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import command
from gcserver.codecs import registry

TORCH, LAYERS, MERGED, MERGECOMP = "torch", "layers", "merged", "mergecomp"
KINDS: Final = (TORCH, LAYERS, MERGED, MERGECOMP)
COMPUTE, AUTO = "compute", "auto"
DDP: Final = ("ddp", "ddp-fp16", "ddp-powersgd")
#: every codec there is, as its paper or most users set it, and low rank as ``auto`` begins with it where links are slow
CODECS: Final = (
    "fp16",
    "bf16",
    "natural",
    "qsgd(bits=4)",
    "terngrad",
    "onebit",
    "signsgd",
    "signum",
    "efsignsgd",
    "topk(ratio=0.01)",
    "topk(ratio=0.001)",
    "randomk(ratio=0.01)",
    "threshold(value=0.001)",
    "redsync(ratio=0.01)",
    "gaussiank(ratio=0.01)",
    "sidco-e(ratio=0.01)",
    "sidco-gp(ratio=0.01)",
    "sidco-p(ratio=0.01)",
    "powersgd(rank=4)",
    "powersgd(rank=16,values=16)",
    "dgc(ratio=0.01)",
)
#: How daemons are set where steps are timed: as after a model's first steps, whose plans are other ones.
LATER: Final = {"plan.late_after": "0"}
#: ``auto`` beside the buckets that most systems are fastest with; first, as it is timed minutes after its run began
DEFAULT: Final = (f"{AUTO}@{MERGED}", COMPUTE, *DDP, "none", *CODECS)


@dataclass(frozen=True, slots=True)
class System:
    """One way of training. ``comm``: compute, ddp, ddp-fp16, ddp-powersgd, gradcomm or auto. ``codec``: gradcomm's.

    ``buckets``: torch, layers, merged, mergecomp or a number of buckets.
    """

    comm: str
    codec: str = ""
    buckets: str = TORCH

    @property
    def method(self) -> str:
        """Its name in tables and files."""
        name = self.codec or self.comm
        return name if self.buckets == TORCH else f"{name}@{self.buckets}"

    @property
    def daemons(self) -> bool:
        return self.comm in ("gradcomm", AUTO)

    @property
    def settings(self) -> Mapping[str, str]:
        """What the daemons must be told beside what every system is."""
        return {"plan.mode": "auto"} if self.comm == AUTO else {}

    @property
    def own_momentum(self) -> bool:
        """Whether the codec accumulates a momentum, so that the optimizer must not."""
        return bool(self.codec) and bool(getattr(registry.parse(self.codec), "momentum", 0.0))


def read(text: str) -> System:
    """Raises ValueError, which says what is accepted."""
    name, at, buckets = text.strip().partition("@")
    buckets = buckets if at else TORCH
    if not _known(buckets):
        raise ValueError(f"system {text!r}: expected {', '.join(KINDS)} or a number of buckets after @")
    if name in (COMPUTE, *DDP):
        if buckets != TORCH:
            raise ValueError(f"system {text!r}: only gradcomm's buckets can be chosen")
        return System(name)
    if name == AUTO:
        return System(AUTO, buckets=buckets)
    try:
        registry.parse(name)
    except ValueError as error:
        raise ValueError(f"system {text!r}: neither {', '.join((COMPUTE, *DDP, AUTO))} nor a codec: {error}") from None
    return System("gradcomm", name, buckets)


def _known(buckets: str) -> bool:
    return buckets in KINDS or (buckets.isdecimal() and int(buckets) > 0)


def read_list(text: str) -> list[System]:
    """Systems separated by commas; those inside parentheses belong to a codec."""
    return [read(part) for part in command.listed(text)]


def with_buckets(systems: Sequence[System], kinds: Sequence[str]) -> list[System]:
    """Every system of gradcomm's with each kind of buckets, unless it says itself which; the others as they are.

    Raises ValueError for a kind that there is not.
    """
    odd = [kind for kind in kinds if not _known(kind)]
    if odd:
        raise ValueError(f"buckets {odd[0]!r}: expected {', '.join(KINDS)} or a number of them")
    out: list[System] = []
    for system in systems:
        again = kinds if system.daemons and system.buckets == TORCH else (system.buckets,)
        out += [System(system.comm, system.codec, buckets) for buckets in again]
    return list(dict.fromkeys(out))
