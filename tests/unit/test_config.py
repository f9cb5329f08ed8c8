"""One file, flags and variables: who wins, what is refused and in which words, and that the documentation is true."""

from __future__ import annotations

import os
import re
import socket
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gcserver import config
from gcserver.config import Config, ConfigError
from gcserver.config_keys import KEYS
from gcserver.values import Address

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def write(folder: Path, text: str) -> Path:
    path = folder / "gradcomm.toml"
    path.write_text(text)
    return path


def refusal(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(**given)
    return str(caught.value)


def test_defaults() -> None:
    c = config.load()
    assert c.node.name == socket.gethostname()
    assert str(c.node.listen) == str(c.node.advertise) == "tcp://127.0.0.1:7470"
    assert str(c.node.control) == "tcp://127.0.0.1:7471"
    assert c.node.state == Path(f"/dev/shm/gradcomm-{os.getuid()}/{c.node.name}")
    assert c.node.admin == "127.0.0.1:7460"
    assert c.node.metrics == Address("127.0.0.1", 7461)
    assert (c.node.lanes, c.node.cores) == (1, None)
    assert (c.cluster.peers, c.cluster.lease) == ((), 30.0)
    assert (c.job.deadline, c.job.on_loss) == (1800.0, "fail")
    assert (c.codec.default, c.partition_bytes, c.min_compress_bytes) == ("none", 8 << 20, 64 << 10)
    assert c.plan.controller == "none"
    assert (c.plan.probe_every, config.load(flags={"plan.probe_every": "0s"}).plan.probe_every) == (120.0, 0.0)
    assert c.insecure is False
    assert c.log.level == "info"


def test_socket_follows_the_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert config.load().node.socket == Path("/run/user/7/gradcomm/daemon.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert config.load().node.socket == Path(f"/tmp/gradcomm-{os.getuid()}/daemon.sock")


def test_profiles_go_where_caches_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/seven")
    assert config.load().plan.profiles == Path("/home/seven/.cache/gradcomm/profiles")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert config.load().plan.profiles == Path("/caches/gradcomm/profiles")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert config.load().plan.profiles is None
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/gradcomm:/var/cache/other")
    assert config.load().plan.profiles == Path("/var/cache/gradcomm/profiles")
    assert config.load(flags={"plan.profiles": "/p"}).plan.profiles == Path("/p")
    off = config.load(flags={"plan.profiles": " "})
    assert off.plan.profiles is None and 'profiles = ""' in config.to_toml(off)
    assert "absolute path" in refusal(flags={"plan.profiles": "here"})


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, 'partition_bytes = "1MiB"\n[node]\nlanes = 2\nname = "file"\n[job]\ndeadline = "5m"\n')
    c = config.load(file, {"node.name": "flag"}, {"GC_NODE_NAME": "variable", "GC_NODE_LANES": "3", "GC_JOB": "mine"})
    assert (c.node.name, c.node.lanes, c.partition_bytes, c.job.deadline) == ("flag", 3, 1 << 20, 300.0)
    assert c.cluster.lease == 30.0
    assert c.sources == {
        "node.name": "flag",
        "node.lanes": "variable GC_NODE_LANES",
        "partition_bytes": f"{file}:1",
        "job.deadline": f"{file}:6",
    }


def test_derived_values_follow_what_they_derive_from() -> None:
    c = config.load(flags={"node.name": "n7", "node.listen": "tcp://*:9000", "insecure": "true", "node.lanes": "4"})
    assert c.node.state.name == "n7"
    assert str(c.node.advertise) == f"tcp://{socket.gethostname()}:9000"
    assert str(c.node.control) == "tcp://0.0.0.0:9004"


def test_peers_from_file_flag_and_variable(tmp_path: Path) -> None:
    expected = (config.Peer("b", Address("10.0.0.2", 7470)), config.Peer("c", Address("10.0.0.3", 7480)))
    text = "b=tcp://10.0.0.2:7470, c=tcp://10.0.0.3:7480"
    listed = '[cluster]\npeers = ["b=tcp://10.0.0.2:7470", "c=tcp://10.0.0.3:7480"]\n'
    assert config.load(write(tmp_path, listed)).cluster.peers == expected
    assert config.load(flags={"cluster.peers": text}).cluster.peers == expected
    assert config.load(environ={"GC_CLUSTER_PEERS": text}).cluster.peers == expected
    assert config.load(flags={"cluster.peers": ""}).cluster.peers == ()
    assert config.load(flags={"cluster.peers": text, "node.name": "b"}).others == expected[1:]


def test_a_list_in_a_variable_may_be_written_as_in_the_file() -> None:
    for text in ('["*.bias", "head.*"]', "*.bias,head.*"):
        assert config.load(environ={"GC_PLAN_EXCLUDE": text}).plan.exclude == ("*.bias", "head.*")


def test_a_codec_is_checked_and_normalised() -> None:
    assert config.load(flags={"codec.default": "topk(ratio=0.010)"}).codec.default == "topk(ratio=0.01)+ef"
    said = refusal(flags={"codec.default": "topk(ratio=3)"})
    assert said.startswith("codec.default (flag): ") and "ratio" in said and "got 'topk(ratio=3)'" in said


def test_a_controller_is_checked_and_normalised() -> None:
    flags = {"plan.controller": "dc2-da5( k_max = 2e-1 )"}
    assert config.load(flags=flags).plan.controller == "dc2-da5(k_max=0.2)"
    said = refusal(flags={"plan.controller": "da5"})
    assert (
        said.startswith("plan.controller (flag): a controller is one of none, dc2-da1") and said.count("got 'da5'") == 1
    )


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"flags": {"node.sokcet": "/x"}}, ["--node.sokcet", "did you mean node.socket?"]),
        ({"flags": {"socket": "/x"}}, ["did you mean node.socket?"]),
        ({"flags": {"zzz": "1"}}, ["gcserver config --defaults"]),
        ({"environ": {"GC_NODE_LANE": "2"}}, ["GC_NODE_LANE", "did you mean GC_NODE_LANES?"]),
        ({"environ": {"GC_JOB_DEADLINE": "soon"}}, ["job.deadline", "variable GC_JOB_DEADLINE", "30s", "'soon'"]),
        ({"flags": {"job.deadline": "0.5"}}, ["1s to 604800s"]),
        ({"flags": {"node.lanes": "0"}}, ["1 to 64", "'0'"]),
        ({"flags": {"node.lanes": "two"}}, ["1 to 64"]),
        ({"flags": {"node.name": "a=b"}}, ["letters, digits"]),
        ({"flags": {"node.name": "../up"}}, ["letters, digits"]),
        ({"flags": {"node.socket": "here.sock"}}, ["an absolute path"]),
        ({"flags": {"node.socket": "~no-such-user/d.sock"}}, ["node.socket (flag)", "~ and a user of this machine"]),
        ({"flags": {"node.socket": "/" + "x" * 100}}, ["95 bytes"]),
        ({"flags": {"job.on_loss": "shrink"}}, ["job.on_loss", "cluster.etcd"]),
        ({"flags": {"job.on_loss": "panic"}}, ["expected one of fail, skip, shrink"]),
        ({"flags": {"cluster.etcd": "10.0.0.1:2379"}}, ["cluster.etcd", "http://10.0.0.1:2379"]),
        ({"flags": {"cluster.etcd": "http://user@h:1"}}, ["expected URLs"]),
        ({"flags": {"partition_bytes": "128KiB"}}, ["256KiB to 64MiB"]),
        ({"flags": {"partition_bytes": "1000000"}}, ["multiple of 4096"]),
        ({"flags": {"insecure": "maybe"}}, ["true or false"]),
        ({"flags": {"log.level": "loud"}}, ["debug, info"]),
        ({"flags": {"cluster.peers": "b"}}, ["'b'", "name=tcp://host:port"]),
        ({"flags": {"cluster.peers": "b=10.0.0.1:7470"}}, ["'b=10.0.0.1:7470'", "tcp://host:port"]),
        (
            {"flags": {"cluster.peers": "a=tcp://h:1,b=tcp://h:2,a=tcp://h:3"}},
            ["cluster.peers (flag)", "'a' is there twice, as tcp://h:1 and as tcp://h:3"],
        ),
        ({"flags": {"cluster.peers": "a=tcp://h:1,a=tcp://h:1"}}, ["'a' is there twice"]),
        ({"environ": {"GC_CLUSTER_PEERS": "b=tcp://h:1,c=tcp://h:1"}}, ["tcp://h:1 is there twice, as 'b' and as 'c'"]),
        ({"flags": {"node.listen": "tcp://0.0.0.0:7470"}}, ["node.listen (flag)", "`gcserver keygen`", "insecure ="]),
        ({"flags": {"security.key": "/k/a.key"}}, ["security.key (flag)", "security.peers", "set both"]),
        ({"flags": {"security.peers": "/k/peers"}}, ["security.peers (flag)", "gcserver keygen", "security.key"]),
        ({"flags": {"security.key": "a.key"}}, ["security.key (flag)", "an absolute path"]),
        (
            {"flags": {"node.admin": "0.0.0.0:7460"}},
            ["node.admin (flag)", "admin.ca, admin.cert, admin.key", "gcserver pki", "Unix socket", "insecure = true"],
        ),
        ({"flags": {"node.metrics": "0.0.0.0:7461"}}, ["node.metrics (flag)", "gcserver pki", "insecure = true"]),
        ({"flags": {"admin.cert": "/c"}}, ["admin.cert (flag)", "together, and admin.ca and admin.key is missing"]),
        ({"flags": {"admin.ca": "/c", "admin.key": "/k"}}, ["admin.ca (flag)", "and admin.cert is missing"]),
        ({"flags": {"admin.ca": "here.pem"}}, ["admin.ca", "an absolute path, or"]),
        ({"environ": {"GC_ADMIN_CERTS": "/c"}}, ["did you mean GC_ADMIN_CERT?"]),
        ({"flags": {"node.listen": "tcp://some-host:7470"}}, ["can be reached by other machines"]),
        ({"flags": {"node.advertise": "tcp://0.0.0.0:7470"}}, ["no address a peer could connect to"]),
        ({"flags": {"node.listen": "tcp://127.0.0.1:65535"}}, ["beyond 65535"]),
        ({"flags": {"node.admin": "127.0.0.1:7471"}}, ["port 7471", "the control link"]),
        ({"flags": {"node.metrics": "127.0.0.1:7460"}}, ["port 7460", "the admin service"]),
        ({"flags": {"node.metrics": "localhost"}}, ["host:port"]),
        ({"file": Path("/does/not/exist.toml")}, ["/does/not/exist.toml: cannot be read: No such file"]),
    ],
)  # fmt: skip
def test_a_refusal_names_key_source_and_what_is_accepted(given: dict[str, Any], parts: list[str]) -> None:
    said = refusal(**given)
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("# comment\n\n[node]\nlanez = 2\n", [":4", "node.lanez", "did you mean node.lanes?"]),
        ("[cluster]\npeers = 3\n", [":2", "cluster.peers", "a list such as", "got 3"]),
        ("node.lanes = true\n", [":1", "1 to 64", "got True"]),
        ("[job]\n[node]\nname = 7\n", [":3", "node.name", "letters"]),
        ("[cluster.peers]\nb = 'tcp://10.0.0.1:7470'\n", ["cluster.peers", "a list such as"]),
        ("[node]\nlisten = 7470\n", [":2", "tcp://host:port"]),
        ("insecure = 'si'\n", [":1", "true or false"]),
        ("[nodes]\nlanes = 2\n", ["nodes.lanes", "did you mean node.lanes?"]),
        ("lanes = \n", ["is not TOML", "line 1"]),
    ],
)
def test_a_refusal_points_into_the_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    said = refusal(file=write(tmp_path, text))
    assert "gradcomm.toml" in said
    for part in parts:
        assert part in said


