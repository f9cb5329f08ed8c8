"""Reading certificates: what cannot be used is named, what changes is read anew, what is broken changes nothing."""

from __future__ import annotations

import base64
import datetime as dt
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from gcserver import pki
from gcserver.admin.access import Paths
from gcserver.admin.certificates import CertificateError, Certificates, hosts, identity, load, shown, signed_by
from tests.unit.admin.credentials import LONG_AGO, Folder


@pytest.fixture
def ours(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "pki")


def refusal(paths: Paths) -> str:
    with pytest.raises(CertificateError) as caught:
        load(paths)
    return str(caught.value)


def changed(der: bytes, found: str, other: str) -> bytes:
    """With the only ``found`` replaced, both in hex."""
    assert der.count(bytes.fromhex(found)) == 1
    return der.replace(bytes.fromhex(found), bytes.fromhex(other))


def pem(what: str, der: bytes) -> bytes:
    return f"-----BEGIN {what}-----\n{base64.encodebytes(der).decode()}-----END {what}-----\n".encode()


def test_what_is_there(ours: Folder) -> None:
    found = load(ours.node())
    assert identity(found.certificate).name == "a" and [identity(c).name for c in found.ca] == ["ours"]
    assert hosts(found.certificate) == ["localhost", "127.0.0.1", "::1"]
    assert found.key_pem.startswith(b"-----BEGIN PRIVATE KEY")


def test_what_cannot_be_used_is_named(ours: Folder, tmp_path: Path) -> None:
    good, other = ours.node(), Folder(tmp_path / "other").node("b")
    missing = tmp_path / "missing.pem"
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_bytes(b"\xff\0 nonsense")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # nobody writes to it: opening it would wait
    long = tmp_path / "long.pem"
    long.write_bytes(b"#" * ((1 << 20) + 1))
    assert refusal(Paths(missing, good.certificate, good.key)) == f"{missing} cannot be read: No such file or directory"
    assert "holds no certificate in PEM form" in refusal(Paths(rubbish, good.certificate, good.key))
    assert "holds no certificate in PEM form" in refusal(Paths(good.ca, rubbish, good.key))
    assert "holds no private key in PEM form" in refusal(Paths(good.ca, good.certificate, rubbish))
    assert f"{pipe} is no regular file" in refusal(Paths(good.ca, good.certificate, pipe))
    assert "has more than 1048576 bytes" in refusal(Paths(long, good.certificate, good.key))
    assert f"{other.key} is not the key of {good.certificate}" in refusal(Paths(good.ca, good.certificate, other.key))
    said = refusal(Paths(good.ca, other.certificate, other.key))
    assert f"('b') is not signed by the CA in {good.ca}" in said
    alice = ours.operator("alice", "operator")
    assert "is no server's certificate; `gcserver pki node`" in refusal(alice)
    old = ours.node("old", 5, LONG_AGO)
    assert "('old') expired on " in refusal(old) and "gcserver pki" in refusal(old)
    early = ours.node("early", 5, dt.datetime.now(dt.UTC) + dt.timedelta(days=2))
    assert "holds from " in refusal(early) and "clock" in refusal(early)


def test_what_the_library_refuses_in_its_own_way_is_a_refusal_like_any_other(ours: Folder, tmp_path: Path) -> None:
    good = ours.node()
    der = load(good).certificate.public_bytes(serialization.Encoding.DER)
    fourth = tmp_path / "fourth.pem"
    fourth.write_bytes(pem("CERTIFICATE", changed(der, "a003020102", "a003020103")))  # a version there is not
    unknown = tmp_path / "unknown.pem"
    unknown.write_bytes(pem("CERTIFICATE", changed(der, "2a8648ce3d0201", "2a8648ce3d0271")))  # ecPublicKey, no longer
    key = serialization.load_pem_private_key(good.key.read_bytes(), None)
    form = serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    strange = tmp_path / "strange.key"
    strange.write_bytes(pem("PRIVATE KEY", changed(key.private_bytes(*form), "2a8648ce3d0201", "2a8648ce3d0271")))
    assert "holds no certificate in PEM form" in refusal(Paths(good.ca, fourth, good.key))
    assert "holds no certificate in PEM form" in refusal(Paths(fourth, good.certificate, good.key))
    assert f"{unknown} holds a key of no known kind" in refusal(Paths(good.ca, unknown, good.key))
    assert "holds no private key in PEM form" in refusal(Paths(good.ca, good.certificate, strange))
    assert shown(changed(der, "a003020102", "a003020103")).role is None


