"""docs/troubleshooting.md against the sources of the texts that it goes by.

What may live here: that every text of an error, of doctor and of a failing start is on the page, and that what is on
the page is printed. What may not: what the classes are (`client/test_error_docs.py`), what an error says where it is
raised.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from gcclient import errors
from gcserver.checks import Check
from tests.unit.client.test_error_docs import ERRORS, MAKERS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
#: Markdown's marks and quotes apart, a text stands on the page as it is printed.
SAID = " ".join(PAGE.replace("`", "").replace("'", "").split())
#: constants of the sources that stand for a number in a text
NUMBERS = {"MAX_RANKS": "65536", "JOB_BYTES": "16", "START_FOR": "300"}
#: of a text whose parts are all short
SHORTEST = 9
#: what texts are called before they are said
NAMES = {"text", "why"}
#: where daemons refuse to start, and doctor asks
STARTING = (
    "checks",
    "checks_certificates",
    "checks_logind",
    "checks_ucx",
    "doctor",
    "keychecks",
    "keys",
    "private",
    "runtime/supervisor",
)
#: where texts of faults are put together before they are told
TOLD = (
    "core/control", "core/control_config", "core/entering", "core/epochs", "core/gathering", "core/job_records",
    "core/waiting", "runtime/endings", "runtime/refusals",
)  # fmt: skip
#: texts in these files that no training script and nobody who starts a daemon sees, by their first clause
OTHERS = {
    "sent epoch",  # a daemon's log
    "takes effect at step",  # what gcctl says when all is well
    "memory on this node",  # doctor's sums, likewise
    "the arbiter",  # ends of texts that are there, like the next two
    "a node is in it twice at a time, or before it came",
    "it says who left at the beginning of",
}


def pieces(node: ast.expr) -> Iterator[str | None]:
    """The literal parts of a text in order, None for what is put in."""
    match node:
        case ast.Constant(value=str(text)):
            first, *rest = re.split(r"\{[^}]*\}", text)  # of a text that is formatted later
            yield first
            for part in rest:
                yield None
                yield part
        case ast.JoinedStr(values=values):
            for value in values:
                if isinstance(value, ast.Constant):
                    yield str(value.value)
                else:
                    assert isinstance(value, ast.FormattedValue)
                    yield NUMBERS.get(getattr(value.value, "id", ""))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from pieces(left)
            yield from pieces(right)
        case ast.IfExp(body=body, orelse=orelse):
            yield from pieces(body)
            yield None
            yield from pieces(orelse)
        case _:
            yield None


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").replace("'", "").split())


def clause(node: ast.expr) -> str:
    """The first literal clause of a text, without marks; empty where there is none to search for."""
    runs, run = [], ""
    for piece in [*pieces(node), None]:
        if piece is None:
            runs += re.split(r"[:;(]", plain(run))
            run = ""
        else:
            run += piece
    clauses = (r.strip(" .)") for r in runs)
    return next((c for c in clauses if len(c) >= SHORTEST and " " in c), "")


def said_after_kind(words: list[ast.expr]) -> Iterator[tuple[int, ast.expr]]:
    """What follows the name of a class of ours."""
    for kind, text in pairwise(words):
        if isinstance(kind, ast.Constant) and kind.value in ERRORS:
            yield text.lineno, text


def strings(tree: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    """(line, text) of everything in a module that is said."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in NAMES:
            yield node.lineno, node.value
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            yield from said_after_kind(node.value.elts)
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name == Check.__name__ and not (isinstance(node.args[1], ast.Constant) and node.args[1].value == "ok"):
            yield node.lineno, node.args[2]
        elif name == "ArenaShort":
            yield node.lineno, node.args[1]
        elif name in ("StartError", "KeyFileError", "ArenaError") or name in ERRORS:
            yield from ((node.lineno, a) for a in node.args[:1])
        elif name in MAKERS:
            yield from said_after_kind(node.args)
        elif name == "fail" and len(node.args) == 1:
            yield node.lineno, node.args[0]


def sources() -> list[Path]:
    server = ROOT / "gcserver"
    chosen = {server / f"{name}.py" for name in (*STARTING, *TOLD)}
    # Texts of faults are often given where they are made; all of the core and the client makes some.
    chosen |= {*(server / "core").glob("*.py"), *(ROOT / "gcclient").glob("*.py")}
    return sorted(chosen)


def test_every_text_is_on_the_page() -> None:
    """By its first clause: names and numbers stand there as capitals."""
    where: dict[str, str] = {}
    for path in sources():
        for line, text in strings(ast.parse(path.read_text())):
            where[clause(text)] = f"{path.relative_to(ROOT)}:{line}"
    assert len(where) > 150
    assert not where.keys() & OTHERS ^ OTHERS, "these are said no more"
    missing = [f"{where[text]}: {text}" for text in where if text not in SAID and text not in OTHERS]
    assert not missing, "\n".join(missing)


def test_every_class_has_its_place() -> None:
    heads = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    there = {name for head in heads for name in re.split(r", | itself", head)}
    assert there >= {name for name, kind in ERRORS.items() if kind is not errors.GradcommError}


def test_every_check_of_doctor_that_can_fail_has_its_row() -> None:
    part = PAGE.split("## gcserver doctor", 1)[1].split("\n## ")[0]
    rows = {name for row in re.findall(r"^\| ([^|]+) \|", part, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}
    names: set[str] = set()
    for stem in STARTING:
        tree = ast.parse((ROOT / "gcserver" / f"{stem}.py").read_text())
        called = {
            t.id: n.value.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Assign | ast.AnnAssign) and isinstance(n.value, ast.Constant)
            for t in (n.targets if isinstance(n, ast.Assign) else [n.target])
            if isinstance(t, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == Check.__name__:
                match node.args[0]:
                    case ast.Constant(value=str(name)):
                        names.add(name)
                    case ast.Name(id=variable) if isinstance(called.get(variable), str):
                        names.add(str(called[variable]))
    assert len(names) > 8
    assert names <= rows | {"certificates"} and "`certificates`" in part, names - rows


def test_no_text_on_the_page_is_one_that_nothing_prints() -> None:
    """Of each text in code the longest stretch between names, numbers and dots must be somewhere in the sources."""
    source = "".join(p.read_text() for folder in ("gcclient", "gcserver") for p in (ROOT / folder).rglob("*.py"))
    # parts of one text stand on lines of their own there
    joined = plain(re.sub(r'"\s*\n?\s*f?"', "", source).replace('"', " ").replace("{", " {").replace("!r}", "}"))
    unknown = []
    for row in re.findall(r"^\| (.+?) \|", PAGE.split("## Training scripts")[1], re.MULTILINE):
        for text in re.findall(r"`([^`]+)`", row):
            parts = re.split(r"\b[A-Z][A-Z_]*\b|\.\.\.|\b\d+\b|[()]", text)
            longest = max((plain(p).strip(" ,:;") for p in parts), key=len)
            if len(longest) >= SHORTEST and " " in longest and longest not in joined:
                unknown.append(f"{text}: {longest!r}")
    assert not unknown, "\n".join(unknown)
