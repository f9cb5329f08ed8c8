"""`gcserver pki`: what its certificates hold, its files and their modes, and what it refuses."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from gcserver import cli, pki
from gcserver.admin.certificates import identity, signed_by


def purposes(certificate: x509.Certificate) -> list[x509.ObjectIdentifier]:
    return list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def alternatives(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def handshake(server: pki.Pair, client: pki.Pair, ca: pki.Pair, folder: Path) -> str:
    """OpenSSL's opinion, with its strictest checks: "" or why the two cannot talk."""
    sides = []
    for side, pair, protocol in (("s", server, ssl.PROTOCOL_TLS_SERVER), ("c", client, ssl.PROTOCOL_TLS_CLIENT)):
        (folder / side).write_bytes(pair.certificate_pem + pair.key_pem)
        context = ssl.SSLContext(protocol)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(folder / side)
        context.load_verify_locations(cadata=ca.certificate_pem.decode())
        sides.append(context)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    both = [
        sides[0].wrap_bio(to_server, to_client, server_side=True),
        sides[1].wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
    ]
    try:
        for _ in range(6):
            for side in both:
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    pass
    except ssl.SSLError as error:
        return str(error)
    assert both[0].getpeercert(True) is not None, "the handshake is over"
    return ""


def test_what_certificates_hold(tmp_path: Path) -> None:
    ca = pki.authority("lab", 10)
    node = pki.node(ca, "a", ["a.lab", "10.0.0.1", "::1", "a.lab"], 5)
    viewer, operator = pki.operator(ca, "prometheus", "viewer", 5), pki.operator(ca, "alice", "operator", 5)
    assert ca.certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert identity(ca.certificate).role is None
    assert alternatives(node.certificate).get_values_for_type(x509.DNSName) == ["a.lab"]
    assert alternatives(node.certificate).get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("10.0.0.1"), ipaddress.ip_address("::1"),
    ]  # fmt: skip
    assert purposes(node.certificate) == [ExtendedKeyUsageOID.SERVER_AUTH]
    for pair, name, role in ((viewer, "prometheus", "viewer"), (operator, "alice", "operator")):
        uris = alternatives(pair.certificate).get_values_for_type(x509.UniformResourceIdentifier)
        assert uris == [f"urn:gradcomm:role:{role}"]
        assert purposes(pair.certificate) == [ExtendedKeyUsageOID.CLIENT_AUTH]
        who = identity(pair.certificate)
        assert (who.name, who.role, who.until) == (name, role, pair.certificate.not_valid_after_utc)
        assert signed_by([pair.certificate], [ca.certificate])
    assert len({pair.certificate.serial_number for pair in (ca, node, viewer, operator)}) == 4


def test_openssl_agrees(tmp_path: Path) -> None:
    ca, other = pki.authority("lab", 10), pki.authority("lab", 10)
    node = pki.node(ca, "a", ["127.0.0.1"], 5)
    alice = pki.operator(ca, "alice", "operator", 5)
    assert handshake(node, alice, ca, tmp_path) == ""
    assert "certificate verify failed" in handshake(node, pki.operator(other, "alice", "operator", 5), ca, tmp_path)
    assert "certificate verify failed" in handshake(node, node, ca, tmp_path), "a node is no operator"
    assert "certificate verify failed" in handshake(alice, alice, ca, tmp_path), "an operator is no node"
    assert "mismatch" in handshake(pki.node(ca, "a", ["10.0.0.1"], 5), alice, ca, tmp_path)


def test_a_certificate_ends_with_its_ca() -> None:
    made = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
    ca = pki.authority("lab", 10, made)
    pair = pki.operator(ca, "alice", "viewer", 365, made + dt.timedelta(days=4))
    assert pair.certificate.not_valid_after_utc == ca.certificate.not_valid_after_utc == made + dt.timedelta(days=10)
    assert pair.certificate.not_valid_before_utc == made + dt.timedelta(days=4, hours=-1), "clocks differ"
    with pytest.raises(pki.PkiError, match=r"held until 2026-03-11; make a new CA"):
        pki.node(ca, "a", ["a"], 5, made + dt.timedelta(days=10))


