"""Would compression pay: the question to the daemon, and its answer as users see it.

What may live here: which declared model is meant, the question's way through a restart of the daemon, the answer's
table. What may not: measuring (`timing.py`), planning (the daemon's).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gcclient import arguments
from gcclient.domain import Domain
from gcclient.errors import NoAdvice
from gcclient.grouping import plain_name
from gcproto.advice import BANDWIDTH_FORM, MAX_BANDWIDTHS, Advised, AskAdvice, is_bandwidth
from gcproto.manifest import USED
from gcproto.rates import RATE_FORM, read_rate, say_rate

if TYPE_CHECKING:
    from gcclient.session import Session


#: A daemon that measures codecs for the first time takes its time, seconds on top of the job's deadline.
PATIENCE: Final = 300.0


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """One plan on one link. ``bandwidth``: bytes a second a direction, ``measured``: whether it is this job's own link.

    ``plan``: none, fp16 or a quality of automatic plans; ``codec``: what it would mostly use; ``step_seconds``: what a
    step would take.
    """

    bandwidth: float
    measured: bool
    plan: str
    codec: str
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Advice:
    """What compression would bring; ``str()`` is a table.

    ``verdict``: one sentence about the link that was measured, and "don't" is one. ``compute_seconds``: of a step
    without any exchange. ``pays_below``: bytes a second above which nothing pays; 0 if nothing ever does, infinite if
    something does on every link. ``rows``: the measured link's first.
    """

    verdict: str
    compute_seconds: float
    pays_below: float
    rows: tuple[AdviceRow, ...]

    def __str__(self) -> str:
        if self.pays_below <= 0:
            pays = "on no link"
        elif math.isinf(self.pays_below):
            pays = "on every link"
        else:
            pays = f"below about {say_rate(self.pays_below)}"
        cells = [("link", "plan", "codec", "step")]
        for row in self.rows:
            link = say_rate(row.bandwidth) + (" (measured)" if row.measured else "")
            cells.append((link, row.plan, row.codec, f"{row.step_seconds * 1e3:.1f} ms"))
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        table = ["  ".join((*map(str.ljust, line[:3], widths), line[3].rjust(10))) for line in cells]
        facts = [self.verdict, f"computing: {self.compute_seconds * 1e3:.1f} ms a step; compression pays {pays}"]
        return "\n".join([*facts, *table])


class Asking:
    """A session's open questions by number, and the answers that came."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: dict[int, AskAdvice] = {}
        self._answers: dict[int, Advised] = {}
        self._last = 0

    def ask(self, domain: int, bandwidths: tuple[float, ...]) -> Advice:
        """Ask the daemon, and wait. Raises :class:`NoAdvice` and the job's failure."""
        session, control = self._session, self._session.daemon.control
        session.check()
        with control.sending:
            self._last += 1
            number = self._last
            self._open[number] = AskAdvice(number, domain, bandwidths)
            session.inform(self._open[number])
        try:
            session.wait_for(
                lambda: number in self._answers, "the daemon's advice", "advise", session.job.deadline + PATIENCE
            )
            answer = self._answers.pop(number)
        finally:
            del self._open[number]
        if answer.error:
            raise NoAdvice(answer.error, job=session.label, advice=answer.advice)
        rows = tuple(AdviceRow(r.bandwidth, r.measured, r.plan, r.codec, r.seconds) for r in answer.rows)
        below = math.inf if answer.stops_paying is None else answer.stops_paying
        return Advice(answer.verdict, answer.compute, below, rows)

    def on_answer(self, message: Advised) -> None:
        if message.request in self._open:
            self._answers[message.request] = message

    def again(self) -> None:
        """The daemon came back: whoever still waits asks anew. Called by the reading thread."""
        for message in list(self._open.values()):
            self._session.inform(message)


def domain_of(session: Session, given: Any) -> int:
    """The number of the domain that a state, a wrapped optimizer or a model was declared as; -1 for None, and where a
    model is exchanged in shards of which this rank has none.

    Of models declared several times the newest. Raises TypeError for anything else, ValueError for a model that was not
    declared.
    """
    if given is None:
        return -1
    averaging = getattr(given, "_averaging", None)
    holder = given if averaging is None else averaging.layout
    if isinstance(domain := getattr(holder, "domain", None), Domain):
        return domain.gradients
    if not callable(getattr(given, "named_parameters", None)):
        raise TypeError(f"expected a model, a state or a DistributedOptimizer, got a {type(given).__name__}")
    wanted = {plain_name(n): tuple(p.shape) for n, p in given.named_parameters() if p.requires_grad}
    for known in reversed(list(session.domains.values())):
        tensors = [t for section in known.sections for t in section.section.tensors if t.name != USED]
        # Where the gradients are another domain's, these have no elements: a first dimension of 0.
        skipped = int(known.gradients != known.id)
        if known.declared.scoped and {plain_name(t.name): t.shape[skipped:] for t in tensors} == wanted:
            return known.gradients
    raise ValueError(
        "this model was not declared: give it to gcclient.state() or its optimizer to DistributedOptimizer"
    )


def read_bandwidths(given: Iterable[float | str]) -> tuple[float, ...]:
    """Bytes a second; texts are rates such as "1gbit". Raises TypeError and ValueError that say what was expected."""
    form = f"numbers, {BANDWIDTH_FORM}, or {RATE_FORM}"
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"bandwidths={given!r}: expected several of these: {form}")
    found = []
    for one in given:
        try:
            value = read_rate(arguments.read_text(one, "bandwidths")) if isinstance(one, str) else float(one)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not is_bandwidth(value):
            raise ValueError(f"bandwidths={one!r}: expected {form}")
        found.append(value)
    if len(found) > MAX_BANDWIDTHS:
        raise ValueError(f"expected at most {MAX_BANDWIDTHS} bandwidths, got {len(found)}")
    return tuple(found)
