"""Every script in ``scenarios/`` gives the log written beside its commands.

What may live here: reading scripts, comparing. What may not: commands (`story.py`).
``python -m tests.simulation.test_scenarios --rewrite`` writes the logs that come out; read the difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.simulation.story import Story

SCRIPTS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
MARK = "----"


def play(text: str) -> str:
    """The script with the log that its commands give."""
    story, out = Story(), []
    expected = False
    for line in text.splitlines():
        if line == MARK:
            expected = True
        elif not line.strip():
            expected = False
            out.append("")
        elif not expected:
            out.append(line)
            if not line.startswith("#"):
                out += [MARK, *story.run(line)]
    return "\n".join(out).rstrip() + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    assert play(text) == text


def test_there_are_scenarios() -> None:
    assert len(SCRIPTS) >= 7


if __name__ == "__main__":
    for script in SCRIPTS:
        played = play(script.read_text())
        if "--rewrite" in sys.argv:
            script.write_text(played)
        else:
            print(played)
