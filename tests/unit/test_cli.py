"""The command line: what is printed, exit statuses, one line per error, and that `run` starts what it is told."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gcserver import __version__, cli, config, keys
from gcserver.config_keys import KEYS


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GC_")]:
        monkeypatch.delenv(name)


def failing(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> str:
    """The only line on stderr of a command that must fail."""
    assert cli.main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gcserver: ") and captured.err.count("\n") == 1
    return captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert re.fullmatch(rf"gradcomm {re.escape(__version__)}, protocol \d+\n", capsys.readouterr().out)


def test_defaults_are_a_file_to_start_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["config", "--defaults"]) == 0
    file = tmp_path / "gradcomm.toml"
    file.write_text(capsys.readouterr().out)
    assert config.load(file) == config.load()


def test_show_says_where_values_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "gradcomm.toml"
    file.write_text('[codec]\ndefault = "fp16"\n')
    monkeypatch.setenv("GC_NODE_LANES", "3")
    assert cli.main(["config", "--config", str(file), "--node.name=n1", "--insecure"]) == 0
    shown = capsys.readouterr().out
    assert 'name = "n1"  # flag\n' in shown
    assert "lanes = 3  # variable GC_NODE_LANES\n" in shown
    assert f'default = "fp16"  # {file}:2\n' in shown
    assert "insecure = true  # flag\n" in shown
    assert 'lease = "30s"\n' in shown
    monkeypatch.setenv("GC_CONFIG", str(file))
    assert cli.main(["config", "--show"]) == 0
    assert 'default = "fp16"' in capsys.readouterr().out


def test_every_key_is_a_flag() -> None:
    text = cli.parser().parse_args(["run", *(f"{key.flag}=x" for key in KEYS)])
    assert all(getattr(text, key.name) == "x" for key in KEYS)


def test_keys_are_made_shown_and_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["keygen", "--name", "n1", "--folder", str(tmp_path / "keys")]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    secret, listed = tmp_path / "keys" / "n1.key", tmp_path / "keys" / "n1.pub"
    assert listed.read_text() in shown and keys.read_pair(secret).secret.decode() not in shown
    assert secret.stat().st_mode & 0o777 == 0o600
    command = next(line for line in shown.splitlines() if "gcserver run" in line)
    assert f"--node.name n1 --security.key {secret} --security.peers {tmp_path / 'keys' / 'peers'}" in command
    assert "not overwritten" in failing(capsys, 1, *arguments)
    assert "got 'a/b'" in failing(capsys, 2, "keygen", "--name", "a/b")
    assert cli.main(["keygen", "--folder", str(tmp_path)]) == 0
    assert (tmp_path / f"{config.hostname()}.key").exists()


@pytest.mark.parametrize("command", ["run", "config", "doctor"])
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--node.lane", "2"), "--node.lane: unknown key; did you mean node.lanes?"),
        (("--node.lane=2",), "--node.lane: unknown key; did you mean node.lanes?"),
        (("--node.lanes", "0"), "node.lanes (flag): expected a whole number from 1 to 64; got '0'"),
        (("--config", "/does/not/exist.toml"), "/does/not/exist.toml: cannot be read: No such file or directory"),
        (("--job.on_loss", "shrink"), "set cluster.etcd on every node"),
        (("stray",), "unexpected argument 'stray'"),
    ],
)
def test_a_wrong_command_line(
    capsys: pytest.CaptureFixture[str], command: str, arguments: tuple[str, ...], part: str
) -> None:
    assert part in failing(capsys, 2, command, *arguments)


@pytest.mark.parametrize("arguments", [(), ("fly",), ("run", "--config"), ("config", "--defaults", "--show")])
def test_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gcserver: ") and "; see `gcserver" in line and line.endswith("--help`")


def test_run_refuses_a_port_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ("--node.metrics", endpoint, "--node.admin", "", "--node.listen", "tcp://127.0.0.1:1999")
        assert cli.main(["run", "--node.socket", str(tmp_path / "d.sock"), *arguments]) == 1
    error = capsys.readouterr().err
    assert f"gcserver: cannot start: {endpoint} for metrics is in use; stop what uses it" in error
    assert "Traceback" not in error
    assert not (tmp_path / "d.sock").exists()


def test_run_passes_status_and_configuration_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from gcserver.runtime import supervisor

    given: list[config.Config] = []

    def run(settings: config.Config) -> int:
        given.append(settings)
        if settings.node.name == "broken":
            raise RuntimeError("two\nlines")
        return 7

    monkeypatch.setattr(supervisor, "run", run)
    common = ["--node.socket", str(tmp_path / "d.sock"), "--node.admin", "", "--node.metrics", ""]
    common += ["--node.listen", "tcp://127.0.0.1:1999"]
    assert cli.main(["run", "--node.name", "a", *common]) == 7
    assert given[0].node.socket == tmp_path / "d.sock"
    capsys.readouterr()
    assert cli.main(["run", "--node.name", "broken", *common]) == 1
    assert capsys.readouterr().err.endswith("gcserver: RuntimeError: two lines\n")
    assert cli.main(["run", "--node.name", "broken", "--log.level", "debug", *common]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_warmup_twice_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    """The test run has compiled them; saying so must not compile them again."""
    from gcserver.codecs import warmup

    assert cli.main(["warmup"]) == 0
    capsys.readouterr()
    assert warmup.is_warm()
    assert cli.main(["warmup"]) == 0
    assert re.fullmatch(r"\d+ kernels are compiled already\n", capsys.readouterr().out)


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = ["--node.socket", str(tmp_path / "d.sock"), "--node.listen", "tcp://127.0.0.1:1999"]
    own += ["--node.admin", "", "--node.metrics", ""]
    model = ["--params", "1M", "--local-ranks", "2", "--nodes", "4", "--codec", "fp16", "--lanes", "2"]
    assert cli.main(["doctor", "--json", *model, *own]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    for kind in ("shared", "private"):
        of_kind = [part["bytes"] for part in document["need"]["parts"] if part["kind"] == kind]
        assert document["need"][kind] == sum(of_kind) > 0
    assert "--codec" in failing(capsys, 2, "doctor", "--params", "1M", "--codec", "zip")
    assert cli.main(["doctor", "--node.cores", "60000", *own]) == 1
    assert "fail  cores" in capsys.readouterr().out
    assert "--params" in failing(capsys, 2, "doctor", "--params", "many")
    assert "--local-ranks" in failing(capsys, 2, "doctor", "--params", "1M", "--local-ranks", "0")


def test_the_start_of_run_is_light() -> None:
    """Neither gRPC nor numba nor numpy is loaded before the supervisor asks for them: `run` has two seconds in all."""
    code = (
        "import sys; from gcserver import cli, doctor; from gcserver.config import load; doctor.preflight(load());"
        "print([m for m in ('grpc', 'numba', 'numpy', 'google.protobuf', 'prometheus_client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[]\n"


def test_as_a_process() -> None:
    """The module, an error, and a reader that goes away early."""
    command = [sys.executable, "-m", "gcserver.cli"]
    done = subprocess.run(
        [*command, "config", "--node.lanes=x"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    reader, writer = os.pipe()
    os.close(reader)
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    gone = subprocess.run(
        [*command, "config"], stdout=writer, stderr=subprocess.PIPE, env=environ, timeout=30, check=False
    )
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (0, b"")


def _running(*arguments: str, **environ: str) -> tuple[int, list[str]]:
    """`gcserver run`, which must end at once; its status and the lines on its stderr."""
    argv = [sys.executable, "-m", "gcserver.cli", "run", *arguments]
    ended = subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stderr.splitlines()


def test_a_start_that_fails_says_so_in_the_format_of_the_log(tmp_path: Path) -> None:
    """Before the configuration is read, where flag or variable say which; in its checks; in all that follows."""
    bad = ("--node.lanes", "many")
    for flags, environ in ((("--log.format=json",), {}), ((), {"GC_LOG_FORMAT": "JSON"})):
        status, lines = _running(*flags, *bad, "--node.name=n1", **environ)
        (said,) = map(json.loads, lines)
        assert (status, said["level"], said["node"]) == (2, "error", "n1")
        assert said["message"].startswith("node.lanes (")
    file = tmp_path / "gradcomm.toml"
    file.write_text('log.format = "json"\nnode.lanes = "many"\n')
    status, lines = _running("--config", str(file))
    assert status == 2 and len(lines) == 1 and lines[0].startswith("gcserver: node.lanes")

    file.write_text('log.format = "json"\nnode.name = "n2"\n')
    (tmp_path / "file").touch()
    status, lines = _running("--config", str(file), "--node.socket", str(tmp_path / "file" / "daemon.sock"))
    said = [json.loads(line) for line in lines]
    fatal = [s["message"] for s in said if s["level"] == "error"]
    assert status == 1 and {s["node"] for s in said} == {"n2"} and fatal[0].startswith("cannot start: ")
    assert {s["level"] for s in said} <= {"error", "warning"}
