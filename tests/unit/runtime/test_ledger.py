"""What a supervisor finds again after it died.

What may live here: tests of `gcserver/runtime/ledger.py`. What may not: taking a job up again (`core/test_job.py`).
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gcserver.runtime.ledger import RESERVE, JobStore, Ledger
from gcserver.runtime.statefiles import MemoryDamaged
from tests.unit.core.control_machine import formed


def damages(whole: bytes) -> list[bytes]:
    """What a file may have become."""
    assert b"train" in whole
    return [b"", b"\xc1", b"\x80", whole[:-1], whole.replace(b"train", b"\xffrain")]


@pytest.mark.parametrize("which", range(5))
def test_a_job_whose_memory_cannot_be_read_is_dropped_and_the_others_are_served(tmp_path: Path, which: int) -> None:
    store = JobStore(tmp_path)
    (job,) = formed().jobs.values()
    memory = job.save().memory
    for number in (b"j" * 16, b"k" * 16):
        store.save(number, memory)
    file = store.directory(b"k" * 16) / "job.msgpack"
    file.write_bytes(damages(file.read_bytes())[which])
    assert [found for found, _ in store.load()] == [memory]
    assert not file.parent.exists()


def test_what_a_node_is_ready_for_may_be_taken_back_by_an_epoch(tmp_path: Path) -> None:
    JobStore(tmp_path).directory(b"j" * 16).mkdir(parents=True)
    ledger = JobStore(tmp_path).ledger((b"j" * 16, 0))
    ledger.make_ready(7)
    ledger.settle(5, False, 0, 2)
    assert (ledger.read().ready, ledger.read().settled) == (7, 5)
    ledger.make_ready(5)
    assert JobStore(tmp_path).ledger((b"j" * 16, 0)).read().ready == 5


def full(monkeypatch: pytest.MonkeyPatch, writes: list[str], free: int) -> None:
    """Only ``free`` more files can be written; removing the reserve makes room for one."""
    left = [free]
    write, unlink = Path.write_bytes, Path.unlink

    def write_bytes(self: Path, content: bytes) -> int:
        writes.append(self.name)
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        return write(self, content)

    def unlinked(self: Path, missing_ok: bool = False) -> None:
        left[0] += self.name == "reserve" and self.exists()
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    monkeypatch.setattr(Path, "unlink", unlinked)


def test_a_running_jobs_file_is_written_with_what_was_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(tmp_path)
    store.keep_reserve()
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= RESERVE
    (job,) = formed().jobs.values()
    memory = job.save().memory
    writes: list[str] = []
    full(monkeypatch, writes, free=0)
    store.save(job.id, memory)
    assert writes == ["job.new", "job.new"] and not (tmp_path / "reserve").exists()
    assert [found for found, _ in store.load()] == [memory]
    with pytest.raises(OSError, match="No space left"):
        store.save(job.id, memory)
    assert [found for found, _ in store.load()] == [memory], "the one before it is still there"
    assert not list(tmp_path.glob("jobs/*/*.new"))
    store.forget(job.id)
    assert (tmp_path / "reserve").exists(), "held back again once there is room"


def test_planning_does_not_take_what_is_held_back_for_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(tmp_path)
    store.keep_reserve()
    (job,) = formed().jobs.values()
    store.save(job.id, job.save().memory)
    full(monkeypatch, [], free=0)
    with pytest.raises(OSError, match="No space left"):
        store.save_planning(job.id, b"x" * (2 * RESERVE))
    assert (tmp_path / "reserve").exists() and not store.planning(job.id)
    store.save_steering(job.id, b"steered")
    assert store.steering(job.id) == b"steered"


def test_what_is_held_back_is_held_back_again_where_it_does_not_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(tmp_path)
    store.keep_reserve()
    (job,) = formed().jobs.values()
    store.save(job.id, job.save().memory)

    def replaced(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("gcserver.runtime.ledger.replace_file", replaced)
        with pytest.raises(OSError, match="No space left"):
            store.save_steering(job.id, b"x" * (2 * RESERVE))
    assert (tmp_path / "reserve").exists()


def test_a_job_under_another_ones_number_is_dropped(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    (job,) = formed().jobs.values()
    store.save(b"x" * 16, job.save().memory)
    assert store.load() == []
    assert not store.directory(b"x" * 16).exists()


@pytest.mark.parametrize("field", ["void_count", "switch_count"])
def test_a_ledger_that_counts_what_no_job_has_is_damaged_and_its_job_dropped(
    tmp_path: Path, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = JobStore(tmp_path)
    (job,) = formed().jobs.values()
    store.save(job.id, job.save().memory)
    ledger: Ledger = store.ledger((job.id, 0))
    ledger._data[field] = 2**64 - 1
    with pytest.raises(MemoryDamaged):
        ledger.read()
    assert JobStore(tmp_path).load() == []
    assert "dropped" in caplog.text and "void steps" in caplog.text and not store.directory(job.id).exists()


def test_who_comes_in_finds_what_is_settled_and_nothing_of_an_earlier_time(tmp_path: Path) -> None:
    store, domain = JobStore(tmp_path), (b"j" * 16, 0)
    folder = store.directory(domain[0])
    folder.mkdir(parents=True)
    before = store.ledger(domain)
    before.settle(1, True, 3, 2)
    for left in ("00000000.0.steps", "00000000.1.chunk0", "00000001.0.steps"):
        (folder / left).touch()
    store.take_up(domain, 40, ((0, 0), (41, 3), (42, 7)))
    found = JobStore(tmp_path).ledger(domain).read()
    assert (found.settled, found.ready, found.voids, found.switches) == (40, 40, (), ((0, 0), (41, 3), (42, 7)))
    assert sorted(p.name for p in folder.iterdir()) == ["00000000.ledger", "00000001.0.steps"]
    store.ledger(domain).settle(41, False, 7, 2)
    assert JobStore(tmp_path).ledger(domain).read().switches == ((41, 3), (42, 7))
