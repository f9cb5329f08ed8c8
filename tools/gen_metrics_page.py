"""Writes the tables of docs/metrics.md that list series and kinds of errors, from `gcserver.admin.catalogue`.

They go between the page's marks. The rest of the page is written by hand.
"""

from __future__ import annotations

import sys

from gcserver.admin import catalogue
from tools import generated

PAGE = generated.ROOT / "docs" / "metrics.md"


def series() -> str:
    """A row for each series."""
    rows = ["| series | type | unit | labels | what |", "|---|---|---|---|---|"]
    for s in catalogue.SERIES:
        labels = ", ".join(f"`{label}`" for label in s.labels)
        rows.append(f"| `{s.name}` | {s.kind} | {s.unit} | {labels} | {s.about} |".replace("|  |", "| |"))
    return "\n".join(rows)


def kinds() -> str:
    """A row for each kind of error."""
    rows = ["| kind | what is counted |", "|---|---|"]
    rows += [f"| `{kind}` | {about} |" for kind, about in catalogue.KINDS.items()]
    return "\n".join(rows)


def filled(page: str) -> str:
    """The page with current tables. Raises ValueError where a mark is missing."""
    return generated.filled(page, {"series": series(), "kinds": kinds()}, "docs/metrics.md")


def main(argv: list[str] | None = None) -> int:
    return generated.keep({PAGE: filled(PAGE.read_text())}, "metrics", argv)


if __name__ == "__main__":
    sys.exit(main())
