"""Files that are made from code: written, or only compared with what stands there.

What may live here: what all generators of this folder do with what they made. What may not: what they make.

Each is run as ``python -m tools.NAME`` and writes what is not current. With ``--check`` it writes nothing and exits
with 1 when anything is not.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent


def keep(files: Mapping[Path, str], target: str, argv: Sequence[str] | None) -> int:
    """Make ``files`` hold these texts, or see whether they do; the exit status. ``target``: of make, which does so."""
    parser = argparse.ArgumentParser(description=f"what `make {target}` writes")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when not current")
    check = parser.parse_args(argv).check
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if check:
            print(f"{name} is not current: run `make {target}`", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path])
            print(f"wrote {name}")
    return 1 if check and stale else 0


def filled(page: str, lists: Mapping[str, str], name: str) -> str:
    """The text of page ``name`` with current lists between its marks. Raises ValueError where a mark is missing."""
    for mark, text in lists.items():
        marks = re.compile(rf"(<!-- {mark}: generated -->\n).*?(<!-- {mark}: end -->)", re.DOTALL)
        if len(marks.findall(page)) != 1:
            raise ValueError(f"{name}: expected one pair of marks named {mark}")
        page = marks.sub(lambda m, text=text: f"{m[1]}{text}\n{m[2]}", page)
    return page


def cell(text: str) -> str:
    """One cell of a table, of what argparse would print."""
    return " ".join(text.split()).replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
