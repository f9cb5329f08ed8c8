"""Checkpoints: what this rank's daemon holds back, as tensors to save, and bringing it to the daemon of a later job.

What may live here: the way between a checkpoint and the daemon. What may not: what a checkpoint holds (`saved.py`),
what users call (`state_dicts.py`), sockets.

Saving. A step of each domain is over, and the daemon says that it is settled; lanes then hand over the settled states
of all blocks, to a node's first rank, piece by piece. Nothing of them changes meanwhile: no block is exchanged on a
node before its first rank has pushed it.

Loading. What was saved is read before the model is declared. The declaration then says where the domain goes on (all
ranks must agree), and the first rank of each node brings the states of each section as soon as that has its memory,
before it pushes anything.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.structs import replace

from gcclient import fitting, saved
from gcclient.domain import Domain
from gcclient.errors import GradcommError, StateMismatch, StepTimeout
from gcclient.node_states import Held, Within
from gcclient.saved import F32, Saved, SavedBlock, SavedDomain, States
from gcproto.agreed import DeclareDomain, Resumed
from gcproto.manifest import Block, Section, TensorSpec
from gcproto.states import (
    PIECE,
    AskStanding,
    AskStates,
    BlockStates,
    GiveStates,
    Standing,
    StatesKept,
)

if TYPE_CHECKING:
    from gcclient.session import Session

log = logging.getLogger("gcclient")
#: the codec of domains that hold nothing back
LOSSLESS: Final = "none"
#: The daemon is asked so often whether the last step is settled, seconds.
_ASK_EVERY: Final = 0.01
#: what models are called: by kind and number, and by their ranks where those are not all
_MODEL: Final = re.compile(r"(\w+\.\d+)( of ranks [\d,]+)?$")
EARLIER: Final = "call load_state_dict() after init() and before anything is declared or pushed"
FRESH: Final = (
    "load it with strict=False to drop what does not fit, or {'format': 1} to begin with no residual; "
    "then declare again"
)
#: where some of it is declared already, so that no other checkpoint can be loaded
LATE: Final = "call gcclient.shutdown() and init() first, and " + FRESH


@dataclass(slots=True)
class _Resuming:
    """A domain that goes on from a checkpoint. ``brings``: this rank brings what its node held back."""

    saved: Saved
    brings: bool


class Checkpoints:
    """A session's part in them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: AskStanding | None = None
        self._standing: Standing | None = None
        self._answers: dict[int, BlockStates | StatesKept] = {}
        #: what was loaded and not declared yet, by label; and domains that go on from some of it, by number
        self._loaded: dict[str, Saved] = {}
        self._resuming: dict[int, _Resuming] = {}
        #: what domains were declared with, by label: it may be loaded again, for those that are not declared yet
        self._goes_on: dict[str, SavedDomain] = {}
        #: what workers hold back within their nodes
        self.within = Within(session, self.stands, self._lose)
        self._strict = True
        #: held from a question to its answer: lanes and supervisor are asked one thing at a time
        self._turn = threading.Lock()

    # ---------------------------------------------------------------------------------- the daemon's answers
    def on_standing(self, message: Standing) -> None:
        if self._asked is not None and message.domain == self._asked.domain:
            self._standing, self._asked = message, None

    def on_states(self, lane: int, message: BlockStates | StatesKept) -> None:
        domain = self._session.domains.get(message.domain)
        asked: Any = domain.questions[lane] if domain is not None else None
        if domain is None or asked is None or _which(asked) != _which(message):
            return  # asked twice, around a restart
        domain.questions[lane] = None
        self._answers[lane] = message

    def again(self) -> None:
        """The daemon came back: it is asked once more. Called by the reading thread."""
        if self._asked is not None:
            self._session.inform(self._asked)

    def _exchange(self, domain: Domain, lane: int, asked: AskStates | GiveStates) -> Any:
        """A lane's answer."""
        what = f"states of {domain.declared.label}"
        with self._turn:
            self._answers.pop(lane, None)  # to one that nobody waited for any more
            domain.question(lane, asked)
            self._session.wait_for(lambda: lane in self._answers, what, "checkpoint", self._session.patience)
            return self._answers.pop(lane)

    # ------------------------------------------------------------------------------------------------ saving
    def collect(self) -> dict[str, Any]:
        """What :func:`state_dict` returns."""
        self._session.check()
        found: dict[str, Any] = {"format": saved.FORMAT}
        for _, domain in sorted(self._session.domains.items()):
            if domain.declared.codec != LOSSLESS:
                with domain.pushing:
                    found |= self._domain(domain)
        # What a job has not come to yet it keeps for the next one.
        for label, known in self._loaded.items():
            log.info("%s: what was loaded of it is saved again, since it is not declared", label)
            found |= saved.write_domain(label, known.domain)
            if known.whole:
                found |= saved.write_part(self._session.me.rank, label, known.blocks)
        return found | self.within.collect()

    def _domain(self, domain: Domain) -> dict[str, Any]:
        declared, label = domain.declared, domain.declared.label
        if domain.closed != domain.step:
            raise RuntimeError(
                f"state_dict() was called in the middle of step {domain.step} of {label}: call it after "
                "optimizer.step(), between steps"
            )
        resumed = self._settled(domain)
        sections = _newest(domain)
        about = SavedDomain(
            declared.ranks,
            domain.nodes,
            declared.scoped,
            declared.codec,
            saved.tensors_of(sections),
            resumed.origin.hex(),
            resumed.steps,
            resumed.nodes,
            resumed.rules,
            resumed.controller,
            resumed.default,
            resumed.planned,
        )
        out = saved.write_domain(label, about)
        if self._session.me.rank == domain.nodes[domain.me][0]:
            blocks = (b for s in sections if s.dtype in saved.FLOATING for b in self._blocks(domain, s))
            out |= saved.write_part(self._session.me.rank, label, blocks)
        return out

    def _settled(self, domain: Domain) -> Resumed:
        """What the daemon says of a domain once its last step is settled. Raises StepTimeout, and the job's failure."""
        session, began, label = self._session, time.monotonic(), domain.declared.label
        while True:
            found = self.stands(domain)
            if found.resumed is None:
                raise GradcommError(f"the daemon does not know {label}", job=session.label, phase="checkpoint")
            if found.settled >= domain.step:
                return found.resumed
            elapsed = time.monotonic() - began
            if elapsed > session.job.deadline:
                raise StepTimeout(
                    f"step {domain.step} of {label} was not settled",
                    job=session.label,
                    domain=domain.id,
                    step=domain.step,
                    phase="checkpoint",
                    elapsed=elapsed,
                    last_step=found.settled,
                    advice="call state_dict() on all ranks after the same step",
                )
            time.sleep(_ASK_EVERY)

    def stands(self, domain: Domain) -> Standing:
        """What the daemon says of a domain now."""
        session, what = self._session, f"{domain.declared.label} to settle"
        with self._turn:
            with session.daemon.control.sending:
                self._standing, self._asked = None, AskStanding(domain.id)
                session.inform(self._asked)
            session.wait_for(lambda: self._standing is not None, what, "checkpoint", session.patience)
            assert self._standing is not None
            return self._standing

    def _blocks(self, domain: Domain, section: Section) -> Iterator[tuple[SavedBlock, F32]]:
        """One after the other: all of them are as large as what is saved."""
        blocks = domain.space.blocks[section.index]
        for block, pieces in zip(blocks, saved.cut(section, blocks), strict=True):
            # Of a block that was a lost node's this worker does not know who owns it now.
            for side in (0, 1) if block.owner == domain.me or self._session.job.commits else (0,):
                states = self._fetch(domain, block, bool(side))
                if states is not None:
                    yield SavedBlock(side, pieces, len(states.values), states.tag, states.held), states.values

    def _fetch(self, domain: Domain, block: Block, owner: bool) -> States | None:
        """The settled states of a block; None if it has none."""
        parts, at = [], 0
        while True:
            answer = self._exchange(domain, block.lane, AskStates(domain.id, block.key, owner, at, domain.step))
            parts.append(np.frombuffer(answer.data, np.float32))
            at += parts[-1].size
            if at >= answer.floats or not parts[-1].size:
                break
        return States(owner, answer.tag, answer.held, np.concatenate(parts)) if at else None

    # ----------------------------------------------------------------------------------------------- loading
    def load(self, found: dict[str, Saved], within: dict[str, Held], strict: bool) -> None:
        """What :func:`load_state_dict` was given, read. Raises StateMismatch."""
        self._session.check()
        for domain in self._session.domains.values():
            label = domain.declared.label
            if label in found and self._goes_on.get(label) != found[label].domain:
                raise StateMismatch(
                    f"{label} was declared before its checkpoint was loaded",
                    job=self._session.label, domain=domain.id, phase="checkpoint", advice=EARLIER,
                )  # fmt: skip
        self._loaded = {label: known for label, known in found.items() if label not in self._goes_on}
        self._strict = strict
        self.within.loaded = dict(within)

    def resumed(self, declared: DeclareDomain) -> DeclareDomain:
        """A domain about to be declared, with what it goes on from. Raises StateMismatch."""
        session = self._session
        self.check(declared)
        known = self._loaded.get(declared.label)
        if (there := session.found.get(declared.domain)) is not None:
            # It runs, and this worker comes into it: without residuals, and as all others have it.
            self._loaded.pop(declared.label, None)
            return replace(declared, resumed=there.declared.resumed)
        if known is None:
            for label, why in self._other_ranks(declared):
                self._lose(label, why)
            if self._loaded and declared.scoped and declared.codec != LOSSLESS:
                have = ", ".join(sorted(self._loaded))
                log.warning("%s is not in the checkpoint, which has %s: it begins without what was held back",
                            declared.label, have)  # fmt: skip
            return declared
        before = known.domain
        for why in fitting.misplaced(known, declared, session.job, session.me.rank):
            self._lose(known.label, why)
        del self._loaded[declared.label]
        self._goes_on[declared.label] = before
        if before.ranks != declared.ranks:
            self._drop(known)
            return declared
        nodes = fitting.nodes_of(declared, session.job)
        if before.codec != declared.codec:
            log.info("%s: saved with compression=%r, goes on with %r", declared.label, before.codec, declared.codec)
        first = next(ranks[0] for ranks in nodes if session.me.rank in ranks)
        self._resuming[declared.domain] = _Resuming(known, session.me.rank == first)
        if session.me.rank != first:
            self._drop(known)
        return replace(declared, resumed=known.resumed(before.nodes == nodes, before.codec == declared.codec))

    def _other_ranks(self, declared: DeclareDomain) -> Iterator[tuple[str, str]]:
        """(label, why) of a model that was not saved, where one of its name was, of other ranks: of all, say, and now
        those that have a shard."""
        if declared.codec == LOSSLESS or (name := _MODEL.match(declared.label)) is None:
            return
        for label, known in self._loaded.items():
            found = _MODEL.match(label)
            if found is not None and found[1] == name[1] and self._session.me.rank in known.domain.ranks:
                yield label, fitting.other_ranks(known, declared)

    def check(self, declared: DeclareDomain, sections: Sequence[Section] | None = None) -> None:
        """A domain is about to be declared. Raises StateMismatch where something of the checkpoint would be lost and is
        not to be: now, while it can still be loaded otherwise. ``sections``: a model's; None where they come later."""
        session = self._session
        if not self._strict or declared.domain in session.found:
            return
        known = self._loaded.get(declared.label)
        if known is None:
            reasons = self._other_ranks(declared)
        else:
            all_why = fitting.why_not(known, declared, sections, session.job, session.me.rank)
            reasons = ((declared.label, why) for why in all_why)
        for label, why in reasons:
            self._lose(label, why)

    def check_single(self, domain: Domain, tensors: Iterable[TensorSpec]) -> None:
        """Some more of a domain is about to be declared. Raises StateMismatch as :meth:`check` does."""
        resuming = self._resuming.get(domain.id)
        if self._strict and resuming is not None:
            for why in fitting.strange(resuming.saved, tensors).values():
                self._lose(resuming.saved.label, why, late=domain.declared.scoped)

    def lay_out(self, domain: Domain) -> None:
        """Declare single tensors as they lay, when their domain is: those that are never pushed again keep their places
        and what was held back of them, as they would have in the job that was saved."""
        resuming = self._resuming.get(domain.id)
        if resuming is None or domain.declared.scoped:
            return
        for tensor in resuming.saved.domain.tensors:
            index = len(domain.sections)
            self._session.declare(domain, (tensor,))
            domain.found.append(index)

    def bring(self, domain: Domain, section: Section) -> None:
        """Bring what was saved of a section that is there now."""
        resuming = self._resuming.get(domain.id)
        if resuming is None:
            return
        known = resuming.saved
        strange = fitting.strange(known, section.tensors)
        if strange:
            self._lose(known.label, next(iter(strange.values())), late=True)
        fits = {t.name for t in section.tensors if t.name not in strange}
        if not domain.declared.scoped:
            count = sum(block.pieces[0][0] in strange for block, _ in known.blocks)
            self._dropped(count, known.label, f"what was held back of {', '.join(strange)}")
        if resuming.brings and section.dtype in saved.FLOATING:
            blocks = domain.space.blocks[section.index]
            for block, pieces in zip(blocks, saved.cut(section, blocks), strict=True):
                wanted = tuple((name if name in fits else "", a, b) for name, a, b in pieces)
                for states, lost in known.states(wanted, block.owner == domain.me):
                    if lost:
                        self._lose(known.label, fitting.lost(lost), 1, lost, late=True)
                    if why := fitting.too_long(block, known.label, states):
                        self._lose(known.label, why, 1, f"what was held back of {pieces[0][0]!r}", late=True)
                    else:
                        self._give(domain, block, states)

    def _give(self, domain: Domain, block: Block, states: States) -> None:
        floats = len(states.values)
        for first in range(0, floats, PIECE):
            data = states.values[first : first + PIECE].tobytes()
            asked = GiveStates(domain.id, block.key, states.owner, first, floats, states.tag, states.held, data)
            self._exchange(domain, block.lane, asked)

    def compare(self, domain: Domain, names: Iterable[str]) -> None:
        """These tensors are about to be declared in a model's domain: those that are saved and not among them are
        lost."""
        resuming = self._resuming.get(domain.id)
        if resuming is not None and (why := fitting.undeclared(resuming.saved, names)):
            self._lose(resuming.saved.label, why)

    def complete(self, domain: Domain) -> None:
        """All tensors of a model's domain are declared: what has found no place until now will find none."""
        resuming = self._resuming.pop(domain.id, None)
        if resuming is not None and resuming.brings:
            self._drop(resuming.saved)

    # ------------------------------------------------------------------------------------- what does not fit
    def _lose(self, label: str, why: str, count: int = 0, what: str = "", *, late: bool = False) -> None:
        """Raises StateMismatch where that is asked for; else ``count`` states are lost. ``late``: what it is about is
        declared already."""
        if self._strict:
            raise StateMismatch(
                f"{label}: the checkpoint does not fit: {why}",
                job=self._session.label, phase="checkpoint", advice=LATE if late else FRESH,
            )  # fmt: skip
        log.warning("%s: the checkpoint does not fit as a whole: %s", label, why)
        self._dropped(count, label, what)

    def _drop(self, known: Saved) -> None:
        """Whatever of it found no place is lost."""
        left = [block for i, (block, _) in enumerate(known.blocks) if i not in known.used]
        if left:
            known.used.update(range(len(known.blocks)))
            self._dropped(len(left), known.label, f"what was held back of {left[0].pieces[0][0]!r} and others")

    def _dropped(self, count: int, label: str, what: str) -> None:
        if count:
            self._session.counters.states_dropped += count
            log.warning("%s: %s is dropped (states of %d block(s))", label, what, count)


def _newest(domain: Domain) -> list[Section]:
    """A domain's sections; of a single tensor that was laid out as it was saved, and pushed as another, the latter."""
    return list({d.section.tensors[0].name: d.section for d in domain.sections}.values())


def _which(message: Any) -> tuple[int, bool, int]:
    return message.key, message.owner, message.first


#: what a session does when its daemon says so: (session, lane, message)
HANDLERS: Final[dict[type, Callable[[Session, int, Any], None]]] = {
    Standing: lambda session, lane, message: session.checkpoints.on_standing(message),
    BlockStates: lambda session, lane, message: session.checkpoints.on_states(lane, message),
    StatesKept: lambda session, lane, message: session.checkpoints.on_states(lane, message),
}