def test_only_a_file_of_bounded_length_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # nobody writes to it: opening it would wait
    for other in (pipe, Path("/dev/zero"), tmp_path):
        assert f"{other}: is no regular file" in refusal(file=other)
    longest = "#" * ((1 << 20) - 1) + "\n"
    assert config.load(write(tmp_path, longest)) == config.load()
    assert "at most 1MiB" in refusal(file=write(tmp_path, longest + "\n"))
    (tmp_path / "gradcomm.toml").write_bytes(b"\xff")
    assert "is not UTF-8 text" in refusal(file=tmp_path / "gradcomm.toml")


def test_variables_of_others_are_left_alone() -> None:
    others = {"GC_JOB": "j", "GC_AUTOSTART": "1", "GC_NODE_SERVICE_HOST": "10.0.0.9", "GC_NODE_PORT_7470_TCP": "x"}
    assert config.load(environ=others) == config.load()


def test_ucx_is_refused_with_keys_that_it_could_not_use() -> None:
    flags = {"node.transport": "ucx", "security.key": "/a.key", "security.peers": "/peers"}
    for listen in ("tcp://127.0.0.1:7470", "tcp://10.0.0.1:7470"):
        with pytest.raises(ConfigError) as refused:
            config.load(flags={**flags, "node.listen": listen})
        assert refused.value.key == "node.transport"
        assert "UCX can neither encrypt nor authenticate" in str(refused.value) and "insecure" in str(refused.value)
    assert config.load(flags={**flags, "insecure": "true"}).node.transport == "ucx"
    assert config.load(flags={**flags, "node.transport": "zmq"}).node.transport == "zmq"
    with pytest.raises(ConfigError, match="encrypted or authenticated"):
        config.load(flags={"node.transport": "ucx", "node.listen": "tcp://10.0.0.1:7470"})


