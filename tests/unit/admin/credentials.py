"""Certificates for tests, as `gcserver pki` makes them, in files as a daemon and gcctl read them.

What may live here: a CA with a node and operators, in a folder. What may not: servers.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from gcserver import pki
from gcserver.admin.access import Paths
from gcserver.admin.roles import Role
from gcserver.pki import Pair

HOSTS = ["localhost", "127.0.0.1", "::1"]
LONG_AGO = dt.datetime.now(dt.UTC) - dt.timedelta(days=400)


class Folder:
    """A CA in ``folder``, and what it makes, each as NAME.pem and NAME.key."""

    def __init__(self, folder: Path, name: str = "ours") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = pki.authority(name, 1000, LONG_AGO)
        self.ca_file = folder / "ca.pem"
        self.ca_file.write_bytes(self.ca.certificate_pem)

    def put(self, name: str, pair: Pair) -> tuple[Path, Path]:
        """(certificate, key) in files."""
        files = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        files[0].write_bytes(pair.certificate_pem)
        files[1].write_bytes(pair.key_pem)
        files[1].chmod(0o600)
        return files

    def node(self, name: str = "a", days: float = 30, now: dt.datetime | None = None) -> Paths:
        return Paths(self.ca_file, *self.put(f"node-{name}", pki.node(self.ca, name, HOSTS, days, now)))

    def operator(self, name: str, role: Role, days: float = 30, now: dt.datetime | None = None) -> Paths:
        return Paths(self.ca_file, *self.put(name, pki.operator(self.ca, name, role, days, now)))

    def expired(self, name: str = "old", role: Role = "operator") -> Paths:
        return self.operator(name, role, 5, LONG_AGO)
