"""What processes are told of how to copy blocks, and what the C library says that it does."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from gcserver import config, copies, doctor

ROOT = Path(__file__).resolve().parents[2]
GLIBC = platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"


@pytest.fixture
def on_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(copies.platform, "libc_ver", lambda: ("glibc", "2.36"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, copies.SETTING),
        ({"GLIBC_TUNABLES": ""}, copies.SETTING),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, f"glibc.malloc.check=1:{copies.SETTING}"),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=4194304"}, None),
    ],
)
def test_what_is_said_already_counts(on_glibc: None, given: dict[str, str], told: str | None) -> None:
    assert copies.around_caches(given) == ({} if told is None else {"GLIBC_TUNABLES": told})


@pytest.mark.parametrize(("what", "is_"), [("machine", "aarch64"), ("libc_ver", ("musl", "1.2"))])
def test_others_are_told_nothing(on_glibc: None, monkeypatch: pytest.MonkeyPatch, what: str, is_: object) -> None:
    monkeypatch.setattr(copies.platform, what, lambda: is_)
    assert copies.around_caches({}) == {}


def _heard(**variables: str) -> str:
    """What a process says that is started with these variables."""
    script = "from gcserver import copies; print(copies.threshold())"
    environ = {k: v for k, v in os.environ.items() if k != copies.VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", script], env={**environ, **variables}, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(not GLIBC, reason="only glibc on x86-64 has this setting")
def test_the_c_library_does_what_it_is_told() -> None:
    assert int(_heard()) > 0
    assert int(_heard(**copies.around_caches({}))) == copies.AROUND
    told = copies.around_caches({copies.VARIABLE: "glibc.malloc.arena_max=2"})
    assert int(_heard(**told)) == copies.AROUND


@pytest.mark.parametrize("listing", ["", "glibc.cpu.hwcaps:", f"{copies.TUNABLE}: many"])
def test_a_c_library_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: str) -> None:
    loader = tmp_path / "ld-other"
    loader.write_text(f"#!/bin/sh\necho '{listing}'\n")
    loader.chmod(0o755)
    monkeypatch.setattr(copies, "_loader", lambda: str(loader))
    assert copies.threshold() is None
    loader.write_text("#!/bin/sh\nexit 127\n")
    assert copies.threshold() is None
    monkeypatch.setattr(copies, "_loader", lambda: None)
    assert copies.threshold() is None


@pytest.mark.parametrize(
    ("least", "result", "words"),
    [
        (None, "ok", "does not say"),
        (8 << 20, "ok", "8 MiB and more around the caches"),
        (180 << 20, "warn", "(8 MiB) through the caches, as all below 180 MiB"),
    ],
)
def test_doctor_says_when_blocks_are_copied_through_the_caches(
    monkeypatch: pytest.MonkeyPatch, least: int | None, result: str, words: str
) -> None:
    monkeypatch.setattr(copies, "threshold", lambda: least)
    found = doctor._copies(config.load(flags={"partition_bytes": "8MiB"}))
    assert (found.result, words in found.text) == (result, True), found.text
    assert (copies.SETTING in found.fix) is (result == "warn")


@pytest.mark.parametrize("file", ["deploy/docker/client.Dockerfile", "deploy/slurm/train.sbatch", "docs/operating.md"])
def test_what_starts_training_elsewhere_says_the_same(file: str) -> None:
    text = (ROOT / file).read_text()
    assert copies.VARIABLE in text and copies.SETTING in text