def test_ucx_is_refused_over_ipv6() -> None:
    with pytest.raises(ConfigError, match=r"node\.listen .*UCX is used over IPv4 only"):
        config.load(flags={"node.transport": "ucx", "node.listen": "tcp://[::1]:7470"})


def test_insecure_allows_any_address() -> None:
    flags = {"insecure": "yes", "node.listen": "tcp://0.0.0.0:7470", "node.admin": "0.0.0.0:7460"}
    assert config.load(flags=flags).node.listen.wildcard


def test_certificates_allow_operators_from_elsewhere_and_nothing_else() -> None:
    flags = {"admin.ca": "/ca.pem", "admin.cert": "/a.pem", "admin.key": "/a.key", "node.admin": "0.0.0.0:7460"}
    c = config.load(flags={**flags, "node.metrics": "0.0.0.0:7461", "admin.audit_log": "/var/log/gc.jsonl"})
    assert c.admin.files == (Path("/ca.pem"), Path("/a.pem"), Path("/a.key")) and c.insecure is False
    assert c.admin.audit_log == Path("/var/log/gc.jsonl") and 'audit_log = "/var/log/gc.jsonl"' in config.to_toml(c)
    assert config.load().admin.files is None
    assert "node.listen" in refusal(flags={**flags, "node.listen": "tcp://0.0.0.0:7470"})


