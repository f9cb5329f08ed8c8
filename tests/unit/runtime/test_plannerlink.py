"""The planning process at the supervisor's end: answers, and every way in which there is none."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from gcserver.planner.auto import Wish
from gcserver.planner.auto_rules import PlannedRule
from gcserver.runtime.plannerlink import (
    CODECS,
    ERRORS,
    PARTS,
    PLANS,
    START,
    STUDIES,
    Advise,
    Plan,
    Planned,
    PlannerError,
    PlannerLink,
    Predict,
    Predicted,
)
from tests.unit.planner.live_profiles import MBIT100, costs, plain

PROFILE = plain([100_000, 900_000], [0.0, 0.05], bandwidth=MBIT100, codecs=costs(), forward=0.05)
PLAN = Plan(PROFILE, Wish("fast", buckets=()))
PREDICT = Predict(PROFILE, (PlannedRule("*", "fp16"),), ())


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())


async def pid_of(link: PlannerLink) -> int:
    """Of the process, once a question has started it."""
    while link.pid is None:
        await asyncio.sleep(0.01)
    return link.pid


async def refused(link: PlannerLink, words: str) -> None:
    """A question is not answered, and the process is not there any more."""
    with pytest.raises(PlannerError, match=words):
        await link.ask(PREDICT)
    assert link.pid is None
    await link.ended()


def says(program: str) -> PlannerLink:
    """A link to a process that does something else."""
    return PlannerLink(60.0, 60.0, (sys.executable, "-c", program))


def test_questions_are_answered_in_turn_refused_and_outlive_kills() -> None:
    async def test() -> None:
        link = PlannerLink()
        assert link.spent == dict.fromkeys(PARTS, 0.0)
        planned, predicted = await asyncio.gather(link.ask(PLAN), link.ask(PREDICT))
        began = dict(link.spent)
        assert all(began[part] > 0 for part in (START, PLANS, STUDIES)) and began[CODECS] == began[ERRORS] == 0
        assert isinstance(planned, Planned) and planned.proposal.expected < planned.proposal.dense
        assert isinstance(predicted, Predicted) and predicted.step.jobs
        first = await pid_of(link)
        # Under systemd the kernel spares the daemon, whose child this is.
        assert Path(f"/proc/{first}/oom_score_adj").read_text().strip() == "500"
        with pytest.raises(PlannerError, match="cruel"):
            await link.ask(Advise(PROFILE, (1e6,), "cruel"))
        assert link.pid == first, "a refusal is an answer"
        os.kill(first, signal.SIGSTOP)
        asked = asyncio.ensure_future(link.ask(PLAN))
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(PlannerError, match="failed at Plan"):
            await asked
        assert await link.ask(PLAN) == planned
        assert await pid_of(link) != first
        assert link.spent[START] > began[START], "of the second one as well"
        await link.ended()
        await link.ended()
        assert link.pid is None

    run(test)


def test_garbage_is_no_answer() -> None:
    async def test() -> None:
        write = "import sys; sys.stdin.buffer.read(4); sys.stdout.buffer.write({!r}); sys.stdout.flush()"
        await refused(says(write.format(b"\x05\0\0\0hello")), "failed at Predict")
        await refused(says(write.format(b"\x10\0\0\0\x81\xa6answer\x81\xa4type\xa1\xff")), "failed at Predict: 'utf-8'")
        await refused(says(write.format(b"\xff\xff\xff\xffhello")), "4294967295 bytes")
        await refused(says(write.format(b"\x05\0")), "failed at Predict")
        await refused(says("raise SystemExit(3)"), "failed at Predict")

    run(test)


def test_a_question_that_cannot_be_written_ends_nothing() -> None:
    async def test() -> None:
        link = PlannerLink()
        await link.ask(PREDICT)
        pid = link.pid
        endless = msgspec.structs.replace(PROFILE.link, samples=1 << 80)
        with pytest.raises(PlannerError, match="Predict cannot be written"):
            await link.ask(Predict(msgspec.structs.replace(PROFILE, link=endless), (), ()))
        assert isinstance(await link.ask(PREDICT), Predicted) and link.pid == pid
        await link.ended()

    run(test)


def test_no_process_is_no_answer() -> None:
    async def test() -> None:
        await refused(PlannerLink(command=("/nonexistent",)), "failed at Predict")

    run(test)


def test_patience_ends_and_so_does_the_process() -> None:
    async def test() -> None:
        link = PlannerLink(0.2, 60.0, (sys.executable, "-c", "import time; time.sleep(600)"))
        asked = asyncio.ensure_future(link.ask(PREDICT))
        pid = await pid_of(link)
        with pytest.raises(PlannerError, match=r"no answer to Predict within 0\.2 s: .*gcserver warmup"):
            await asked
        await link.ended()
        assert not os.path.exists(f"/proc/{pid}")

    run(test)


def test_who_stops_asking_ends_the_process() -> None:
    async def test() -> None:
        link = says("import time; time.sleep(600)")
        asked, waits = (asyncio.ensure_future(link.ask(PREDICT)) for _ in range(2))
        pid = await pid_of(link)
        waits.cancel()
        await asyncio.sleep(0)
        assert link.pid == pid, "the one whose turn it was not"
        asked.cancel()
        await asyncio.wait({asked, waits})
        assert asked.cancelled() and waits.cancelled()
        await link.ended()
        assert not os.path.exists(f"/proc/{pid}")

    run(test)


def test_an_idle_process_is_ended() -> None:
    async def test() -> None:
        echo = "import sys; r = sys.stdin.buffer.read; w = sys.stdout.buffer\nwhile h := r(4):\n " \
               "r(int.from_bytes(h, 'little')); w.write({!r}); w.flush()"  # fmt: skip
        content = b"\x82\xa6answer\x82\xa4type\xa7refused\xa3why\xa2no\xa5spent\x80"
        link = PlannerLink(60.0, 0.05, (sys.executable, "-c", echo.format(bytes([len(content), 0, 0, 0]) + content)))
        for _ in range(2):
            with pytest.raises(PlannerError, match=r"^no$"):
                await link.ask(PREDICT)
        while link.pid is not None:
            await asyncio.sleep(0.01)
        await link.ended()

    run(test)
