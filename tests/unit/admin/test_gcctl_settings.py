"""What options, variables and contexts come to: who wins, and who is blamed.

What may live here: tests of `gcserver/admin/gcctl_settings.py`. What may not: the file itself (`test_contexts.py`).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from gcserver.admin.contexts import ContextError
from gcserver.admin.exits import Exit
from gcserver.admin.gcctl_parser import parser
from gcserver.admin.gcctl_settings import DEFAULT_ADDRESS, SettingError, Settings, Value, settle, tls_paths

FILE = """\
current = "one"

[contexts.one]
address = "one:1"
tls_ca = "/one/ca"
tls_cert = "/one/cert"
tls_key = "/one/key"
timeout = "1m"
job = "first"

[contexts.two]
address = "two:2"
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "contexts.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return {"GCCTL_CONFIG": str(path)}


def settled(environ: dict[str, str], *arguments: str) -> Settings:
    return settle(parser().parse_args([*arguments, "tensors"]), environ)


def test_without_anything() -> None:
    assert settled({"HOME": "/does/not/exist"}) == Settings(DEFAULT_ADDRESS, {}, None, "")


def test_the_current_context(environ: dict[str, str]) -> None:
    found = settled(environ)
    assert (found.address, found.timeout, found.job) == ("one:1", 60.0, "first")
    source = f"{environ['GCCTL_CONFIG']}: contexts.one.tls_key"
    assert found.tls["--tls-key"] == Value("/one/key", source, of_context=True)


def test_who_wins(tmp_path: Path) -> None:
    """Of every set of those who name an address, the first in this order does."""
    said = {"option": "o:1", "context by option": "c:1", "variable": "v:1", "current": "n:1"}
    file = tmp_path / "contexts.toml"
    for count in range(1, 5):
        for there in itertools.combinations(said, count):
            current = 'current = "n"\n' if "current" in there else ""
            file.write_text(f'{current}[contexts.n]\naddress = "n:1"\n[contexts.c]\naddress = "c:1"\n')
            environ = {"GCCTL_CONFIG": str(file)} | ({"GC_NODE_ADMIN": "v:1"} if "variable" in there else {})
            options = ["--address", "o:1"] if "option" in there else []
            options += ["--context", "c"] if "context by option" in there else []
            assert settled(environ, *options).address == said[there[0]], there


def test_each_setting_is_looked_for_by_itself(environ: dict[str, str]) -> None:
    """One certificate for a cluster, and nodes by their addresses."""
    found = settled(environ | {"GC_TLS_CA": "/v/ca"}, "--address", "b:1", "--tls-cert", "/o/cert", "--timeout", "5s")
    assert (found.address, found.timeout) == ("b:1", 5.0)
    assert found.tls["--tls-ca"] == Value("/v/ca", "GC_TLS_CA")
    assert found.tls["--tls-cert"] == Value("/o/cert", "--tls-cert") and found.tls["--tls-key"].text == "/one/key"
    options = parser().parse_args(["tensors", "--job", "second"])
    assert settle(options, environ).job == "second"


def test_a_context_by_variable_or_none(environ: dict[str, str]) -> None:
    assert settled(environ | {"GCCTL_CONTEXT": "two"}).address == "two:2"
    assert settled(environ | {"GCCTL_CONTEXT": "two", "GC_NODE_ADMIN": "v:1"}).address == "v:1"
    assert settled(environ | {"GCCTL_CONTEXT": "two"}, "--context", "one").address == "one:1"
    Path(environ["GCCTL_CONFIG"]).chmod(0o666)
    for nothing in (settled(environ, "--context", "none"), settled(environ | {"GCCTL_CONTEXT": "none"})):
        assert nothing == Settings(DEFAULT_ADDRESS, {}, None, ""), "also where the file cannot be used"
    with pytest.raises(ContextError, match="chmod 600"):
        settled(environ)


def test_who_is_blamed(environ: dict[str, str]) -> None:
    with pytest.raises(SettingError, match=r"^GC_NODE_ADMIN: expected host:port or unix:/path") as caught:
        settled(environ | {"GC_NODE_ADMIN": "here"})
    assert caught.value.status is Exit.USAGE
    with pytest.raises(ContextError, match="no context 'three'"):
        settled(environ, "--context", "three")
    with pytest.raises(ContextError, match=r"^GCCTL_CONTEXT: .*no context 'three'"):
        settled(environ | {"GCCTL_CONTEXT": "three"})
    homeless = {option: Value("~no-such-user/x", "GC_TLS_CA") for option in ("--tls-ca", "--tls-cert", "--tls-key")}
    with pytest.raises(SettingError, match="GC_TLS_CA: ~no-such-user/x names no user"):
        tls_paths(homeless)
