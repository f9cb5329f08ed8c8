"""The distribution as a whole: nothing forgotten, nothing unexplained, nothing unpinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"gcclient": "gcclient", "gcproto": "proto", "gcserver": "gcserver"}


def requirement_name(line: str) -> str:
    """The distribution's normalised name in a requirement such as "numpy>=1.26"."""
    match = re.match(r"[A-Za-z0-9._-]+", line)
    assert match is not None, line
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def requirements() -> list[str]:
    project = PYPROJECT["project"]
    return project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]


def test_every_package_folder_is_in_the_wheel() -> None:
    found = set()
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join((package, *init.parent.relative_to(ROOT / folder).parts)))
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_package_is_typed() -> None:
    for package, folder in FOLDERS.items():
        assert (ROOT / folder / "py.typed").exists()
        assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"][package]


def test_versions_agree() -> None:
    import gcserver

    assert gcserver.__version__ == PYPROJECT["project"]["version"]


def test_every_requirement_has_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for requirement in requirements():
        (line,) = [line for line in text.splitlines() if line.strip().startswith(f'"{requirement}"')]
        assert re.search(r'",\s+# \S', line), f"why is {requirement} needed? Say it behind the line"


def test_constraints_pin_every_requirement_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines)
    pinned = {requirement_name(line) for line in lines}
    assert {requirement_name(r) for r in requirements()} <= pinned
    assert "torch" in pinned


def test_torch_is_not_a_requirement() -> None:
    assert "torch" not in {requirement_name(r) for r in requirements()}