def test_with_keys_daemons_may_be_reached_by_others_and_operators_not() -> None:
    flags = {"security.key": "/k/a.key", "security.peers": "/k/peers", "node.listen": "tcp://0.0.0.0:7470"}
    c = config.load(flags=flags)
    assert c.node.listen.wildcard and not c.insecure
    assert (c.security.key, c.security.peers) == (Path("/k/a.key"), Path("/k/peers"))
    for key in ("node.admin", "node.metrics"):
        assert f"{key} (flag): 0.0.0.0:7400" in refusal(flags={**flags, key: "0.0.0.0:7400"})


def test_admin_and_metrics_can_be_off_or_elsewhere() -> None:
    c = config.load(flags={"node.admin": "", "node.metrics": ""})
    assert c.node.admin == "" and c.node.metrics is None
    assert config.load(flags={"node.admin": "unix:///run/x.sock"}).node.admin == "unix:/run/x.sock"
    assert config.load(flags={"node.admin": "tcp://[::1]:7460"}).node.admin == "[::1]:7460"


# -------------------------------------------------------------------------------------- writing it down
def reread(folder: Path, text: str) -> Config:
    return config.load(write(folder, text))


def test_the_described_defaults_are_the_defaults(tmp_path: Path) -> None:
    text = config.describe()
    assert reread(tmp_path, text) == config.load()
    for key in KEYS:
        assert key.flag in text and key.variable in text and key.about in text


NAMES = st.text(string.ascii_letters + string.digits, min_size=1, max_size=12)
PATHS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/~", exclude_categories=("Cs",)), min_size=1, max_size=12
)


@given(
    name=NAMES,
    path=PATHS.filter(lambda p: p.strip(". ") == p and p.strip() == p),
    lanes=st.integers(1, 64),
    cores=st.none() | st.sets(st.integers(0, 63), min_size=1),
    peers=st.lists(st.tuples(NAMES, st.integers(1, 65535)), max_size=4, unique_by=(lambda p: p[0], lambda p: p[1])),
    lease=st.floats(1, 3600),
    pages=st.integers(64, 16384),
    small=st.integers(0, 1 << 40),
    insecure=st.booleans(),
)  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_what_is_written_is_read_back(
    tmp_path: Path, name: str, path: str, lanes: int, cores: set[int] | None, peers: list[tuple[str, int]],
    lease: float, pages: int, small: int, insecure: bool,
) -> None:  # fmt: skip
    flags = {
        "node.name": name,
        "node.socket": f"/tmp/{path}",
        "node.lanes": str(lanes),
        "node.cores": "auto" if cores is None else ",".join(map(str, cores)),
        "cluster.peers": ",".join(f"{n}=tcp://[::1]:{port}" for n, port in peers),
        "cluster.lease": repr(lease),
        "partition_bytes": str(pages * 4096),
        "min_compress_bytes": str(small),
        "insecure": str(insecure).lower(),
        "security.key": f"/k/{path}" if insecure else "",
        "security.peers": f"/k/{path}.pub" if insecure else "",
    }
    c = config.load(flags=flags)
    assert reread(tmp_path, config.to_toml(c)) == c
    tomllib.loads(config.to_toml(c))


def test_the_page_lists_every_key_as_it_is() -> None:
    """docs/configuration.md is checked, not generated, so that it can explain; its tables must be true."""
    page = DOCUMENT.read_text()
    rows = {row[1]: row[2] for row in re.finditer(r"^\| `([a-z_.]+)` \| (.*) \|$", page, re.MULTILINE)}
    assert set(rows) == {key.name for key in KEYS}
    for key in KEYS:
        default = key.derived if key.default is None else f"`{config.toml_value(key.default)}`"
        row = f"{default} | {key.accepts} | {key.about}".replace("<", "&lt;")
        assert rows[key.name] == row, f"the row of {key.name} in {DOCUMENT.name}"
