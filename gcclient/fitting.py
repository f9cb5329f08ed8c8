"""Whether what a checkpoint has of a domain fits the domain as it is about to be declared.

What may live here: reasons why not, as functions of both. What may not: what becomes of them (`checkpoint.py`), what a
checkpoint holds (`saved.py`), anything that asks or tells the daemon.

All of it can be told before anything is declared, layout included, which is a function of what is declared. Then who is
told that it does not fit can still load something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gcclient import saved
from gcclient.saved import Saved, States
from gcproto.agreed import DeclareDomain
from gcproto.manifest import AddressSpace, Block, ManifestError, Section, TensorSpec
from gcproto.messages import Registered
from gcproto.states import most_floats


def misplaced(known: Saved, declared: DeclareDomain, job: Registered, me: int) -> Iterator[str]:
    """Why what rank ``me`` loaded of a domain is not what its ranks, where they are now, would have saved."""
    before = known.domain
    if not known.whole and any(ranks[0] == me for ranks in before.nodes):
        yield f"what rank {me} saved is not in it; each rank loads its own"
    if before.ranks != declared.ranks:
        yield other_ranks(known, declared)
    elif before.nodes != (nodes := nodes_of(declared, job)):
        yield f"its ranks were spread over nodes as {_spread(before.nodes)}, and are now as {_spread(nodes)}"


def other_ranks(known: Saved, declared: DeclareDomain) -> str:
    return f"ranks {_few(known.domain.ranks)} saved it, ranks {_few(declared.ranks)} declare it"


def undeclared(known: Saved, names: Iterable[str]) -> str:
    """Which tensors are saved and not among a model's; empty if none are."""
    missing = known.specs().keys() - set(names)
    return f"{min(missing)!r} is in the checkpoint and is not declared ({len(missing)} in all)" if missing else ""


def strange(known: Saved, tensors: Iterable[TensorSpec]) -> dict[str, str]:
    """By name the tensors that nothing of what is saved fits, and why."""
    specs = known.specs()
    return {t.name: why for t in tensors if (why := saved.check_tensor(known, t, specs))}


def lost(what: str) -> str:
    """Of :meth:`Saved.states`: what none of the blocks can take."""
    return f"blocks are cut or owned otherwise now, so that {what} is lost"


def too_long(block: Block, label: str, states: States) -> str:
    """Whether there are more states than a codec can keep of a block; empty if not."""
    floats, most = len(states.values), most_floats(block.elements, len(block.bounds) - 1)
    return f"{floats} floats are saved of a block of {label}, at most {most} can be loaded" if floats > most else ""


def why_not(
    known: Saved, declared: DeclareDomain, sections: Sequence[Section] | None, job: Registered, me: int
) -> Iterator[str]:
    """Why not all of what is saved fits a domain that is about to be declared; nothing if it does. ``sections``: all of
    a model's; None where they come one by one, as those of single tensors, which are laid out first as they lay."""
    yield from misplaced(known, declared, job, me)
    if sections is not None:
        tensors = [t for section in sections for t in section.tensors]
        if why := undeclared(known, (t.name for t in tensors)):
            yield why
        yield from strange(known, tensors).values()
    elif declared.scoped:
        return
    else:
        sections = [Section(i, (tensor,)) for i, tensor in enumerate(known.domain.tensors)]
    yield from _uncut(known, declared, sections, job, me)


def _uncut(
    known: Saved, declared: DeclareDomain, sections: Sequence[Section], job: Registered, me: int
) -> Iterator[str]:
    """Laid out as in the domain, which has no sections yet; what finds its place here counts for nothing there."""
    if not known.blocks:
        return
    trial = Saved(known.label, known.domain, known.blocks, known.whole)
    nodes = nodes_of(declared, job)
    mine = next(i for i, ranks in enumerate(nodes) if me in ranks)
    space = AddressSpace(len(nodes), len(job.lane_sockets), job.partition_bytes, declared.whole)
    for section in sections:
        try:
            blocks = space.append(section)
        except ManifestError:
            return  # for the daemon to refuse, on all ranks
        if section.dtype in saved.FLOATING:
            for block, pieces in zip(blocks, saved.cut(section, blocks), strict=True):
                for states, what in trial.states(pieces, block.owner == mine):
                    if why := lost(what) if what else too_long(block, declared.label, states):
                        yield why


def nodes_of(declared: DeclareDomain, job: Registered) -> tuple[tuple[int, ...], ...]:
    """A domain's ranks on each of its nodes, in the job's first epoch."""
    found = (tuple(r for r in m.ranks if r in declared.ranks) for m in job.members)
    return tuple(ranks for ranks in found if ranks)


def _few(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _spread(nodes: tuple[tuple[int, ...], ...]) -> str:
    return " | ".join(_few(ranks) for ranks in nodes)
