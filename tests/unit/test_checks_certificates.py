"""What `gcserver doctor` says of certificates, and what keeps a daemon from starting."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from gcserver import cli, config, doctor
from gcserver.checks import Check
from gcserver.checks_certificates import certificates
from tests.unit.admin.credentials import Folder


def look(paths: tuple[Path, Path, Path], days: float = 0) -> list[Check]:
    return certificates(*paths, dt.datetime.now(dt.UTC) + dt.timedelta(days=days))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    made = Folder(tmp_path).node("a", 100)
    return made.ca, made.certificate, made.key


def test_expiry_is_shown(files: tuple[Path, Path, Path]) -> None:
    node, ca = look(files)
    assert (node.result, node.fix) == ("ok", "") and node.text.startswith(f"{files[1]} ('a'): until ")
    assert node.text.endswith(", 99 days from now")
    assert ca.result == "ok" and f"CA 'ours' in {files[0]}: until " in ca.text
    soon = look(files, 75)[0]
    assert soon.result == "warn" and "24 days from now" in soon.text and "gcserver pki node --force" in soon.fix
    (over,) = look(files, 101)
    assert over.fatal and "expired on" in over.text and "admin.cert" in over.fix


def test_a_key_that_others_can_read(files: tuple[Path, Path, Path]) -> None:
    files[2].chmod(0o640)
    *_, said = look(files)
    assert said.result == "warn" and "mode 640" in said.text and said.fix == f"chmod 600 {files[2]}"


def test_an_expired_ca_beside_a_good_one(files: tuple[Path, Path, Path]) -> None:
    from gcserver import pki

    old = pki.authority("old", 5, dt.datetime.now(dt.UTC) - dt.timedelta(days=30))
    with files[0].open("ab") as file:
        file.write(old.certificate_pem)
    said = look(files)[-1]
    assert said.result == "warn" and "CA 'old'" in said.text and "nobody it signed for is let in" in said.text


def test_doctor_and_run_ask(files: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {
        "node.socket": str(tmp_path / "d.sock"), "node.state": str(tmp_path / "state"), "node.admin": "",
        "node.metrics": "", "node.listen": "tcp://127.0.0.1:57470", "admin.ca": str(files[0]),
        "admin.cert": str(files[1]), "admin.key": str(files[2]),
    }  # fmt: skip

    def checked() -> list[str]:
        return [c.result for c in doctor.preflight(config.load(flags=flags)) if c.name == "certificates"]

    assert checked() == []
    assert [c.name for c in doctor.examine(config.load(flags=flags))].count("certificates") == 2
    files[2].write_text("")
    assert checked() == ["fail"]
    status = cli.main(["run", *(f"--{key}={value}" for key, value in flags.items())])
    said = capsys.readouterr().err
    assert status == 1 and f"cannot start: {files[2]} holds no private key" in said
