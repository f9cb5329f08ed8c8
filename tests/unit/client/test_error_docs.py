"""docs/errors.md against the classes, the daemon's faults and the constants that waits are bounded by.

What may live here: that what is written there is whole and true. What may not: what an error says
(`test_errors.py`).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gcclient
from gcclient import errors

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "errors.md").read_text()
CLASSES = {n: getattr(gcclient, n) for n in gcclient.__all__ if isinstance(getattr(gcclient, n), type)}
ERRORS = {n: c for n, c in CLASSES.items() if issubclass(c, gcclient.GradcommError)}
#: What makes faults and takes their kind as a string.
MAKERS = {
    "fault", "fault_without_job", "_refuse", "_end_gathering", "_fault_peer", "Fault", "ReportFault", "LaneTrouble",
}  # fmt: skip
KIND = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*")
#: A duration of ours: a constant whose name says so.
DURATION = re.compile(
    r"^(\w*(?:EVERY|PAUSE|GRACE|WITHIN|PATIENCE|TIMEOUT|TICK|AFTER|IDLE|BACKOFF|HELD|_FOR|WAITING)\w*)"
    r"(?:: Final)? = (?:[0-9]+[.][0-9]+|timedelta\(.*\))$",
    re.MULTILINE,
)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    part = TEXT.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0].split("\n\n")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_every_class_has_its_row_in_the_order_of_the_module() -> None:
    assert [row[0].strip("`") for row in rows("The classes")] == [n for n in ERRORS if n != "GradcommError"]


@pytest.mark.parametrize("row", rows("The classes"), ids=lambda row: row[0].strip("`"))
def test_a_row_says_when_what_to_do_whether_the_job_goes_on_and_where_that_is_tested(row: list[str]) -> None:
    name, when, advice, goes_on, tested = row
    assert len(when) > 20 and len(advice) > 20
    assert goes_on in ("no", "yes", "there is none yet"), goes_on
    files = re.findall(r"`(tests/[\w/]+\.py)`", tested)
    assert files
    for file in files:
        assert name.strip("`") in (ROOT / file).read_text(), f"{file} says nothing of {name}"


def test_every_kind_of_fault_that_the_daemon_makes_has_its_class() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "gcserver").rglob("*.py")):
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            words = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if name in MAKERS:
                for word in filter(KIND.fullmatch, words):
                    found.setdefault(word, set()).add(path.name)
    found.pop("Log")  # a line for the daemon's log, of no job
    assert len(found) > 8
    assert found.keys() <= errors._KINDS.keys(), found


def test_examples_are_what_the_classes_print() -> None:
    """An example begins with the class and ends with what to do."""
    examples = re.findall(r"^gcclient\.(\w+): (.+?)(?=^gcclient\.|\Z)", TEXT.split("```")[1], re.M | re.S)
    assert len(examples) >= 2
    for name, text in examples:
        assert name in ERRORS and ". What to do: " in " ".join(text.split())


def test_every_duration_of_ours_is_in_the_table_of_waits() -> None:
    """A new one belongs there, with what it derives from or why it bounds no wait of a job."""
    told = set(re.findall(r"`([A-Z_0-9]+)`", TEXT.split("## Every wait")[1]))
    assert told, "the table is there"
    for folder in ("gcclient", "gcserver/core", "gcserver/runtime", "gcserver/admin"):
        for path in sorted((ROOT / folder).glob("*.py")):
            for name in DURATION.findall(path.read_text()):
                assert name.lstrip("_") in told, f"{path.relative_to(ROOT)}: {name} is not in docs/errors.md"
