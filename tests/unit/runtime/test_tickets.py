"""Tickets: bound to a job and a rank, the same in every process of a daemon, lost with the daemon's memory only."""

from __future__ import annotations

from pathlib import Path

from gcserver.runtime.tickets import Tickets

JOB = b"j" * 16


def test_a_ticket_is_for_one_job_and_rank(tmp_path: Path) -> None:
    tickets = Tickets(tmp_path)
    mine = tickets.ticket(JOB, 1)
    assert tickets.valid(JOB, 1, mine)
    for job, rank, shown in (
        (JOB, 2, mine), (b"k" * 16, 1, mine), (JOB, 1, mine[:-1]), (JOB, 1, b""), (JOB, 1, mine[::-1]),
    ):  # fmt: skip
        assert not tickets.valid(job, rank, shown)
    # where rank and job are written side by side
    assert tickets.ticket(b"1:x", 1) != tickets.ticket(b"x", 11)


def test_lanes_and_the_next_life_have_the_same_key(tmp_path: Path) -> None:
    mine = Tickets(tmp_path).ticket(JOB, 1)
    assert Tickets(tmp_path).valid(JOB, 1, mine)
    assert (tmp_path / "tickets.key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["tickets.key"]


def test_another_daemon_has_another_key(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert not Tickets(tmp_path / "b").valid(JOB, 1, Tickets(tmp_path / "a").ticket(JOB, 1))


def test_half_a_key_is_none(tmp_path: Path) -> None:
    """Of a file system that was full."""
    (tmp_path / "tickets.key").write_bytes(b"short")
    (tmp_path / "tickets.new").write_bytes(b"left over")
    mine = Tickets(tmp_path).ticket(JOB, 1)
    assert len((tmp_path / "tickets.key").read_bytes()) == 32 and Tickets(tmp_path).valid(JOB, 1, mine)
