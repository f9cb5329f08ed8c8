"""Tables below each other in as many lines as a terminal has: what is left out where they do not fit.

What may live here: which lines go and which stay, and what is said of those that went. What may not: what is in them
(`top.py`).

Sections come in the order of their importance, which is that in which they are shown. Where all of their lines do not
fit, the first ones get theirs and each later one keeps a few, so that everything there is to see has a line; where not
even these fit, the last sections go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: What is left out can be seen so.
_HINT: Final = "in a larger window or by --once"
#: A row and how many there are besides; fewer lines would say nothing.
_FEWEST: Final = 2


@dataclass(frozen=True, slots=True)
class Section:
    """A table. ``name``: what is said to be missing where all of it is. ``header``: "" for none.

    ``floor``: how many rows it keeps, of as many as it has, while those before it have more than they need. ``urgent``:
    the places of rows that stay where others go. ``open_ended``: there are always more, so how many is not said.
    """

    name: str
    header: str
    rows: Sequence[str] = ()
    urgent: frozenset[int] = frozenset()
    floor: int = 3
    open_ended: bool = False

    def lines(self, most: int | None = None) -> list[str]:
        """With ``most`` rows at most, the line about others among them; None: all."""
        head = [self.header] if self.header else []
        if most is None or len(self.rows) <= most:
            return [*head, *self.rows]
        room = most if self.open_ended else most - 1
        by_need = sorted(range(len(self.rows)), key=lambda i: (i not in self.urgent, i))
        shown = [self.rows[i] for i in sorted(by_need[:room])]
        return [*head, *shown, *([] if self.open_ended else [f"... {len(self.rows) - room} more lines, {_HINT}"])]


def whole(sections: Sequence[Section]) -> str:
    """All of them, a line between each two."""
    return "\n\n".join("\n".join(section.lines()) for section in sections)


def fitted(sections: Sequence[Section], columns: int, lines: int) -> str:
    """What a terminal of that size can show without scrolling its beginning away; the last line is empty."""
    room = max(lines - 1, 1)
    kept = [min(section.floor, len(section.rows)) for section in sections]

    def least() -> int:
        heads = sum(1 for section, _ in zip(sections, kept, strict=False) if section.header)
        said = len(kept) < len(sections)
        return sum(kept) + heads + len(kept) - 1 + said

    while least() > room and len(kept) > 1:
        if kept[-1] > _FEWEST:
            kept[-1] -= 1
        else:
            kept.pop()
    spare = max(room - least(), 0)
    parts = []
    for section, rows in zip(sections, kept, strict=False):
        more = min(spare, len(section.rows) - rows)
        spare -= more
        parts.append("\n".join(section.lines(rows + more)))
    shown = "\n\n".join(parts).split("\n")
    gone = [section.name for section in sections[len(kept) :]]
    if gone:
        shown.append(f"... {', '.join(gone)}: {_HINT}")
    return "\n".join(row[:columns] for row in shown[:room])
