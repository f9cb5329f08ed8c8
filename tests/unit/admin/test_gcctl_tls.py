"""gcctl against a service with certificates: roles, and a line that helps for each way in which they are wrong."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gcserver import pki
from gcserver.admin import gcctl
from gcserver.admin.access import Access, Paths
from gcserver.admin.certificates import Certificates
from gcserver.admin.exits import Exit
from gcserver.admin.service import AdminServer, serve
from tests.unit.admin.credentials import LONG_AGO, Folder
from tests.unit.admin.source import FixedSource


@dataclass
class Daemon:
    """A service over TLS in a thread of its own; its CA; its address, and that of one without TLS."""

    ours: Folder
    node: Paths
    address: str
    plain: str


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    ours = Folder(tmp_path_factory.mktemp("pki"))
    node, loop = ours.node(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)  # type: ignore[arg-type]

    secure = do(serve(FixedSource(), "127.0.0.1:0", Access(Certificates(node))))
    plain = do(serve(FixedSource(), "127.0.0.1:0"))
    assert isinstance(secure, AdminServer) and isinstance(plain, AdminServer)
    yield Daemon(ours, node, secure.address, plain.address)
    do(secure.stop())
    do(plain.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def options(whose: Paths) -> list[str]:
    return ["--tls-ca", str(whose.ca), "--tls-cert", str(whose.certificate), "--tls-key", str(whose.key)]


def run(capsys: pytest.CaptureFixture[str], address: str, whose: Paths | None, *command: str) -> tuple[int, str]:
    """(exit status, what was printed); an error is one line on stderr alone."""
    given = ["--address", address, "--timeout", "60s", *(options(whose) if whose else [])]
    status = gcctl.main([*given, *(command or ("status",))])
    captured = capsys.readouterr()
    assert captured.out == "" or captured.err == ""
    assert status == 0 or captured.err.count("\n") == 1
    return status, captured.out or captured.err


def test_an_operator_by_options(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    alice = daemon.ours.operator("alice", "operator")
    assert run(capsys, daemon.address, alice)[1].startswith("node         a\n")
    assert run(capsys, daemon.address, alice, "set-codec", "fp16") == (
        0, "plan 3 takes effect at step 44 on every node\n",
    )  # fmt: skip


def test_a_viewer_by_variables(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eve = daemon.ours.operator("eve", "viewer")
    monkeypatch.setenv("GC_TLS_CA", str(eve.ca))
    monkeypatch.setenv("GC_TLS_CERT", str(eve.certificate))
    monkeypatch.setenv("GC_TLS_KEY", str(eve.key))
    assert run(capsys, daemon.address, None, "peers")[0] == 0
    said = "gcctl: SetCodec needs the role operator; the certificate 'eve' has the role viewer\n"
    assert run(capsys, daemon.address, None, "set-codec", "fp16") == (Exit.DENIED, said)
    alice = daemon.ours.operator("alice", "operator")
    assert run(capsys, daemon.address, alice, "set-codec", "fp16")[0] == 0, "an option wins over a variable"


def test_no_role(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    said = "gcctl: GetStatus needs the role viewer; the certificate 'nobody' has no role\n"
    assert run(capsys, daemon.address, daemon.ours.nobody()) == (Exit.DENIED, said)


def test_an_expired_certificate(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    old = daemon.ours.expired()
    status, said = run(capsys, daemon.address, old)
    day = LONG_AGO + dt.timedelta(days=5)
    assert (
        status == Exit.DENIED
        and f"{old.certificate} ('old') expired on {day:%Y-%m-%d}" in said
        and "gcserver pki" in said
    )


def test_a_certificate_of_another_ca(daemon: Daemon, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    foreign = Folder(tmp_path).operator("alice", "operator")
    status, said = run(capsys, daemon.address, foreign)
    assert (
        status == Exit.DENIED
        and f"is not signed by the CA in {foreign.ca}" in said
        and "name the CA that made it" in said
    )
    mixed = Paths(daemon.ours.ca_file, foreign.certificate, foreign.key)
    status, said = run(capsys, daemon.address, mixed)
    assert status == Exit.DENIED and f"{daemon.address} refused the certificate {foreign.certificate}" in said
    assert f"not signed by the CA in {daemon.ours.ca_file}" in said


def test_a_nodes_certificate_is_no_operators(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, daemon.address, daemon.node)
    assert (
        status == Exit.DENIED and f"refused the certificate {daemon.node.certificate}: it must be an operator's" in said
    )


def test_tls_on_one_side_only(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, daemon.address, None)
    assert status == Exit.DENIED and "speaks TLS and wants a certificate: give --tls-ca (GC_TLS_CA), --tls-cert" in said
    status, said = run(capsys, daemon.plain, daemon.ours.operator("alice", "operator"))
    assert status == Exit.DENIED and f"{daemon.plain} speaks no TLS: leave out" in said


def test_a_daemon_whose_certificate_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By another name, and expired after it was read."""
    ours = Folder(tmp_path)
    alice = ours.operator("alice", "operator")

    def served(node: Paths, moment: dt.datetime | None = None) -> tuple[int, str]:
        loop = asyncio.new_event_loop()

        async def work() -> tuple[int, str]:
            certificates = Certificates(node)
            if moment is not None:
                material = certificates.current()
                old = pki.node(ours.ca, "a", ["127.0.0.1"], 5, moment)
                object.__setattr__(material, "key_pem", old.key_pem)
                object.__setattr__(material, "certificate_pem", old.certificate_pem)
            server = await serve(FixedSource(), "127.0.0.1:0", Access(certificates))
            try:
                return await asyncio.to_thread(run, capsys, server.address, alice)
            finally:
                await server.stop()

        try:
            return loop.run_until_complete(work())
        finally:
            loop.close()

    elsewhere = Paths(ours.ca_file, *ours.put("b", pki.node(ours.ca, "b", ["10.9.9.9"], 5)))
    status, said = served(elsewhere)
    assert status == Exit.DENIED and "is for other names" in said and "--host 127.0.0.1" in said
    status, said = served(ours.node(), LONG_AGO)
    assert (
        status == Exit.DENIED
        and "the certificate of 127.0.0.1" in said
        and "has expired" in said
        and "pki node" in said
    )


