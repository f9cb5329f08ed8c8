"""Patterns of tensors' names, as a plan's rules have them: which rule counts for a name.

What may live here: globs, names in which glob characters are escaped, "the last match wins". What may not: what a rule
says (`gcserver.core.plan`, `gcserver.planner.auto_rules`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from typing import Final, Protocol, TypeVar

#: what `glob.escape` makes of a character with a meaning
_ESCAPED: Final = re.compile(r"\[([*?[])\]")
#: So many names are remembered with what matched them.
REMEMBERED: Final = 1 << 16


class _OfPattern(Protocol):
    @property
    def pattern(self) -> str: ...


_AnyRule = TypeVar("_AnyRule", bound=_OfPattern)


def is_glob(pattern: str) -> bool:
    """Whether a pattern may match more than one name."""
    return any(c in "*?[" for c in _ESCAPED.sub("", pattern))


def unescaped(pattern: str) -> str:
    """The name that a pattern which is no glob matches."""
    return _ESCAPED.sub(r"\1", pattern)


def last_of_each(rules: Sequence[_AnyRule]) -> tuple[_AnyRule, ...]:
    """The rules of a plan: of those for one pattern the last, which replaces the earlier ones."""
    last = {rule.pattern: i for i, rule in enumerate(rules)}
    return tuple(rule for i, rule in enumerate(rules) if last[rule.pattern] == i)


class Patterns:
    """Patterns in the order of a plan's rules, ready to be asked for many names, each more than once: there may be one
    for every tensor."""

    def __init__(self, patterns: Iterable[str]) -> None:
        #: of plain names the last pattern for each
        self._names: dict[str, int] = {}
        globs = []
        for i, pattern in enumerate(patterns):
            if is_glob(pattern):
                globs.append((i, re.compile(translate(pattern)).match))
            else:
                self._names[unescaped(pattern)] = i
        self._globs = globs[::-1]
        self._known: dict[str, int] = {}

    def last(self, name: str) -> int:
        """The index of the last pattern that matches; -1 without one."""
        found = self._known.get(name)
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            found = self._known[name] = self._found(name)
        return found

    def _found(self, name: str) -> int:
        last = self._names.get(name, -1)
        for i, match in self._globs:
            if i < last:
                break
            if match(name):
                return i
        return last
