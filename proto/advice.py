"""A worker's question whether compression would pay, and the answer.

What may live here: these messages and their bounds. What may not: what is answered (`gcserver.runtime.advising`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from gcproto.packed import Message

MAX_BANDWIDTHS: Final = 64
#: Of links that are asked about, bytes a second: a byte takes no time on more, and on less for ever.
LEAST_BANDWIDTH: Final = 1.0
MOST_BANDWIDTH: Final = 1e15
BANDWIDTH_FORM: Final = f"bytes a second from {LEAST_BANDWIDTH:g} to {MOST_BANDWIDTH:g}"


def is_bandwidth(value: float) -> bool:
    """Whether a link may have it; not a number: no."""
    return LEAST_BANDWIDTH <= value <= MOST_BANDWIDTH


class AskAdvice(Message, frozen=True, tag="advise?"):
    """Would compression pay? Of ``domain`` (-1: the job's largest model), on its own link and on others: ``bandwidths``
    in bytes a second a direction (none: usual ones). ``request`` comes back with the answer."""

    request: int
    domain: int = -1
    bandwidths: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_BANDWIDTHS)] = ()


class AdviceRow(msgspec.Struct, frozen=True, array_like=True):
    """One plan on one link: bytes a second, whether that is the measured link, what is expected, seconds a step."""

    bandwidth: float
    measured: bool
    plan: str
    codec: str
    seconds: float


class Advised(Message, frozen=True, tag="advised"):
    """The answer to AskAdvice: a sentence, seconds of a step without exchange, bytes a second above which nothing pays
    (0: it never does; None: it does on every link). ``error``: why there is none, and ``advice`` what to do."""

    request: int
    verdict: str = ""
    compute: float = 0.0
    stops_paying: float | None = None
    rows: tuple[AdviceRow, ...] = ()
    error: str = ""
    advice: str = ""
