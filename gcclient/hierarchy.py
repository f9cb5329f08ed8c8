"""Two levels: gradients are summed among the workers of a node first, each of which then brings a shard of the sum.

What may live here: which rank has which shard, whether a model can be exchanged so, declaring it. What may not: what
the workers of a node do among themselves (`node_group.py`), steps (`sharded.py`).

A parameter's n elements are cut into as many parts as the node with the fewest workers has workers: part k of s is
elements [kn/s, (k+1)n/s). The k-th rank of every node has part k of every parameter, so shards do not depend on torch's
buckets and an element's residual stays where it is. These ranks, one a node, are a domain; ranks beyond are in none.
A node brings its sum times nodes/ranks, so that the average over the domain's ranks is the average over all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
import torch.distributed as dist

from gcclient import device
from gcclient.call_domains import LOSSLESS
from gcclient.domain import Domain
from gcclient.parameters import (
    Model,
    Parameter,
    Prepared,
    declare_prepared,
    declare_tensor,
    number,
    numbering,
    prepare,
    takes_matrices,
)
from gcclient.session import Session
from gcproto.agreed import MemberInfo
from gcproto.manifest import USED

log = logging.getLogger("gcclient")

#: What ``hierarchy`` may be.
Hierarchy = bool | Literal["auto"]
AUTO: Final = "auto"
#: what is summed in a wider type, as daemons do it
_HALVES: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The ranks of a domain by node, as one of them sees it.

    ``local``: those of its node, ascending; ``place``: its own place among them; ``shards``: how many of them have one;
    ``peers``: the ranks that have the same shard as this one, one a node; empty where it has none. A node's sum counts
    ``weight[0] / weight[1]``.
    """

    local: tuple[int, ...]
    place: int
    shards: int
    peers: tuple[int, ...]
    weight: tuple[int, int]

    @classmethod
    def of(cls, members: Sequence[MemberInfo], ranks: Iterable[int], me: int) -> Nodes:
        """How ``ranks`` are spread over the nodes of a job."""
        inside = set(ranks)
        nodes = [found for m in members if (found := tuple(sorted(inside.intersection(m.ranks))))]
        local = next(node for node in nodes if me in node)
        place, shards = local.index(me), min(map(len, nodes))
        peers = tuple(sorted(node[place] for node in nodes)) if place < shards else ()
        common = math.gcd(len(nodes), len(inside))
        return cls(local, place, shards, peers, (len(nodes) // common, len(inside) // common))

    @property
    def has_shard(self) -> bool:
        return bool(self.peers)

    @property
    def flat(self) -> bool:
        """Whether there is nothing to sum: every node has one of the ranks."""
        return self.weight == (1, 1)


def part(elements: int, shards: int, place: int) -> tuple[int, int]:
    """The elements, from and to, of shard ``place`` of a parameter."""
    return elements * place // shards, elements * (place + 1) // shards


def summed_as(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of ``dtype`` are summed, and shards of them exchanged."""
    return torch.float32 if dtype in _HALVES else dtype


def read_hierarchy(hierarchy: object) -> Hierarchy:
    """Raises TypeError and ValueError that say what is accepted."""
    if isinstance(hierarchy, bool):
        return hierarchy
    if not isinstance(hierarchy, str):
        raise TypeError(f"hierarchy={hierarchy!r}: expected True, False or 'auto', got a {type(hierarchy).__name__}")
    if hierarchy != AUTO:
        raise ValueError(f"hierarchy={hierarchy!r}: expected True, False or 'auto'")
    return AUTO


def nodes_of(session: Session, hierarchy: Hierarchy, model: Model) -> Nodes | None:
    """How the ranks of ``model`` are to exchange it in shards; None where each is to bring all of its gradients.

    Raises ValueError where ``hierarchy`` is True and something asked for does not go with it.
    """
    if not hierarchy:
        return None
    nodes = Nodes.of(session.job.members, model.ranks, session.me.rank)
    if nodes.flat:
        return None
    why = _why_not(session, model)
    if hierarchy is True:
        if why:
            raise ValueError(f"hierarchy=True: {why}; leave hierarchy out, or give 'auto'")
        return nodes
    if not why and any(t.device.type == "cpu" for t in model.tensors):
        why = "gradients are on the CPU, where daemons add them sooner"
    elif nodes.shards < 2:
        why = "some node has one worker only, which would bring all of a node's gradients"
    if why:
        log.info("hierarchy='auto': gradients are not summed within the node first: %s", why)
        return None
    return nodes


def _why_not(session: Session, model: Model) -> str:
    """Why a model cannot be exchanged in shards; empty if it can."""
    options = model.options
    if session.job.commits:
        return "needs on_loss='fail': nodes are weighed by their workers for good"
    if options.audit is not None:
        return "does not go with audit (or GC_AUDIT), which compares what each rank brought"
    if options.whole or takes_matrices(options.codec):
        return "does not go with whole=True and codecs of whole matrices (powersgd): shards cut every parameter"
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != session.me.size:
        return "needs torch.distributed over all ranks of the job: initialise it before gcclient.init()"
    places = {t.device for t in model.tensors}
    if len(places) > 1:
        return f"needs all parameters on one device, got {', '.join(sorted(map(str, places)))}"
    if (kind := places.pop().type) not in ("cpu", "cuda"):
        return f"sums gradients on cpu and cuda, got {kind}"
    if kind == "cuda" and not dist.is_nccl_available():
        return "needs NCCL for gradients on cuda, and this torch has none"
    return ""


@dataclass(frozen=True, slots=True)
class Shards:
    """What a model was declared as.

    ``domain``: of this rank's shard, where it has one, else ``agreed``, which all ranks are in and which has no
    gradients. ``parameters``: the whole tensors, with the places of this rank's part (none without a shard). ``note``:
    of float64, for what the ranks of a node tell each other beside the gradients; None where this rank has no shard, or
    only one of its node has and nothing is to be said.
    """

    agreed: Domain
    domain: Domain
    parameters: list[Parameter]
    note: Parameter | None
    #: what the model is called, whichever shard of it a rank has
    label: str


def declare_shards(session: Session, model: Model, nodes: Nodes, *, node_codec: str = "", said: int = 0) -> Shards:
    """Declare a model in shards, with a note of ``said`` elements (0: one, where it is needed). All its ranks together;
    :func:`gcclient.state` says what is raised."""
    for name, tensor in model.named:
        device.dtype_of(tensor, name)  # of the tensors themselves: others stand for them below
    # All that may be refused before any of it is declared.
    with numbering(session):
        which, label = number(session, model.kind, model.ranks)
        whole = _agree(session, which, _about(label, model, nodes, node_codec), model)
        shard = None
        if nodes.has_shard:
            shard = prepare(session, *number(session, model.kind, nodes.peers), _shard(model, nodes))
    agreed, parameters = declare_prepared(session, whole)
    tensors = dict(model.named)
    if shard is None:
        agreed.gradients = -1
        return Shards(agreed, agreed, _whole(parameters, tensors), None, label)
    domain, parameters = declare_prepared(session, shard)
    agreed.gradients = domain.id
    note = None
    if said or nodes.shards > 1:
        note = declare_tensor(session, domain, USED, torch.zeros(max(said, 1), dtype=torch.float64, device=device.HOST))
    return Shards(agreed, domain, _whole(parameters, tensors), note, label)


def _about(label: str, model: Model, nodes: Nodes, node_codec: str) -> str:
    """What the domain is called in which all ranks compare what they declare."""
    about = f"{label} in {nodes.shards} shards a node, codec {model.options.codec or 'of the daemon'}"
    if node_codec:
        about += f", within nodes {node_codec}"
    if model.options.exclude:
        about += f", all but {', '.join(model.options.exclude)}"
    return about


def _shard(model: Model, nodes: Nodes) -> Model:
    """What this rank has of a model."""
    parts = []
    for name, tensor in model.named:
        lo, hi = part(tensor.numel(), nodes.shards, nodes.place)
        parts.append((name, torch.empty(hi - lo, dtype=summed_as(tensor.dtype), device="meta")))
    return Model(model.kind, parts, nodes.peers, replace(model.options, whole=False))


def _agree(session: Session, which: int, about: str, model: Model) -> Prepared:
    """Have all ranks compare what they declare: ranks with different shards are in no domain together.

    The domain has the number that the model's would have without shards, so that a rank that declares it so is told of;
    its tensors have no elements, and so take no memory.
    """
    empty = [(name, torch.empty((0, *t.shape), dtype=t.dtype, device="meta")) for name, t in model.named]
    lossless = replace(model.options, codec=LOSSLESS, whole=False, exclude=())
    return prepare(session, which, about, replace(model, named=empty, options=lossless))


def _whole(parameters: list[Parameter], tensors: dict[str, torch.Tensor]) -> list[Parameter]:
    return [replace(p, tensor=tensors[p.name], dtype=device.dtype_of(tensors[p.name], p.name)) for p in parameters]
