"""What a private daemon is given, and what is said when it cannot be started."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gcserver import derivedkeys, gcrun, keys, private, private_folder
from gcserver.config import ConfigError


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # pytest's own folders have names too long for sockets
    with tempfile.TemporaryDirectory(prefix="gc") as folder:
        monkeypatch.setattr(private_folder, "SHARED", Path(folder))
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
        yield


def _given(flags: dict[str, str], environ: dict[str, str] | None = None, file: Path | None = None) -> private._Settings:
    return private._settings(flags, environ or {}, file, private_folder.make().path)


def test_what_nobody_says_is_chosen() -> None:
    one, other = _given({}), _given({})
    node = one.config.node
    folder = node.socket.parent
    assert (node.state, node.admin, node.metrics) == (folder / "state", f"unix:{folder}/admin.sock", None)
    assert node.name != other.config.node.name and node.socket != other.config.node.socket
    assert node.listen.host == "127.0.0.1" and node.listen.port in private._PORTS and one.free_port
    assert (node.cores, other.config.node.cores) == ((7,), (6,))
    assert (node.stop_grace, one.config.log.level) == (30.0, "warning")


def test_what_the_job_says_stays(tmp_path: Path) -> None:
    file = tmp_path / "gradcomm.toml"
    file.write_text('codec.default = "fp16"\n[log]\nlevel = "debug"\n')
    flags = {"node.lanes": "2", "node.cores": "auto", "node.admin": ""}
    given = _given(flags, {"GC_NODE_LISTEN": "tcp://127.0.0.1:0", "GC_NODE_NAME": "mine"}, file)
    node = given.config.node
    assert (node.name, node.lanes, node.admin, node.cores, given.cores) == ("mine", 2, "", None, ())
    assert node.listen.port in private._PORTS and given.free_port
    assert (given.config.codec.default, given.config.log.level) == ("fp16", "debug")
    assert given.arguments(file)[-2:] == ["--config", str(file)]
    fixed = _given({"node.listen": "tcp://127.0.0.1:7777"})
    assert fixed.config.node.listen.port == 7777 and not fixed.free_port


@pytest.mark.parametrize("key", ["node.socket", "node.state"])
def test_where_it_lives_is_not_the_jobs_to_choose(key: str) -> None:
    with pytest.raises(ConfigError, match=f"--{key}.*is chosen"):
        _given({key: "/somewhere"})


def test_an_address_that_others_reach_needs_keys_here_too() -> None:
    with pytest.raises(ConfigError, match="insecure"):
        _given({"node.listen": "tcp://0.0.0.0:0"})
    assert _given({"node.listen": "tcp://0.0.0.0:0", "insecure": "true"}).config.node.listen.host == "0.0.0.0"


SECRET = "0123456789abcdef" * 2


def test_a_jobs_secret_gives_it_keys() -> None:
    environ = {"GC_JOB_SECRET": SECRET, "GC_NODE_LISTEN": "tcp://0.0.0.0:0"}
    given = _given({"node.name": "n1", "cluster.peers": "n2=tcp://10.0.0.2:7470"}, environ)
    security, folder = given.config.security, given.config.node.socket.parent
    assert security.key == folder / "n1.key" and security.peers == folder / "peers" and not given.config.insecure
    pairs = [derivedkeys.pair(SECRET.encode(), derivedkeys.PRIVATE, name) for name in ("n1", "n2")]
    assert keys.read_pair(security.key) == pairs[0]
    assert keys.read_admitted(security.peers) == {pair.name: pair.public for pair in pairs}
    assert SECRET not in " ".join(given.arguments(None))
    unnamed = _given({}, environ).config
    assert unnamed.security.key is not None and keys.read_pair(unnamed.security.key).name == unnamed.node.name


@pytest.mark.parametrize("where", ["flag", "variable", "file"])
def test_a_secret_beside_keys_is_refused(where: str, tmp_path: Path) -> None:
    flags, environ, file = {}, {"GC_JOB_SECRET": SECRET}, None
    if where == "flag":
        flags = {"security.key": "/etc/a.key", "security.peers": "/etc/peers"}
    elif where == "variable":
        environ |= {"GC_SECURITY_KEY": "/etc/a.key", "GC_SECURITY_PEERS": "/etc/peers"}
    else:
        file = tmp_path / "gradcomm.toml"
        file.write_text('[security]\nkey = "/etc/a.key"\npeers = "/etc/peers"\n')
    with pytest.raises(ConfigError, match=r"security\.key .*GC_JOB_SECRET is set"):
        _given(flags, environ, file)


def test_a_secret_that_is_too_short_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(derivedkeys.SecretError, match="has 7 bytes"):
        private.start({}, {"GC_JOB_SECRET": "letmein"}, None)
    assert not list(private_folder.base().glob("job-*"))
    monkeypatch.setenv("GC_JOB_SECRET", "letmein")
    monkeypatch.setattr(sys, "argv", ["private", "job"])
    assert private.main() == 1
    said = capsys.readouterr()
    assert said.out.startswith("error: GC_JOB_SECRET has 7 bytes, expected at least 32") and "letmein" not in said.out
    assert "GC_JOB_SECRET has 7 bytes" in said.err
    assert gcrun.main(["--", "true"]) == 2 and "GC_JOB_SECRET has 7 bytes" in capsys.readouterr().err


def test_free_ports_come_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(private, "_PORTS", range(port - 1, port))
        with pytest.raises(private.StartError, match="no 2 free ports"):
            private.free_ports("127.0.0.1", 2)
    with pytest.raises(private.StartError, match=r"192\.0\.2\.1 cannot be bound \(.*\): set node.listen"):
        private.free_ports("192.0.2.1", 2)


def _daemon(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have keepers be this script; it gets their arguments."""
    interpreter = Path(private_folder.SHARED) / "python"
    interpreter.write_text(f"#!{sys.executable}\n{script}")
    interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))


