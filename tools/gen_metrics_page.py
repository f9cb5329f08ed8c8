"""Writes the tables of docs/metrics.md that list series and kinds of errors, from `gcserver.admin.catalogue`.

`python tools/gen_metrics_page.py` writes them between the page's marks; with `--check` it writes nothing and exits with
1 when they are not current. The rest of the page is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from gcserver.admin import catalogue

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"


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
    for name, table in (("series", series()), ("kinds", kinds())):
        marks = re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if len(marks.findall(page)) != 1:
            raise ValueError(f"docs/metrics.md: expected one pair of marks named {name}")
        page = marks.sub(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", page)
    return page


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="generate the tables of docs/metrics.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when not current")
    options = parser.parse_args(argv)
    before = PAGE.read_text()
    after = filled(before)
    if after == before:
        return 0
    if options.check:
        print("the tables of docs/metrics.md are not current: run `make metrics`", file=sys.stderr)
        return 1
    PAGE.write_text(after)
    print("wrote docs/metrics.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