def test_words_beside_certificates_may_be_in_any_language(ours: Folder, tmp_path: Path) -> None:
    good, words = ours.node(), tmp_path / "words.pem"
    words.write_bytes("# Ročně obnovit\n".encode() + good.ca.read_bytes() + b"\xff\n")
    (ca,) = load(Paths(words, good.certificate, good.key)).tls.get_ca_certs()
    assert ca["subject"] == ((("commonName", "ours"),),)


def test_a_certificate_that_says_nothing_has_no_role(ours: Folder) -> None:
    who = identity(ours.ca.certificate)
    assert (who.name, who.role) == ("ours", None)
    pair = pki.operator(ours.ca, "alice", "operator", 5)
    der = pair.certificate.public_bytes(serialization.Encoding.DER)
    assert shown(der) == shown(pair.certificate_pem) == identity(pair.certificate)
    for rubbish in (b"", b"rubbish", der[:-1], pair.certificate_pem[:100]):
        assert (shown(rubbish).name, shown(rubbish).role) == ("", None)


def test_a_chain_leads_to_a_ca(ours: Folder, tmp_path: Path) -> None:
    ca, other = ours.ca.certificate, Folder(tmp_path / "other").ca
    node = pki.node(ours.ca, "a", ["a"], 5).certificate
    assert signed_by([node], [other.certificate, ca])
    assert not signed_by([node], [other.certificate])
    assert not signed_by([node, ca], [other.certificate])
    assert signed_by([node, ca], [ca]), "the CA may be sent along"


class Watched:
    """Certificates, and how often they could not be used."""

    def __init__(self, paths: Paths) -> None:
        self.unusable = 0
        self.certificates = Certificates(paths, self._count)

    def _count(self) -> None:
        self.unusable += 1

    def name(self) -> str:
        return identity(self.certificates.current().certificate).name


def test_a_renewal_is_seen_when_it_is_whole(ours: Folder) -> None:
    paths = ours.node("a")
    watched = Watched(paths)
    first = watched.certificates.current()
    assert watched.certificates.current() is first, "nothing is read while nothing changes"
    renewed = pki.node(ours.ca, "renewed", ["a"], 5)
    paths.key.write_bytes(renewed.key_pem)
    assert (watched.name(), watched.name(), watched.unusable) == ("a", "a", 1)
    paths.certificate.write_bytes(renewed.certificate_pem[:100])
    assert (watched.name(), watched.unusable) == ("a", 2)
    paths.certificate.unlink()
    assert (watched.name(), watched.unusable) == ("a", 3)
    paths.certificate.write_bytes(renewed.certificate_pem)
    assert (watched.name(), watched.unusable) == ("renewed", 3)
    assert watched.certificates.current() is not first


def test_an_expired_one_does_not_take_the_place_of_a_good_one(ours: Folder) -> None:
    paths = ours.node("a")
    watched = Watched(paths)
    old = pki.node(ours.ca, "old", ["a"], 5, LONG_AGO)
    paths.key.write_bytes(old.key_pem)
    paths.certificate.write_bytes(old.certificate_pem)
    assert (watched.name(), watched.unusable) == ("a", 1)


def test_a_link_that_is_turned_is_a_renewal(ours: Folder, tmp_path: Path) -> None:
    """As Kubernetes renews what is mounted from a secret."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made = ours.node(name)
        for file, path in (("cert", made.certificate), ("key", made.key)):
            (tmp_path / name / file).write_bytes(path.read_bytes())
    link = tmp_path / "now"
    link.symlink_to("one")
    watched = Watched(Paths(ours.ca_file, link / "cert", link / "key"))
    assert watched.name() == "one"
    (tmp_path / "next").symlink_to("two")
    os.replace(tmp_path / "next", link)
    assert (watched.name(), watched.unusable) == ("two", 0)
