"""Who is let in, from a daemon's configuration: files that cannot be used stop it, their later troubles are counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcserver.admin.access import Access
from gcserver.config import AdminConfig
from gcserver.runtime.access import access
from gcserver.runtime.status import Status
from tests.unit.admin.credentials import Folder


def supervisor(files: tuple[Path, Path, Path] | None, audit: Path | None = None, admin: str = "127.0.0.1:7460") -> Any:
    """As much of one as asks and counts."""
    made = SimpleNamespace(
        config=SimpleNamespace(admin=AdminConfig(*(files or (None,) * 3), audit), node=SimpleNamespace(admin=admin)),
        counts={}, lanes=SimpleNamespace(table=[]),
    )  # fmt: skip

    def count(name: str, peer: int = 0, value: int = 1) -> None:
        made.counts[name, peer] = made.counts.get((name, peer), 0) + value

    made.count = count
    return made


def test_nothing_configured_lets_everybody_in() -> None:
    found = access(supervisor(None))
    assert (found.certificates, found.audit) == (None, None)


def test_files_that_cannot_be_used_stop_the_daemon(tmp_path: Path) -> None:
    made = Folder(tmp_path).node()
    with pytest.raises(OSError, match=r"none\.pem cannot be read"):
        access(supervisor((made.ca, tmp_path / "none.pem", made.key)))
    with pytest.raises(OSError, match=r"admin\.audit_log: .* cannot be opened"):
        access(supervisor(None, tmp_path / "no" / "log"))
    assert access(supervisor(None, tmp_path / "no" / "log", admin="")).audit is None, "nobody could change anything"


def test_troubles_are_counted_in_the_daemons_own_loop(tmp_path: Path) -> None:
    made = Folder(tmp_path).node()

    async def work() -> dict[tuple[str, int], int]:
        s = supervisor((made.ca, made.certificate, made.key), tmp_path / "audit")
        s.loop = asyncio.get_running_loop()
        found = access(s)
        assert found.certificates is not None and found.audit is not None
        made.key.write_text("rubbish")
        await asyncio.to_thread(found.certificates.current)
        (tmp_path / "audit").unlink()
        (tmp_path / "audit").mkdir()
        await found.audit.append({"who": "alice"})
        await found.audit.close()
        found.count("admin_denied")
        return dict(s.counts)

    assert asyncio.run(work()) == {("certificates_unusable", 0): 1, ("audit_log_lost", 0): 1, ("admin_denied", 0): 1}


def test_what_the_service_has_not_counted_yet_is_in_the_counts() -> None:
    s = supervisor(None)
    status = Status(s)
    assert status.errors() == {}
    status._service = SimpleNamespace(settle=lambda: Access(count=s.count).count("admin_handshake_failed"))
    assert status.errors() == {"admin_handshake_failed": 1}
    assert status.errors_by_source() == [("supervisor", "admin_handshake_failed", 2)]
