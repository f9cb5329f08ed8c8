"""Metrics over TLS with client certificates: who may read them, renewal, and what is counted."""

from __future__ import annotations

import asyncio
import datetime as dt
import http.client
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from gcserver import pki
from gcserver.admin import exposition
from gcserver.admin.access import Access, Paths
from gcserver.admin.certificates import Certificates, Identity
from gcserver.admin.dashboard import Dashboard
from gcserver.admin.metrics import Metrics
from tests.unit.admin.credentials import Folder
from tests.unit.admin.source import FixedSource

T = TypeVar("T")


@pytest.fixture
def ours(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "pki")


def served(node: Paths, work: Callable[[int, Counter[str]], T]) -> T:
    """``work(port, what was counted)`` in a thread beside a server."""

    async def all_of_it() -> T:
        counted: Counter[str] = Counter()
        access = Access(Certificates(node), None, lambda kind: counted.update([kind]))
        dashboard = Dashboard(FixedSource(), every=0.02, closer_every=0.02)
        server = await exposition.serve(
            Metrics("0.1.0", "a", 1), "127.0.0.1", 0, lambda: "", access=access, dashboard=dashboard
        )
        try:
            return await asyncio.to_thread(work, int(server.address.rpartition(":")[2]), counted)
        finally:
            await server.stop()

    return asyncio.run(all_of_it())


def context_of(whose: Paths | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if whose is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(whose.ca)
        context.load_cert_chain(whose.certificate, whose.key)
    return context


def get(port: int, whose: Paths | None, path: str = "/metrics") -> tuple[int, str]:
    """(status, body), or (0, why there was no answer)."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context_of(whose))
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def test_a_viewer_may_read_and_so_may_an_operator(ours: Folder) -> None:
    def work(port: int, counted: Counter[str]) -> None:
        for whose in (ours.operator("prometheus", "viewer"), ours.operator("alice", "operator")):
            status, body = get(port, whose)
            assert status == 200 and "gradcomm_build_info" in body
            assert get(port, whose, "/healthz") == (200, "ok\n")
            assert get(port, whose, "/")[1].startswith("<!doctype html>")
        assert not counted

    served(ours.node(), work)


def test_who_has_no_role_is_refused_and_counted(ours: Folder) -> None:
    nobody = ours.nobody()

    def work(port: int, counted: Counter[str]) -> None:
        for n, path in enumerate(("/metrics", "/healthz", "/readyz", "/", "/dashboard/events"), 1):
            status, body = get(port, nobody, path)
            assert (status, body) == (
                403, "expected a certificate with the role viewer or a higher one; 'nobody' has none\n",
            )  # fmt: skip
            assert counted == {"metrics_denied": n}

    served(ours.node(), work)


def test_who_has_no_certificate_of_our_ca_gets_no_answer(ours: Folder, tmp_path: Path) -> None:
    foreign = Folder(tmp_path / "foreign").operator("alice", "operator")
    foreign.ca.write_bytes(ours.ca_file.read_bytes())
    node = ours.node()

    def work(port: int, counted: Counter[str]) -> None:
        for n, whose in enumerate((None, ours.expired(), foreign, node), 1):
            assert get(port, whose)[0] == 0
            assert counted == {"metrics_handshake_failed": n}
        with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
            plain.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert b"gradcomm" not in plain.makefile("rb").read()
        assert counted == {"metrics_handshake_failed": 5}
        assert get(port, ours.operator("eve", "viewer"))[0] == 200

    served(node, work)


def test_a_renewed_certificate_and_a_new_ca_are_used_at_once(ours: Folder, tmp_path: Path) -> None:
    next_one = Folder(tmp_path / "next")
    alice, bob, node = ours.operator("alice", "viewer"), next_one.operator("bob", "viewer"), ours.node()

    def certificate(port: int) -> str:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=60)

    def work(port: int, counted: Counter[str]) -> None:
        assert certificate(port).encode() == node.certificate.read_bytes()
        ours.node(days=20)
        renewed = certificate(port)
        assert renewed.encode() == node.certificate.read_bytes() and get(port, alice)[0] == 200
        assert get(port, bob)[0] == 0
        under_new = pki.node(next_one.ca, "a", ["127.0.0.1"], 5)
        node.key.write_bytes(under_new.key_pem)
        node.certificate.write_bytes(under_new.certificate_pem)
        ours.ca_file.write_bytes(next_one.ca.certificate_pem)
        assert get(port, bob)[0] == 200 and certificate(port) != renewed
        assert get(port, alice)[0] == 0

    served(node, work)


def test_a_viewer_is_told_what_happens_for_as_long_as_the_certificate_holds(ours: Folder) -> None:
    viewer = ours.operator("eve", "viewer")

    def work(port: int, counted: Counter[str]) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
            tls = context_of(viewer).wrap_socket(plain, server_hostname="127.0.0.1")
            tls.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: any.name\r\n\r\n")
            said = b""
            while b"event: overview\n" not in said:
                said += tls.recv(1 << 16)
            tls.close()
        assert said.startswith(b"HTTP/1.1 200 OK") and not counted

    served(ours.node(), work)
    now = dt.datetime.now(dt.UTC)
    ends = [exposition._left(Identity("eve", "viewer", now + dt.timedelta(seconds=s))) for s in (60, -60)]
    assert 0 < ends[0] <= 60 and ends[1] == 0


def test_a_client_that_does_not_close_tls_is_hung_up_on(ours: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep a descriptor of the daemon's for half a minute."""
    monkeypatch.setattr(exposition, "_PATIENCE", 3.0)

    def work(port: int, counted: Counter[str]) -> None:
        read, written = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context_of(ours.operator("prometheus", "viewer")).wrap_bio(read, written, server_hostname="127.0.0.1")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    sock.sendall(written.read())
                    read.write(sock.recv(1 << 16))
            tls.write(b"GET /healthz HTTP/1.1\r\n\r\n")
            sock.sendall(written.read())
            answer = b""
            while data := sock.recv(1 << 16):  # the answer, the server's own end of TLS, and then TCP's
                answer += data
            assert answer

    served(ours.node(), work)
