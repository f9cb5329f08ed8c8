"""Audits of a model's steps: the exact average beside what was delivered.

What may live here: when a step is audited, exchanging its gradients once more without loss, telling of the result.
What may not: options and arithmetic (`audit.py`), the step itself (`ddp.py`).

Until the next step begins, the arena holds all of the last one: what this rank brought in the input slots, what was
delivered in the output slots. So an audit looks back from there, before anything is overwritten. A step copies
nothing for it, no future of DDP waits for it, and what training gets is what it gets without one. Whether a step is
audited follows from its number, so all ranks do it alike; what they exchange meanwhile goes through a domain of its
own, which no plan can make lossy, in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from gcclient import device
from gcclient.arena import BlockPlace
from gcclient.audit import F64, Audit, Finding, Sums, finding
from gcclient.device import Bytes
from gcclient.domain import Domain, Step
from gcclient.session import GRACE, Session, log
from gcproto.audits import AuditAnswer, AuditReport, TensorError, audit_label
from gcproto.dtypes import DType
from gcproto.manifest import USED, Section, TensorSpec
from gcproto.messages import DeclareDomain
from gcproto.wire import Flag

#: Gradients are exchanged in pieces of so many bytes, two of each dtype under way.
PIECE_BYTES: Final = 4 << 20
_FIRST_DOMAIN: Final = 16
NOT_FINITE: Final = "a result was not finite"
_TORCH: Final = {code: dtype for dtype, code in device.DTYPES.items()}


def domain_number(audited: int) -> int:
    """The domain in which steps of domain ``audited`` are exchanged once more; the same on all ranks."""
    return max(xxhash.xxh3_64_intdigest(f"audit/{audited}".encode()) & 0x7FFFFFFF, _FIRST_DOMAIN)


@dataclass(slots=True, eq=False)
class Piece:
    """Elements ``lo:hi`` of a section, under way in ``places``; results of so many of them are ``missing``."""

    places: list[BlockPlace]
    lo: int
    hi: int
    missing: int = 0

    def deliver(self, places: Sequence[BlockPlace]) -> None:
        self.missing -= len(places)


class Auditor:
    """Audits the steps of ``domain``, whose sections must have been declared. All its ranks make one alike.

    ``average``: whether its steps average; else they sum.

    Raises what :meth:`gcclient.session.Session.declare` raises.
    """

    def __init__(self, session: Session, domain: Domain, options: Audit, average: bool = True) -> None:
        self.session, self.domain, self.options = session, domain, options
        self._flags = int(Flag.AVERAGE) if average else 0
        self.label = domain.declared.label
        self.audits = 0
        self.skipped = 0
        #: the first step known to be dense because an audit asked for it
        self.dense_from: int | None = None
        #: whether the lowest rank has asked for that, and steps have been exact since: another that becomes the lowest
        #: hears no answer, and whoever sets a plan after such a request has the last word
        self._asked = self._heeded = False
        ranks = domain.declared.ranks
        #: every node's first rank reports, so that each node's daemon knows
        self._reports = domain.arenas[0].index == 0
        # All ranks must agree on it, and what they compare is this.
        label = audit_label(self.label, options.window)
        self._exact = session.domain(DeclareDomain(label, domain_number(domain.id), ranks, codec="none"))
        #: of the window that is under way: why it cannot be compared (empty: it can); sums by (section, first element)
        self._void = ""
        #: epochs that its results and the audit's were made in
        self._epochs: set[int] = set()
        self._sums: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
        #: steps up to this one are not audited: some rank has not got them
        self._since = domain.step
        session.admission.hear.append(self._begin)
        #: the model's sections; a note beside its gradients is none of them
        self._sections = [d.section for d in domain.sections if d.section.tensors[0].name != USED]
        self._stages = [self._declare(section) for section in self._sections]
        session.audited[domain.id] = self.on_answer

    @property
    def _first(self) -> bool:
        """Whether this rank decides and writes the log: of those that are there the lowest."""
        there = set(self.domain.declared.ranks) & set(self.session.membership.ranks)
        return self.session.me.rank == min(there)

    def _declare(self, section: Section) -> list[list[BlockPlace]]:
        """Where the pieces of a section take turns: two places, one where that holds all of it."""
        length = min(section.elements, PIECE_BYTES // section.dtype.itemsize)
        if not length:
            return []
        turns = 2 if length < section.elements else 1
        specs = [TensorSpec(f"audit.{section.index}.{turn}", (length,), int(section.dtype)) for turn in range(turns)]
        return [self.session.declare(self._exact, (spec,)) for spec in specs]

    def _begin(self) -> None:
        """Ranks came in that made none of the steps so far."""
        self._since = self.domain.step
        self._sums.clear()

    # ---------------------------------------------------------------------------------------- audits
    def look_back(self) -> None:
        """Audit the last step if its turn has come. All ranks call this once between each step and the next.

        Raises the job's failure, :class:`~gcclient.StepTimeout`.
        """
        step, window = self.domain.step, self.options.window
        left = -step % self.options.every  # steps until the window ends
        if left >= window or step - (window - 1 - left) <= self._since:
            return
        blocks = [[self.domain.blocks[b.key] for b in self.domain.space.blocks[s.index]] for s in self._sections]
        places = [place for found in blocks for place in found]
        self._wait(lambda: all(place.done for place in places))
        if left == window - 1:
            self._void = ""
            self._epochs.clear()
        # Void on all ranks or on none: they go on alike.
        brought = [place for place in places if place.step == step]
        self._look(brought)
        if any(place.nonfinite for place in brought):
            self._void = self._void or NOT_FINITE
        tensors: dict[str, Sums] = {}
        if not self._void:
            for section, inside, stages in zip(self._sections, blocks, self._stages, strict=True):
                tensors |= self._compare(section, inside, stages)
        if not left:
            self._sums.clear()
            found = None if self._void else finding(self.label, tensors)
            if found is None:
                self._skip(step, self._void or NOT_FINITE)
            elif not self._same_members():
                self._skip(step, "nodes were lost or came back meanwhile")
            else:
                self._tell(step, found)

    def _look(self, places: Sequence[BlockPlace]) -> None:
        """Whether there is something to compare in these results, and whose averages they are."""
        self._epochs.update(place.epoch for place in places)
        if any(place.skipped for place in places):
            self._void = self._void or "a step was given up with a lost node"

    def _same_members(self) -> bool:
        """Whether what was delivered and what is exact are averages over the same ranks. Each rank knows of its own
        results alone: what is exchanged must not depend on it."""
        members = self.session.membership
        if 0 in self._epochs and max(members.epoch, members.announced) > 1:
            return False
        return len(self._epochs - {0}) < 2

    def _compare(self, section: Section, places: list[BlockPlace], stages: list[list[BlockPlace]]) -> dict[str, Sums]:
        """Exchange what this rank brought of a section, and set what was delivered against the result."""
        out = {t.name: Sums() for t in section.tensors}
        if not stages:
            return out
        length = PIECE_BYTES // section.dtype.itemsize
        under_way: list[Piece] = []
        for turn, lo in enumerate(range(0, section.elements, length)):
            if len(under_way) == len(stages):
                self._finish(section, places, under_way.pop(0), out)
            piece = Piece(stages[turn % len(stages)], lo, min(lo + length, section.elements))
            self._push(section, places, piece)
            under_way.append(piece)
        for piece in under_way:
            self._finish(section, places, piece, out)
        return out

    def _push(self, section: Section, places: list[BlockPlace], piece: Piece) -> None:
        mine = self._joined(places, piece, [p.input for p in places])
        with self._exact.pushing:
            step = Step(self._exact, self._flags, 1.0, lambda: None)
            piece.missing = len(piece.places)
            for place in piece.places:
                at = place.block.start * section.dtype.itemsize
                part = mine[at : at + place.block.nbytes]
                place.op = piece
                place.input[: part.nbytes] = part
                place.input[part.nbytes :] = 0  # past the end of the section
                step.add(place)
            step.close()

    def _finish(self, section: Section, places: list[BlockPlace], piece: Piece, out: dict[str, Sums]) -> None:
        self._wait(lambda: piece.missing == 0)
        self._look(piece.places)
        exact = _doubles(np.concatenate([p.output for p in piece.places]), section.dtype)
        delivered = _doubles(self._joined(places, piece, [p.output for p in places]), section.dtype)
        if self.options.window > 1:
            delivered, exact = self._summed(section, piece, delivered, exact)
        start = 0
        for tensor in section.tensors:
            a, b = max(start, piece.lo) - piece.lo, min(start + tensor.elements, piece.hi) - piece.lo
            if a < b:
                out[tensor.name].add(delivered[a:b], exact[a:b])
            start += tensor.elements

    def _joined(self, places: Sequence[BlockPlace], piece: Piece, memory: Sequence[Bytes]) -> Bytes:
        """A piece's bytes, where ``memory`` holds the blocks of ``places``, which are in address order.

        Zeros for blocks that the step had nothing for: what they hold is an earlier one's.
        """
        parts = []
        for place, data in zip(places, memory, strict=True):
            block, size = place.block, place.block.dtype.itemsize
            a, b = max(piece.lo, block.start) - block.start, min(piece.hi, block.start + block.elements) - block.start
            if a < b:
                part = data[a * size : b * size]
                parts.append(part if place.step == self.domain.step else np.zeros_like(part))
        return np.concatenate(parts)

    def _summed(self, section: Section, piece: Piece, delivered: F64, exact: F64) -> tuple[F64, F64]:
        """The sums over the window so far, kept as float32[2, elements of the piece]."""
        key = section.index, piece.lo
        if key not in self._sums:
            self._sums[key] = np.zeros((2, delivered.size), np.float32)
        kept = self._sums[key]
        kept[0] += delivered
        kept[1] += exact[: delivered.size]
        both = kept.astype(np.float64)
        return both[0], both[1]

    def _wait(self, ready: Callable[[], bool]) -> None:
        self.session.wait_for(ready, f"an audit of {self.label}", "exchange", self.session.job.deadline + GRACE)

    # ----------------------------------------------------------------------------------------- telling
    def _skip(self, step: int, why: str) -> None:
        self.skipped += 1
        if self._first:
            log.info("audit of %s, step %d: skipped, %s", self.label, step, why)

    def _tell(self, step: int, found: Finding) -> None:
        self.audits += 1
        limit, window, whole = self.options.limit, self.options.window, found.whole
        above = limit is not None and whole.error > limit
        self._heeded = self._heeded or (self._asked and whole.error == 0.0)
        self._asked = self._asked or (above and self.options.action == "dense")
        # Until it is answered: the request of a daemon that was restarted is gone.
        ask = above and self.options.action == "dense" and self._first and self.dense_from is None and not self._heeded
        self.session.counters.audit = {
            "domain": self.label,
            "step": step,
            "window": window,
            "error": whole.error,
            "cosine": whole.cosine,
            "ratio": whole.ratio,
            "worst": [_facts(t) for t in found.worst],
            "audits": self.audits,
            "skipped": self.skipped,
            "dense_from": self.dense_from,
        }
        if self._reports:
            self.session.inform(
                AuditReport(
                    self.domain.id, step, whole.error, whole.cosine, whole.ratio, found.worst, self.audits,
                    self.skipped, limit, ask, window,
                )
            )  # fmt: skip
        if self._first:
            worst = ", ".join(f"{t.name} {t.error:.3g}" for t in found.worst[:3])
            steps = f"step {step}" if window == 1 else f"steps {step - window + 1}..{step}"
            line = (
                f"audit of {self.label}, {steps}: error {whole.error:.3g}, cosine {whole.cosine:.3g}, "
                f"norm {whole.ratio:.3g} times the exact one's; largest errors: {worst}"
            )
            if above:
                then = "; asking the daemon to go on uncompressed" if ask else ""
                log.warning("%s; above the limit of %g%s", line, limit, then)
            else:
                log.info("%s", line)

    def on_answer(self, answer: AuditAnswer) -> None:
        """What became of the request to go on uncompressed."""
        if answer.error:
            log.error("audit of %s: cannot go on uncompressed: %s", self.label, answer.error)
            return
        self.dense_from = answer.step
        if self.session.counters.audit is not None:
            self.session.counters.audit["dense_from"] = answer.step
        log.warning("audit of %s: uncompressed from step %d on (plan %d)", self.label, answer.step, answer.plan)


def _doubles(data: Bytes, dtype: DType) -> F64:
    return torch.from_numpy(data).view(_TORCH[dtype]).double().numpy()


def _facts(t: TensorError) -> dict[str, Any]:
    return {"name": t.name, "error": t.error, "cosine": t.cosine, "ratio": t.ratio}
