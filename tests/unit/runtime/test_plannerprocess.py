"""What the planning process answers, and that it goes on after what it cannot do."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gcserver.logsetup import JSON, Voice
from gcserver.planner import families
from gcserver.planner.advice import advise
from gcserver.planner.auto import Wish, compose
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.profile import CodecCost, LevelErrors
from gcserver.runtime import calibration, plannerprocess
from gcserver.runtime.peek import PeekError, Watched
from gcserver.runtime.plannerlink import (
    CODECS,
    ERRORS,
    LENGTH,
    MAX_MESSAGE,
    PLANS,
    START,
    STUDIES,
    Advise,
    Advised,
    Measure,
    Measured,
    Plan,
    Planned,
    Predict,
    Predicted,
    Refused,
    Reply,
    Request,
)
from gcserver.runtime.plannerprocess import Laps, answer, reply, serve
from tests.unit.core.control_machine import declared
from tests.unit.planner.live_profiles import MBIT100, costs, plain

PROFILE = plain([100_000, 900_000], [0.0, 0.05], bandwidth=MBIT100, codecs=costs(), forward=0.05)
WISH = Wish("fast", buckets=())
LOSSES = {"topk": (LevelErrors("t0", (1000,), (0.1,), (800.0,)),)}


def watched(folder: Path) -> Watched:
    (job,) = declared(whole=False)[0].jobs.values()
    (domain,) = job.domains.values()
    return Watched(str(folder), 1, domain.config, tuple(domain.sections))


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the calibration, which takes seconds."""
    calls: list[Any] = []

    def fake(specs: tuple[str, ...], directory: Path | None) -> dict[str, CodecCost]:
        calls.append((specs, directory))
        return dict.fromkeys(specs, costs()["none"])

    monkeypatch.setattr(calibration, "costs", fake)
    return calls


def test_plans_predictions_and_advice() -> None:
    proposal = compose(PROFILE, WISH)
    assert answer(Plan(PROFILE, WISH), Laps()) == Planned(proposal)
    predicted = answer(Predict(PROFILE, (PlannedRule("*", "none"),), ()), Laps())
    assert isinstance(predicted, Predicted) and predicted.step.seconds > proposal.expected
    assert answer(Advise(PROFILE, (1e6,), "fast"), Laps()) == Advised(advise(PROFILE, (1e6,), "fast"))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Plan(PROFILE, Wish("cruel")), "cruel"),
        (Predict(PROFILE, (PlannedRule("*", "qsgd(bits=5)"),), ()), "qsgd"),
        (Predict(msgspec.structs.replace(PROFILE, nodes=0), (), ()), "nodes"),
        (Advise(PROFILE, (0.0,), "fast"), "bandwidths"),
    ],
)
def test_what_cannot_be_done_is_refused(request_: Request, words: str) -> None:
    found = answer(request_, Laps())
    assert isinstance(found, Refused) and words in found.why


def test_codecs_are_measured_into_the_folder(calibrated: list[Any], tmp_path: Path) -> None:
    asked = Measure(PROFILE, Wish("safe", family="onebit"), watched(tmp_path), str(tmp_path), errors=False)
    found = answer(asked, Laps())
    specs = (families.DENSE, *families.ladder("safe"), "onebit")
    assert isinstance(found, Measured) and found.errors is None
    assert set(found.codecs) == set(specs)
    assert calibrated == [(tuple(dict.fromkeys(specs)), tmp_path)]


def test_without_a_folder_the_profile_remembers(calibrated: list[Any], tmp_path: Path) -> None:
    profile = msgspec.structs.replace(PROFILE, codecs={"fp16": costs()["fp16"], "topk(ratio=0.4)": costs()["none"]})
    found = answer(Measure(profile, Wish("safe"), watched(tmp_path), "", errors=False), Laps())
    assert isinstance(found, Measured)
    assert found.codecs["fp16"] == costs()["fp16"] and set(found.codecs) == {families.DENSE, *families.ladder("safe")}
    ((specs, directory),) = calibrated
    assert directory is None and "fp16" not in specs


