"""Plans and tensors that need more shared memory than there is.

What may live here: tests of `gcserver/runtime/room.py`. What may not: how a refusal reaches who asked
(`test_job_plans.py`), what happens where memory runs out all the same (`tests/integration/test_memory.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gcproto import wire
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.messages import PlanText, Rule
from gcproto.records import replace
from gcproto.wire import Flag
from gcserver.codecs import parse
from gcserver.codecs.tworounds import TwoRounds
from gcserver.core.events import Member, Retained
from gcserver.core.job import Job
from gcserver.runtime import room
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.resolve import resolve
from gcserver.runtime.room import no_room, no_space
from gcserver.runtime.states import matrix_use, state_use
from tests.unit.core.control_machine import LARGE, declared

TOPK = "topk(ratio=0.01)"


def a_job() -> Job:
    """One node, which owns all; a bias of 300 and a matrix of 90000 elements."""
    m, _ = declared(whole=False)
    (job,) = m.jobs.values()
    job.resolve = resolve
    return job


def short_of(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    def usage(path: Any) -> Any:
        return shutil._ntuple_diskusage(1 << 30, 1 << 30, free)  # type: ignore[attr-defined]

    monkeypatch.setattr("gcserver.runtime.room.shutil.disk_usage", usage)
    monkeypatch.setattr("gcserver.runtime.room.available", lambda: 1 << 50)


def among(job: Job, others: int) -> Job:
    """The same where so many other nodes take part: this one owns the larger block, the first other the smaller."""
    (domain,) = job.domains.values()
    more = tuple(Member(wire.node_id(name), name, 1) for name in "bcd"[:others])
    domain.config = replace(domain.config, members=(*domain.config.members, *more), origin=1 + others)
    return job


def seen_by(job: Job, me: int) -> Job:
    """The same as its member number ``me`` sees it."""
    (domain,) = job.domains.values()
    domain.config = replace(domain.config, me=me)
    return job


def refused(folder: Path, job: Job, *rules: Rule, controller: str = "") -> str:
    return no_room(folder, 1, job, PlanText(job.id, 1, 1, rules, controller))


def a_lane(folder: Path, job: Job) -> DomainMemory:
    (domain,) = job.domains.values()
    lane = DomainMemory(domain.config, 1, 0, folder / "jobs" / job.id.hex())
    for section in domain.sections:
        lane.open_section(section)
    return lane


def run(lane: DomainMemory, spec: str, everyone: bool = False, kept: bool = True) -> None:
    """Take what steps with a codec come to need: states, and the payloads that they retain in turn if ``kept``."""
    codec = parse(spec)
    for key, state in lane.blocks.items():
        for owner in (False, True):
            if isinstance(codec, TwoRounds):
                use = None if owner else matrix_use(codec, state)
            else:
                use = state_use(codec.at_owner() if owner else codec, state)
            if use is not None and not (owner and everyone):
                lane.state(key, 0, owner, use)
        for slot in (0, 1) if kept else ():
            if isinstance(codec, TwoRounds):
                size = codec.payload_bytes(slot, state.shapes)
            else:
                size = state.block.nbytes if spec == "none" else codec.needed(state.bounds, None)
            lane.make_kept(key, slot, size)


def test_a_plan_that_would_keep_more_than_is_free_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job()
    both = 2 * 2 * 4 * LARGE.elements  # two versions, of contributions and of what is averaged
    short_of(monkeypatch, both)
    assert refused(tmp_path, job, Rule("*", TOPK)).startswith("its codecs keep 3 MiB of shared memory more, and 1 MiB")
    # Each has a file of its own, of whole pages; the payloads that are retained share one.
    short_of(monkeypatch, both + 2 * 4096 + (1 << 20))
    assert refused(tmp_path, job, Rule("*", TOPK)) == ""


def test_a_plan_is_refused_whose_codec_fails_to_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes of a third party's, which resolving a plan does not ask about."""

    def state_floats(_: object, n: int, *more: object) -> int:
        return n if n <= 2 else 1 // 0

    monkeypatch.setattr(type(parse(TOPK)), "state_floats", state_floats)
    job = a_job()
    why = no_room(tmp_path, 1, job, PlanText(job.id, 1, 2, (Rule("*", TOPK),)))
    assert why.startswith("a codec of it fails to say how much it keeps: ZeroDivisionError: integer division")
    assert not no_room(tmp_path, 1, job, PlanText(job.id, 1, 2, (Rule("*", "fp16"),)))
    short_of(monkeypatch, 1 << 20)
    job.plans[1] = PlanText(job.id, 1, 1, (Rule("*", TOPK),))
    job.proposal = 1
    (domain,) = job.domains.values()
    assert not no_space(tmp_path, 1, job, domain, replace(domain.sections[0], index=1)), "the lane says what is wrong"
    assert "what ddp takes cannot be counted" in caplog.text