LISTEN = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[3] + "/daemon.sock")
print(*sys.argv[7:], file=open(sys.argv[3] + "/said", "w"), flush=True)
listener.listen()
if "unix:" + sys.argv[3] + "/admin.sock" in sys.argv:
    time.sleep(0.2)  # operators are taken a moment later
    operators = socket.socket(socket.AF_UNIX)
    operators.bind(sys.argv[3] + "/admin.sock")
    operators.listen()
time.sleep(60)
"""


def test_it_is_started_once_it_takes_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    _daemon(monkeypatch, LISTEN)
    made = private.start({"codec.default": "fp16"}, {"GC_NODE_SOCKET": "", "GC_NODE_STATE": "of another"}, None)
    try:
        for name in ("daemon.sock", "admin.sock"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(made.folder / name))
        assert "--codec.default fp16" in (made.folder / "said").read_text()
    finally:
        made.keeper.kill()
        made.keeper.wait()


@pytest.mark.parametrize("admin", ["127.0.0.1:7", ""])
def test_a_port_for_operators_is_not_connected_to(monkeypatch: pytest.MonkeyPatch, admin: str) -> None:
    _daemon(monkeypatch, LISTEN)
    made = private.start({"node.admin": admin}, {}, None)
    try:
        assert (made.admin, made.socket.is_socket()) == (admin, True)
        assert not (made.folder / "admin.sock").exists()
    finally:
        made.keeper.kill()
        made.keeper.wait()


def test_one_that_ends_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _daemon(monkeypatch, "import shutil, sys\nshutil.rmtree(sys.argv[3])\nsys.exit(1)")
    with pytest.raises(private.StartError, match="exit status 1"):
        private.start({}, {}, None)
    assert not list(private_folder.base().glob("job-*"))


def test_a_port_that_somebody_took_meanwhile_is_tried_again_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    _daemon(monkeypatch, "import sys\nsys.exit(1)")
    answers = iter([True, False, True, True])  # free when chosen, not when the daemon has ended; then both
    monkeypatch.setattr(private.ports, "free", lambda *address: next(answers))
    with pytest.raises(private.StartError):
        private.start({}, {}, None)
    assert next(answers, None) is None, "the second attempt failed for another reason, and was the last"


def test_without_the_servers_requirements_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(private.StartError, match=r"gradcomm\[server\]"):
        private.start({}, {}, None)


def test_who_comes_second_finds_the_daemon_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[private.Private] = []
    real: Callable[..., private.Private] = private.start

    def start(*arguments: object) -> private.Private:
        started.append(real(*arguments))
        private_folder.watch(started[-1].folder)  # as its keeper would
        return started[-1]

    _daemon(monkeypatch, LISTEN)
    monkeypatch.setattr(private, "start", start)
    try:
        first, second = private.join("job", {}), private.join("job", {})
        other = private.join("another job", {})
        assert first[0] == second[0] != other[0]
        assert len(started) == 2
    finally:
        for made in started:
            made.keeper.kill()
            made.keeper.wait()