def test_files_that_are_missing_or_unusable(daemon: Daemon, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    alice = daemon.ours.operator("alice", "operator")
    ctl = ["--address", daemon.address, "status"]
    assert gcctl.main(["--tls-cert", str(alice.certificate), *ctl]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "--tls-cert: expected all three files; missing: --tls-ca (GC_TLS_CA), --tls-key (GC_TLS_KEY)" in said
    assert gcctl.main([*options(Paths(tmp_path / "none", alice.certificate, alice.key)), *ctl]) == Exit.USAGE
    assert f"--tls-ca: {tmp_path}/none is no file that uid" in capsys.readouterr().err
    homeless = Paths(Path("~no-such-user/ca.pem"), alice.certificate, alice.key)
    assert gcctl.main([*options(homeless), *ctl]) == Exit.USAGE
    assert "--tls-ca: ~no-such-user/ca.pem names no user of this machine" in capsys.readouterr().err
    unreachable = Paths(Path("a" * 300), alice.certificate, alice.key)
    assert gcctl.main([*options(unreachable), *ctl]) == Exit.USAGE
    assert f"{'a' * 300} is no file that uid" in capsys.readouterr().err
    eve = daemon.ours.operator("eve", "viewer")
    status, said = run(capsys, daemon.address, Paths(alice.ca, alice.certificate, eve.key))
    assert status == Exit.DENIED and f"{eve.key} is not the key of {alice.certificate}" in said


def test_files_that_openssl_does_not_take_are_said(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's library takes shorter keys than OpenSSL, which looks for the reason of a failure."""

    def refuse(*_: object) -> None:
        raise ssl.SSLError("[SSL: EE_KEY_TOO_SMALL] ee key too small")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", refuse)
    status, said = run(capsys, "127.0.0.1:9", daemon.ours.operator("alice", "operator"))
    assert status == Exit.DENIED and "alice.key cannot be used: " in said and "EE_KEY_TOO_SMALL" in said


def test_nothing_there_is_said_as_ever(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, "127.0.0.1:9", daemon.ours.operator("alice", "operator"))
    assert status == Exit.UNREACHABLE and "no daemon answers at 127.0.0.1:9" in said


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_name_that_no_host_has(capsys: pytest.CaptureFixture[str], host: str) -> None:
    status, said = run(capsys, f"{host}:1", None)
    assert status == Exit.UNREACHABLE and f"no daemon answers at {host}:1" in said


def test_a_unix_socket_is_asked_without_tls(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Variables for other daemons do not get in the way."""
    alice = Folder(tmp_path / "pki").operator("alice", "operator")
    address = f"unix:{tmp_path}/admin.sock"

    async def work() -> tuple[int, str]:
        server = await serve(FixedSource(), address)
        try:
            return await asyncio.to_thread(run, capsys, address, alice)
        finally:
            await server.stop()

    assert asyncio.run(work())[0] == 0