def test_what_keeps_nothing_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_of(monkeypatch, 0)
    for rule in (Rule("*", "none"), Rule("other", TOPK)):
        assert refused(tmp_path, a_job(), rule) == ""
        assert refused(tmp_path, among(a_job(), 1), rule) == ""
    for codec in ("fp16", "qsgd(bits=4)"):
        assert refused(tmp_path, seen_by(among(a_job(), 2), 2), Rule("*", codec)) == "", "owners keep the payloads"


@pytest.mark.parametrize(
    ("rule", "others", "need"),
    [
        (Rule("*", "fp16"), 0, 1 << 20),  # what is small shares a file
        (Rule("*", "fp16"), 1, 1 << 20),
        (Rule("*", "qsgd(bits=4)"), 1, 1 << 20),
        (Rule("*", "none", "all"), 0, 2 * (LARGE.nbytes // 4096 + 1) * 4096),
        (Rule("*", "none", "all"), 1, 2 * ((256 << 10) + 4096) + (1 << 20)),  # a block of 256 KiB, and a smaller one
        (Rule("*", "fp16", "all"), 1, 1 << 20),
    ],
)
def test_payloads_that_are_retained_are_counted(
    rule: Rule, others: int, need: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = among(a_job(), others)
    short_of(monkeypatch, 0)
    assert refused(tmp_path, job, rule).startswith(f"its codecs keep {-(-need >> 20)} MiB of shared memory more")
    short_of(monkeypatch, need - 1)
    assert refused(tmp_path, job, rule)
    short_of(monkeypatch, need)
    assert refused(tmp_path, job, rule) == ""
    lane = a_lane(tmp_path, job)
    run(lane, rule.spec, rule.scheme == "all")
    assert lane.heap.nbytes == need
    short_of(monkeypatch, 0)
    assert refused(tmp_path, job, rule) == "", "what is there is used again"


def test_what_goes_to_everyone_is_kept_by_who_does_not_own_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of(monkeypatch, 0)
    assert refused(tmp_path, seen_by(among(a_job(), 2), 2), Rule("*", "none", "all"))


def test_what_goes_to_everyone_has_no_states_of_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, rule = a_job(), Rule("*", TOPK, "all")
    need = (2 * 4 * LARGE.elements // 4096 + 1) * 4096 + (1 << 20)
    short_of(monkeypatch, need - 1)
    assert refused(tmp_path, job, rule)
    short_of(monkeypatch, need)
    assert refused(tmp_path, job, rule) == ""
    lane = a_lane(tmp_path, job)
    run(lane, TOPK, everyone=True)
    assert lane.heap.nbytes == need


def test_a_payload_that_outgrows_its_place_takes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least twice as large as the one before (`DomainMemory.make_kept`)."""
    job = a_job()
    lane = a_lane(tmp_path, job)
    run(lane, "fp16")
    before = lane.heap.nbytes
    # A little more than fp16's, for segments as they are here.
    codec = "topk(ratio=0.3)+ef(decay=0)"
    (state,) = lane.blocks.values()
    half = state.block.nbytes // 2
    assert half < parse(codec).needed(state.bounds, None) < 2 * half
    need = 2 * ((2 * half + 64) // 4096 + 1) * 4096
    short_of(monkeypatch, need - 1)
    assert refused(tmp_path, job, Rule("*", codec))
    short_of(monkeypatch, need)
    assert refused(tmp_path, job, Rule("*", codec)) == ""
    run(lane, codec)
    assert lane.heap.nbytes == before + need


def test_blocks_that_have_states_need_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_of(monkeypatch, 0)
    job = a_job()
    lane = a_lane(tmp_path, job)
    assert refused(tmp_path, job, Rule("*", TOPK))
    codec = resolve(TOPK)
    assert codec.feedback and codec.owner_feedback
    run(lane, TOPK, kept=False)
    assert "keep 1 MiB" in refused(tmp_path, job, Rule("*", TOPK)), "for the payloads"
    run(lane, TOPK)
    assert refused(tmp_path, job, Rule("*", TOPK)) == ""
    assert refused(tmp_path, job, Rule("*", "topk(ratio=0.001)")) == ""


def test_states_that_have_to_grow_are_counted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They move to another place, and the old one is not had back."""
    m, _ = declared(whole=True)
    (job,) = m.jobs.values()
    job.resolve = resolve
    lane = a_lane(tmp_path, job)
    run(lane, TOPK)
    run(lane, "fp16")  # places enough for payloads, as they may be from any plan before
    before = lane.heap.nbytes
    rule = Rule("*", "powersgd(rank=4)")
    short_of(monkeypatch, 2 * 4 * LARGE.elements)
    assert refused(tmp_path, job, rule).startswith("its codecs keep 1 MiB of shared memory more")
    # Besides the residual rank 4 keeps a row of Q for each of 300 columns.
    need = (2 * 4 * (LARGE.elements + 4 * 300) // 4096 + 1) * 4096
    short_of(monkeypatch, need - 1)
    assert refused(tmp_path, job, rule)
    short_of(monkeypatch, need)
    assert refused(tmp_path, job, rule) == ""
    run(lane, rule.spec)
    assert lane.heap.nbytes == before + need
    short_of(monkeypatch, 0)
    for spec in ("powersgd(rank=4)", "powersgd(rank=2)", TOPK, "fp16", "none"):
        assert refused(tmp_path, job, Rule("*", spec)) == ""


def test_both_payloads_of_two_exchanges_are_counted_each_with_its_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, _ = declared(whole=True)
    (job,) = m.jobs.values()
    job.resolve = resolve
    (domain,) = job.domains.values()
    # P is of 90000 x 4, Q of 40 x 4: below and above what has a file of its own.
    domain.sections = [Section(0, (TensorSpec("w", (90_000, 40), 0),))]
    lane = a_lane(tmp_path, job)
    rule = Rule("*", "powersgd(rank=4)")
    run(lane, rule.spec, kept=False)
    need = (4 * 4 * 90_000 // 4096 + 1) * 4096 + (1 << 20)
    short_of(monkeypatch, need - 1)
    assert refused(tmp_path, job, rule)
    short_of(monkeypatch, need)
    assert refused(tmp_path, job, rule) == ""
    run(lane, rule.spec)
    short_of(monkeypatch, 0)
    assert refused(tmp_path, job, rule) == ""


def test_after_two_exchanges_everyone_keeps_a_third_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that goes to everyone comes beside both aggregates of the round before (`Partition.free_slot`)."""
    m, _ = declared(whole=True)
    (job,) = m.jobs.values()
    job.resolve = resolve
    lane = a_lane(tmp_path, job)
    run(lane, "none")
    before = lane.heap.nbytes
    short_of(monkeypatch, 0)
    everyone = Rule("*", "none", "all")
    assert refused(tmp_path, job, everyone) == ""
    ((key, state),) = lane.blocks.items()
    for slot, flags in ((0, 0), (1, Flag.SECOND)):
        lane.commit_kept(key, slot, Retained(7, slot, None, 4, 0, 64, 4, int(flags), 0))
    need = (state.block.nbytes // 4096 + 1) * 4096
    short_of(monkeypatch, need - 1)
    assert refused(tmp_path, job, everyone)
    short_of(monkeypatch, need)
    assert refused(tmp_path, job, everyone) == ""
    lane.make_kept(key, 2, state.block.nbytes)
    assert lane.heap.nbytes == before + need
    short_of(monkeypatch, 0)
    assert refused(tmp_path, job, everyone) == ""


def test_levels_are_those_that_may_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last notch where nothing steers the job, else the one that takes most."""
    job = a_job()
    lane = a_lane(tmp_path, job)
    run(lane, TOPK)
    short_of(monkeypatch, 0)
    for levels, controller, fits in (
        ((10_000,), "", True),
        ((20_000,), "", False),
        ((20_000, 10_000), "none", True),
        ((20_000, 10_000), "dc2-da2", False),
    ):
        assert (refused(tmp_path, job, Rule("*", TOPK, "", levels), controller=controller) == "") == fits


def test_places_that_records_name_and_that_are_not_there_count_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of(monkeypatch, 0)
    job = a_job()
    lane = a_lane(tmp_path, job)
    run(lane, TOPK)
    (state,) = lane.blocks.values()
    for word in (1 << 63 | 5, (1 << 48) - 1, (1 << 64) - 1, 1 << 48 | (1 << 47)):
        for name in ("residual_at", "owner_at", "kept_at"):
            state.record[name] = word
        assert refused(tmp_path, job, Rule("*", TOPK)).startswith("its codecs keep 3 MiB")


def test_records_that_a_lane_was_ended_before_it_made_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_of(monkeypatch, 0)
    job = a_job()
    (domain,) = job.domains.values()
    folder = tmp_path / "jobs" / job.id.hex()
    DomainMemory(domain.config, 1, 0, folder).open_section(LARGE)
    (records,) = folder.glob("*.records0")
    for left in (b"", records.read_bytes()[:7]):
        records.write_bytes(left)
        assert refused(tmp_path, job, Rule("*", TOPK)).startswith("its codecs keep 3 MiB of shared memory more")


def test_tensors_that_do_not_fit_are_refused_with_all_they_would_come_to_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job()
    (domain,) = job.domains.values()
    job.plans[1] = PlanText(job.id, 1, 1, (Rule("*", TOPK),))
    for proposal, needed in ((0, 2 * LARGE.nbytes), (1, (2 + 2 * 2) * LARGE.nbytes)):
        job.proposal = proposal
        short_of(monkeypatch, needed - 1)
        why = no_space(tmp_path, 1, job, domain, LARGE)
        assert why.startswith("'b' shape [300] dtype F32 and 1 more of ddp would take")
        assert "of shared memory (353 KiB gradients of 1 local rank" in why and f"free in {tmp_path}" in why
        assert ("codec states" in why) == (proposal == 1)
        short_of(monkeypatch, 2 * needed + (2 << 20))
        assert no_space(tmp_path, 1, job, domain, LARGE) == ""


def test_what_surely_fits_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laying out a hundred thousand tensors takes seconds in which nobody else is served."""
    short_of(monkeypatch, 1 << 40)
    monkeypatch.setattr(room.memory, "of_domain", None)
    job = a_job()
    (domain,) = job.domains.values()
    assert no_space(tmp_path, 1, job, domain, LARGE) == ""


def test_after_a_loss_tensors_are_counted_as_they_will_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are cut for as many as the job began with, whoever is left of them."""
    job = a_job()
    (domain,) = job.domains.values()
    domain.config = replace(domain.config, origin=2, remaining=((0,),))
    cut: list[int] = []

    def count(laid: Any, *_: Any) -> list[Any]:
        cut.extend(len(x.blocks) for x in laid)
        return []

    monkeypatch.setattr(room.memory, "of_domain", count)
    short_of(monkeypatch, 0)
    large = Section(0, (TensorSpec("w", (3 << 20,), 0),))
    no_space(tmp_path, 1, job, domain, large)
    assert cut == [len(domain.config.space(1).append(large))] and cut != [
        len(AddressSpace(1, 1, 8 << 20).append(large))
    ]


def test_memory_behind_a_file_system_may_be_less_than_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable: 700 kB\nSwapFree: 100 kB\n")
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "CGROUP", tmp_path)
    assert room.available() == 800 << 10
    for name, text in {"max": "500000", "current": "450000", "stat": "anon 1\ninactive_file 30000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert room.available() == 80_000 == room.free_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert room.available() == 800 << 10
    (tmp_path / "meminfo").unlink()
    assert room.available() == 1 << 62, "where the system does not say, files are tried"


def test_many_small_states_share_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job()
    (domain,) = job.domains.values()
    many = Section(1, tuple(TensorSpec(f"t{i}", (20_000,), 0) for i in range(60)), tuple(range(1, 60)))
    domain.sections = [LARGE, many]
    states = 2 * 2 * (60 * 80_000 + 4 * LARGE.elements)
    short_of(monkeypatch, round(1.4 * states) + (1 << 20))
    assert refused(tmp_path, job, Rule("*", TOPK)) == ""
    short_of(monkeypatch, states)
    assert "of shared memory more" in refused(tmp_path, job, Rule("*", TOPK))