@pytest.mark.parametrize("name", ["", "../up", "a/b", "x" * 65, "-a", "a b"])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    ca = pki.authority("lab", 10)
    with pytest.raises(pki.PkiError, match="letters, digits"):
        pki.operator(ca, name, "viewer", 5)
    with pytest.raises(pki.PkiError, match="letters, digits"):
        pki.node(ca, name, ["a"], 5)


def test_hosts_and_days_that_cannot_be() -> None:
    ca = pki.authority("lab", 10)
    with pytest.raises(pki.PkiError, match="at least one host"):
        pki.node(ca, "a", [], 5)
    with pytest.raises(pki.PkiError, match="without a port; got 'a:7460'"):
        pki.node(ca, "a", ["a:7460"], 5)
    with pytest.raises(pki.PkiError, match="more than 0 and at most 36500, got 0"):
        pki.authority("lab", 0)
    with pytest.raises(pki.PkiError, match="one of viewer, operator, got 'root'"):
        pki.operator(ca, "a", "root", 5)  # type: ignore[arg-type]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["pki", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_three_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pki"
    where = ("--dir", str(folder))
    for command, files in [
        (["init", str(folder), "--days", "100"], ("ca.pem", "ca.key")),
        (["node", "gpu_1", "--host", "10.0.0.1", "--days", "50", *where], ("node-gpu_1.pem", "node-gpu_1.key")),
        (["operator", "alice", "--role", "viewer", *where], ("operator-alice.pem", "operator-alice.key")),
    ]:
        status, out, err = run(capsys, *command)
        assert (status, err) == (0, "") and all(str(folder / name) in out for name in files)
        assert (folder / files[0]).stat().st_mode & 0o777 == 0o644
        assert (folder / files[1]).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == [
        "ca.key", "ca.pem", "node-gpu_1.key", "node-gpu_1.pem", "operator-alice.key", "operator-alice.pem",
    ]  # fmt: skip
    node = x509.load_pem_x509_certificate((folder / "node-gpu_1.pem").read_bytes())
    assert alternatives(node).get_values_for_type(x509.DNSName) == ["gpu_1", "localhost"]
    addresses = {str(address) for address in alternatives(node).get_values_for_type(x509.IPAddress)}
    assert addresses == {"10.0.0.1", "127.0.0.1", "::1"}
    left = node.not_valid_after_utc - dt.datetime.now(dt.UTC)
    assert dt.timedelta(days=49) < left <= dt.timedelta(days=50)


def test_nothing_is_overwritten_unless_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--dir", str(tmp_path))
    run(capsys, "init", str(tmp_path))
    run(capsys, "operator", "alice", "--role", "viewer", *where)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for command in (["init", str(tmp_path)], ["operator", "alice", "--role", "operator", *where]):
        status, out, err = run(capsys, *command)
        assert (status, out) == (1, "") and "is there already; --force" in err
    (tmp_path / "operator-alice.pem").unlink()
    status, _, err = run(capsys, "operator", "alice", "--role", "viewer", *where)
    assert status == 1 and "operator-alice.key is there already" in err, "a key alone is not lost either"
    (tmp_path / "operator-alice.pem").write_bytes(before[tmp_path / "operator-alice.pem"])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert run(capsys, "operator", "alice", "--role", "operator", "--force", *where)[0] == 0
    changed = {path.name for path, held in before.items() if path.read_bytes() != held}
    assert changed == {"operator-alice.pem", "operator-alice.key"}
    assert (tmp_path / "operator-alice.key").stat().st_mode & 0o777 == 0o600


def test_a_folder_without_a_ca_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "node", "a", "--dir", str(tmp_path))
    assert status == 1 and f"gcserver pki init {tmp_path}" in err and err.count("\n") == 1
    run(capsys, "init", str(tmp_path))
    other = pki.authority("other", 5)
    (tmp_path / "ca.key").write_bytes(other.key_pem)
    status, _, err = run(capsys, "node", "a", "--dir", str(tmp_path))
    assert status == 1 and "ca.key is not the key of" in err
    (tmp_path / "ca.key").write_text("nonsense")
    status, _, err = run(capsys, "node", "a", "--dir", str(tmp_path))
    assert status == 1 and "cannot be read" in err
