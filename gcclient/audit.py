"""What an audit is asked for, and the arithmetic of what it finds.

What may live here: the options and where they come from, the comparison of a delivered average with the exact one.
What may not: exchanging anything (`auditor.py`), sockets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from gcclient import arguments
from gcproto.audits import MAX_WORST, TensorError

F64 = npt.NDArray[np.float64]

#: The variable that stands in for ``audit=``.
VARIABLE: Final = "GC_AUDIT"
ACTIONS: Final = ("warn", "dense")
MOST_EVERY: Final = 1 << 31
_KEYS: Final[dict[str, Callable[[str], Any]]] = {"every": int, "limit": float, "action": str, "window": int}
_FORM: Final = (
    'any of every=STEPS,limit=ERROR,action=warn|dense,window=STEPS, such as "every=100,limit=0.5,action=dense"'
)


@dataclass(frozen=True, slots=True)
class Audit:
    """Compare what training gets with the exact average, every ``every`` steps.

    ``limit``: the largest relative L2 error of the whole gradient that is in order (None: any). Above it there is a
    warning, and with ``action="dense"`` the job goes on uncompressed. ``window``: compare the sums over so many steps
    in a row, the last of which is the one whose turn it is: what error feedback only postpones cancels in them.
    Raises TypeError and ValueError that name the field and what it takes.
    """

    every: int = 100
    limit: float | None = None
    action: Literal["warn", "dense"] = "warn"
    window: int = 1

    def __post_init__(self) -> None:
        every = arguments.read_whole(self.every, "every")
        if not 1 <= every <= MOST_EVERY:
            raise ValueError(f"every={every}: expected a number of steps, 1..{MOST_EVERY}")
        window = arguments.read_whole(self.window, "window")
        if not 1 <= window <= every:
            raise ValueError(f"window={window}: expected a number of steps, 1..{every} (what every says)")
        object.__setattr__(self, "every", every)
        object.__setattr__(self, "window", window)
        if self.limit is not None:
            object.__setattr__(self, "limit", _read_error(self.limit))
        if self.action not in ACTIONS:
            raise ValueError(f"action={self.action!r}: expected one of {', '.join(ACTIONS)}")
        if self.action == "dense" and self.limit is None:
            raise ValueError(
                'action="dense" needs a limit: the relative error above which the job goes on uncompressed'
            )


def _read_error(value: Any) -> float:
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise TypeError(f"limit={value!r}: expected a number or None, got a {type(value).__name__}")
    limit = float(value)
    if not 0.0 <= limit < math.inf:
        raise ValueError(f"limit={limit}: expected a relative error, a finite number from 0 on")
    return limit


def read_audit(audit: object, environ: Mapping[str, str]) -> Audit | None:
    """The argument, else what GC_AUDIT says, else None. Raises TypeError and ValueError that name the source."""
    if isinstance(audit, Audit):
        return audit
    if audit is not None:
        raise TypeError(f"audit={audit!r}: expected a gcclient.Audit or None, got a {type(audit).__name__}")
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        return _parse(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}={text}: {error}; expected {_FORM}") from None


def _parse(text: str) -> Audit:
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals or key not in _KEYS or key in given:
            raise ValueError(f"{part.strip()!r} is none of its parts, or there twice")
        given[key] = value
    options: dict[str, Any] = {}
    for key, value in given.items():
        try:
            options[key] = _KEYS[key](value)
        except ValueError:
            raise ValueError(f"{key}={value} is no number") from None
    return Audit(**options)


# --------------------------------------------------------------------------------------- arithmetic
@dataclass(slots=True)
class Sums:
    """Sums over the elements of a delivered average d and the exact one e: of d*d, e*e, d*e and (d - e)*(d - e)."""

    delivered: float = 0.0
    exact: float = 0.0
    product: float = 0.0
    difference: float = 0.0

    def add(self, delivered: F64, exact: F64) -> None:
        """Two arrays float64[n]."""
        off = delivered - exact
        self.delivered += float(np.dot(delivered, delivered))
        self.exact += float(np.dot(exact, exact))
        self.product += float(np.dot(delivered, exact))
        self.difference += float(np.dot(off, off))

    def add_sums(self, other: Sums) -> None:
        self.delivered += other.delivered
        self.exact += other.exact
        self.product += other.product
        self.difference += other.difference

    @property
    def finite(self) -> bool:
        return math.isfinite(self.delivered + self.exact + self.difference)

    def error(self) -> float:
        """||d - e|| / ||e||; of a zero e: 0 where d is zero too, else infinite."""
        return _quotient(math.sqrt(self.difference), math.sqrt(self.exact), 0.0)

    def cosine(self) -> float:
        """d*e / (||d|| ||e||); 1 where both are zero, 0 where one is."""
        if not self.delivered or not self.exact:
            return 1.0 if self.delivered == self.exact else 0.0
        return min(1.0, max(-1.0, self.product / (math.sqrt(self.delivered) * math.sqrt(self.exact))))

    def ratio(self) -> float:
        """||d|| / ||e||; 1 where both are zero, infinite where only e is."""
        return _quotient(math.sqrt(self.delivered), math.sqrt(self.exact), 1.0)

    def of(self, name: str) -> TensorError:
        return TensorError(name, self.error(), self.cosine(), self.ratio())


def _quotient(above: float, below: float, both_zero: float) -> float:
    if below:
        return above / below
    return math.inf if above else both_zero


@dataclass(frozen=True, slots=True)
class Finding:
    """What one audit found: over all elements (``whole``), and the tensors with the largest errors, largest first."""

    whole: TensorError
    worst: tuple[TensorError, ...]


def finding(label: str, tensors: Mapping[str, Sums]) -> Finding | None:
    """The sums of every tensor as a finding; None where something is not finite."""
    total = Sums()
    for sums in tensors.values():
        total.add_sums(sums)
    if not total.finite:
        return None
    each = sorted((sums.of(name) for name, sums in tensors.items()), key=lambda t: -t.error)
    return Finding(total.of(label), tuple(each[:MAX_WORST]))