@pytest.mark.parametrize(("tensors", "looks"), [(3, 1), (2, plannerprocess.SAMPLES)])
def test_gradients_are_looked_at(
    calibrated: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: int, looks: int
) -> None:
    gone = answer(Measure(PROFILE, WISH, watched(tmp_path), "", errors=True), Laps())
    assert isinstance(gone, Refused) and gone.why.startswith("JobGone")
    sampled: list[float] = []

    class Tables:
        def __init__(self, peek: Any, later: set[str]) -> None:
            assert later == {row.name for row in before["topk"]}
            self.peek = peek

        def sample(self, seconds: float) -> int:
            """As time allows, two at a time."""
            sampled.append(seconds)
            return 2

        def tables(self) -> Any:
            return LOSSES

    class Look:
        def __init__(self, watched: Watched) -> None:
            self.state = watched.state

        def __enter__(self) -> Any:
            return SimpleNamespace(tensors=range(tensors))

        def __exit__(self, *_: object) -> None:
            sampled.append(0.0)

    monkeypatch.setattr(plannerprocess, "Peek", Look)
    monkeypatch.setattr(plannerprocess, "ErrorTables", Tables)
    old = (LevelErrors("long.ago", (1, 2), (2.0, 1.0), (1.0, 2.0)), LevelErrors("t0", (1, 2), (9.0, 9.0), (1.0, 2.0)))
    before = {"topk": old}
    known = msgspec.structs.replace(PROFILE, errors=before)
    found = answer(Measure(known, WISH, watched(tmp_path), "", errors=True), Laps())
    assert isinstance(found, Measured) and found.errors == {"topk": (*LOSSES["topk"], old[0])}, (
        "what was not seen stays"
    )
    assert len(sampled) == looks + 1 and sampled[-1] == 0.0
    assert sampled[:-1] == sorted(sampled[:-1], reverse=True)
    assert plannerprocess.SAMPLE_FOR >= sampled[0] > plannerprocess.SAMPLE_FOR - 0.5, "less and less time is left"


def framed(request: Request) -> bytes:
    content = msgspec.msgpack.encode(request)
    return LENGTH.pack(len(content)) + content


def test_questions_are_served_until_they_end() -> None:
    questions = framed(Plan(PROFILE, Wish("cruel"))) + framed(Predict(PROFILE, (PlannedRule("*", "fp16"),), ()))
    target = io.BytesIO()
    serve(io.BytesIO(questions + b"\x01"), target)
    target.seek(0)
    replies = []
    while head := target.read(LENGTH.size):
        replies.append(msgspec.msgpack.decode(target.read(*LENGTH.unpack(head)), type=Reply))
    assert [type(r.answer) for r in replies] == [Refused, Predicted]
    assert [r.spent.keys() for r in replies] == [{START, PLANS}, {STUDIES}], "each once"


class Clock:
    def __init__(self) -> None:
        self.now = 2.5

    def __call__(self) -> float:
        return self.now


def test_what_is_computed_is_told_apart(calibrated: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    laps = Laps(clock)
    laps.end(START)

    def costly(specs: tuple[str, ...], directory: Path | None) -> dict[str, CodecCost]:
        clock.now += 4.0
        return dict.fromkeys(specs, costs()["none"])

    class Look:
        def __init__(self, watched: Watched) -> None:
            clock.now += 1.5
            raise PeekError("nothing to be seen")

    monkeypatch.setattr(calibration, "costs", costly)
    monkeypatch.setattr(plannerprocess, "Peek", Look)
    measured = Measure(PROFILE, Wish("safe"), watched(tmp_path), "")
    refused = reply(measured, laps)
    assert isinstance(refused.answer, Refused)
    assert refused.spent == {START: 2.5, CODECS: 4.0, ERRORS: 1.5}, "also of what failed"
    unlooked = msgspec.structs.replace(measured, errors=False)
    assert reply(unlooked, laps).spent == {CODECS: 4.0}, "nothing was looked at"

    def failing(specs: tuple[str, ...], directory: Path | None) -> dict[str, CodecCost]:
        clock.now += 3.0
        raise OSError("no such folder")

    monkeypatch.setattr(calibration, "costs", failing)
    failed = reply(measured, laps)
    assert isinstance(failed.answer, Refused) and failed.spent == {CODECS: 3.0, ERRORS: 0.0}
    clock.now += 0.25
    assert reply(Plan(PROFILE, WISH), laps).spent == {PLANS: 0.25}
    clock.now += 0.5
    assert reply(Advise(PROFILE, (1e6,), "fast"), laps).spent == {STUDIES: 0.5}


def test_a_question_too_long_ends_the_process() -> None:
    target = io.BytesIO()
    serve(io.BytesIO(LENGTH.pack(MAX_MESSAGE + 1) + framed(Plan(PROFILE, WISH))), target)
    assert not target.getvalue()


@pytest.mark.slow
def test_what_it_says_is_in_the_format_of_the_daemons_log() -> None:
    voice = msgspec.json.encode(Voice("n1", form=JSON)).decode()
    argv = [sys.executable, "-m", "gcserver.runtime.plannerprocess", voice]
    ended = subprocess.run(argv, input=LENGTH.pack(7) + b"garbage", capture_output=True, timeout=60)
    (said,) = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ended.returncode == 1 and ended.stdout == b""
    assert (said["node"], said["level"]) == ("n1", "critical") and "ValidationError" in said["exception"]
