"""`gcctl context` as it is typed, contexts in calls, and `gcctl completion` in real shells.

What may live here: tests of `gcserver/admin/gcctl_contexts.py` and of the parser's completions. What may not: the file
of contexts (`test_contexts.py`), which setting wins (`test_gcctl_settings.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gcserver.admin import gcctl
from gcserver.admin.access import Access
from gcserver.admin.certificates import Certificates
from gcserver.admin.exits import Exit
from tests.unit.admin.credentials import Folder
from tests.unit.admin.serving import serving
from tests.unit.admin.source import FixedSource

ROOT = Path(__file__).resolve().parents[3]
#: what completes `gcctl`; those that this machine has are tried, and one that every machine has
SHELLS = ["bash", *(shell for shell in ("zsh", "fish") if shutil.which(shell))]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "contexts.toml"
    path.write_text('current = "lab"\n[contexts.lab]\naddress = "a:1"\njob = "gpt"\n[contexts.test]\ntimeout = "5s"\n')
    path.chmod(0o600)
    monkeypatch.setenv("GCCTL_CONFIG", str(path))
    return path


def ctl(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = gcctl.main(arguments)
    captured = capsys.readouterr()
    assert not (captured.out and captured.err)
    return status, captured.out or captured.err


def test_list_show_and_use(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = "IN USE  NAME  ADDRESS         TLS  JOB\n*       lab   a:1             no   gpt\n"
    assert ctl(capsys, "context", "list") == (0, f"{listed}-       test  127.0.0.1:7460  no   -\n")
    assert "*       test" in ctl(capsys, "--context", "test", "context", "list")[1]
    assert "timeout   5 s\n" in ctl(capsys, "context", "show", "test")[1]
    assert "name      lab\naddress   a:1\n" in ctl(capsys, "context", "show")[1]
    assert ctl(capsys, "context", "use", "test") == (0, f"{file}: the current context is test\n")
    assert "name      test\n" in ctl(capsys, "context", "show")[1]
    assert ctl(capsys, "context", "use", "none") == (0, f"{file}: the current context is none\n")
    status, said = ctl(capsys, "context", "show")
    assert status == Exit.USAGE and "no context is in use; name one" in said
    status, said = ctl(capsys, "context", "use", "prod")
    assert status == Exit.USAGE and "no context 'prod'; there are: lab, test" in said


def test_the_same_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(ctl(capsys, "context", "list", "--json")[1])
    assert (found["file"], found["current"], found["in_use"]) == (str(file), "lab", "lab")
    lab, test = found["contexts"]
    assert (lab["address"], lab["timeout_seconds"], test["timeout_seconds"]) == ("a:1", None, 5.0)
    assert json.loads(ctl(capsys, "context", "show", "test", "--json")[1]) == test
    assert json.loads(ctl(capsys, "context", "use", "test", "--json")[1]) == {"file": str(file), "current": "test"}


def test_none_at_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    place = tmp_path / "gradcomm" / "contexts.toml"
    assert ctl(capsys, "context", "list") == (0, f"no contexts: {place} has none\n")


def test_a_secured_daemon_by_name(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    ours = Folder(tmp_path / "pki")
    alice = ours.operator("alice", "operator")
    with serving(FixedSource(), access=Access(Certificates(ours.node()))) as server:
        lines = [f'[contexts.lab]\naddress = "{server.address}"\ntimeout = "60s"\njob = "bert"\n']
        lines += [f'tls_ca = "{alice.ca}"\ntls_cert = "{alice.certificate}"\ntls_key = "{alice.key}"\n']
        file.write_text("".join(lines))
        assert ctl(capsys, "--context", "lab", "status")[1].startswith("node         a\n")
        assert ctl(capsys, "context", "use", "lab")[0] == 0
        status, said = ctl(capsys, "tensors")
        assert status == Exit.NOT_FOUND and "no job 'bert' here" in said, "the context's job"
        assert ctl(capsys, "tensors", "--job", "gpt")[0] == 0
        alice.key.chmod(0o644)
        status, said = ctl(capsys, "status")
        assert status == Exit.USAGE and f"{file}: contexts.lab.tls_key: {alice.key} is a private key" in said
        alice.key.unlink()
        status, said = ctl(capsys, "status")
        assert status == Exit.USAGE and f"contexts.lab.tls_key: {alice.key} is no file" in said
        file.chmod(0o666)
        status, said = ctl(capsys, "--context", "lab", "status")
        assert status == Exit.USAGE and f"chmod 600 {file}" in said


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gcctl` in the search path, as a package would put it there."""
    program = tmp_path / "bin" / "gcctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gcserver.admin.gcctl "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def completed(shell: str, script: Path, typed: str) -> list[str]:
    """What the shell offers for a line that ends where the cursor is."""
    words = typed.split(" ")
    if shell == "bash":
        code = f"""
            source {script}
            COMP_LINE='{typed}' COMP_POINT={len(typed)} COMP_TYPE=9 COMP_CWORD={len(words) - 1}
            COMP_WORDS=({" ".join(repr(word) for word in words)})
            _python_argcomplete gcctl {words[-1]!r} {words[-2]!r}
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        argv = ["bash", "--norc", "-c", code]
    elif shell == "zsh":
        # What a completion system would give to a list is printed; without a terminal there is no list.
        code = f"""
            compdef() {{ : }}
            source {script}
            _describe() {{ print -l -- "${{(@)${{(P)2}}}}" }}
            BUFFER='{typed}' CURSOR={len(typed)} words=({" ".join(repr(word) for word in words)})
            _python_argcomplete
        """
        argv = ["zsh", "-f", "-c", code]
    else:
        argv = ["fish", "--no-config", "-c", f"source {script}; complete --do-complete '{typed}'"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    # a description follows a tab (fish) or a colon (zsh), a space a word that is whole (bash)
    return sorted(line.split("\t")[0].split(":")[0].strip() for line in done.stdout.splitlines() if line.strip())


@pytest.mark.usefixtures("installed", "file")
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / f"gcctl.{shell}"
    status, text = ctl(capsys, "completion", shell)
    assert status == 0
    script.write_text(text)
    assert completed(shell, script, "gcctl set-") == ["set-codec", "set-controller", "set-plan"]
    assert completed(shell, script, "gcctl logs --level w") == ["warning"]
    assert completed(shell, script, "gcctl logs --f") == ["--follow"]
    assert completed(shell, script, "gcctl trace s") == ["start", "stop"]
    assert completed(shell, script, "gcctl trace start --st") == ["--steps"]
    assert completed(shell, script, "gcctl context use ") == ["lab", "none", "test"], "names out of the file"


def test_the_script_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(ctl(capsys, "completion", "fish", "--json")[1])
    assert found["shell"] == "fish" and "complete --command gcctl" in found["script"]


@pytest.mark.usefixtures("installed")
def test_completing_is_quiet_where_the_file_is_wrong(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file.write_text("current =")
    script = tmp_path / "gcctl.bash"
    script.write_text(ctl(capsys, "completion", "bash")[1])
    assert completed("bash", script, "gcctl context use l") == []
