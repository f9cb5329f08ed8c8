"""Controllers by name: what plans and the configuration call them, with the parameters that are not the default ones.

What may live here: reading and writing those texts, the bounds that a plan's notches give. What may not: the laws
(`dc2.py`), measuring and what follows from a ratio (`gcserver.runtime.steering`).

``none``, ``dc2-da1`` to ``dc2-da5``, and with parameters ``dc2-da2(k_min=0.01,k_max=0.2,start=0.05)``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gcserver.planner.dc2 import LAWS, Dc2Config, Law
from gcserver.planner.dc2_monitor import Dc2Error

NONE: Final = "none"
_LAW_OF: Final[dict[str, Law]] = {f"dc2-{law.lower()}": law for law in LAWS}
NAMES: Final = (NONE, *_LAW_OF)
#: the parameters of ``Dc2Config`` that a job may set
PARAMETERS: Final = ("k_min", "k_max", "start")
_DEFAULT: Final = Dc2Config()


@dataclass(frozen=True, slots=True)
class Controlled:
    """What steers a job: one of ``NAMES``, and (parameter, ratio) in the order of ``PARAMETERS``."""

    name: str = NONE
    overrides: tuple[tuple[str, float], ...] = ()

    @property
    def law(self) -> Law | None:
        """None: nothing steers."""
        return _LAW_OF.get(self.name)

    @property
    def text(self) -> str:
        """As :func:`read` reads it."""
        inner = ",".join(f"{name}={value!r}" for name, value in self.overrides)
        return f"{self.name}({inner})" if inner else self.name

    def config(self, ratios: tuple[float, ...] = (), least: float = 0.0) -> Dc2Config:
        """The controller's parameters. Raises :class:`Dc2Error` for overrides that do not go together.

        ``ratios``: bytes on the wire by dense bytes at each notch of the plan, descending; the bounds then lie between
        the last and the first, and what was overridden holds as far as they allow. ``least``: where there are none, the
        ratio that the plan allows at least.
        """
        given = dict(self.overrides)
        low, high = given.get("k_min", _DEFAULT.k_min), given.get("k_max", _DEFAULT.k_max)
        start = given.get("start", min(max(_DEFAULT.start, low), high))
        checked = Dc2Config(k_min=low, k_max=high, start=start)
        if not ratios:
            low, high = max(low, least), max(high, least)
            return Dc2Config(k_min=low, k_max=high, start=max(start, low)) if least else checked
        least, most = ratios[-1], min(ratios[0], 1.0)
        low = min(max(given.get("k_min", least), least), most)
        high = min(max(given.get("k_max", most), low), most)
        return Dc2Config(k_min=low, k_max=high, start=min(max(start, low), high))


def controlled(name: str, overrides: Mapping[str, float] | None = None) -> Controlled:
    """A controller with its overrides. Raises :class:`Dc2Error` naming what is accepted."""
    if name not in NAMES:
        raise Dc2Error(f"a controller is one of {', '.join(NAMES)}, got {name!r}")
    given = dict(overrides or {})
    accepted = () if name == NONE else PARAMETERS
    if unknown := [parameter for parameter in given if parameter not in accepted]:
        raise Dc2Error(f"{name} takes {', '.join(accepted) or 'no parameters'}, got {', '.join(map(repr, unknown))}")
    found = Controlled(name, tuple((p, float(given[p])) for p in PARAMETERS if p in given))
    if found.law is not None:
        found.config()
    return found


def read(text: str) -> Controlled:
    """A controller from its text. Raises :class:`Dc2Error` naming what is accepted."""
    match = re.fullmatch(r"([\w-]+)(?:\(([^()]*)\))?", text.strip())
    if match is None:
        raise Dc2Error(f"a controller is one of {', '.join(NAMES)}, as dc2-da2(k_min=0.01,k_max=0.2), got {text!r}")
    overrides: dict[str, float] = {}
    for part in filter(str.strip, (match[2] or "").split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            overrides[name] = float(value)
        except ValueError:
            raise Dc2Error(f"{match[1]}: expected parameter=number such as k_max=0.2, got {part.strip()!r}") from None
    return controlled(match[1], overrides)


def unusable(text: str) -> str:
    """Why ``text`` names no controller of this release; empty if it does."""
    try:
        read(text)
    except Dc2Error as error:
        return str(error)
    return ""
