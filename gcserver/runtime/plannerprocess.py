"""The planning process: answers questions about plans on its standard input until that ends.

What may live here: reading a question, calling the planner and the measurements it needs, writing the answer and what
it took. What may not: decisions (`gcserver.planner`), measurements themselves (`calibration.py`, `errortables.py`),
anything of a running step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from gcserver import logsetup
from gcserver.logsetup import JSON, Voice
from gcserver.parent import ends_with_parent
from gcserver.planner import auto, auto_rules, families
from gcserver.planner.advice import advise
from gcserver.planner.live import Live
from gcserver.planner.live_layout import portions
from gcserver.planner.profile import LevelErrors
from gcserver.runtime import calibration
from gcserver.runtime.errortables import ErrorTables
from gcserver.runtime.peek import Peek, PeekError
from gcserver.runtime.plannerlink import (
    CODECS,
    ERRORS,
    LENGTH,
    MAX_MESSAGE,
    PLANS,
    START,
    STUDIES,
    Advised,
    Answer,
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

NICE: Final = 10
OOM_SCORE: Final = "500"
#: Gradients are looked at for so many seconds of CPU time: some fifty matrices of a million elements.
SAMPLE_FOR: Final = 2.0
#: Those of a small model so often in that time.
SAMPLES: Final = 4


class Laps:
    """CPU time of this process, s, by parts: what lies between two ends belongs to the later one."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock, self._at = clock, 0.0
        self._spent: dict[str, float] = {}

    def end(self, part: str) -> None:
        now = self._clock()
        self._spent[part] = self._spent.get(part, 0.0) + now - self._at
        self._at = now

    def taken(self) -> dict[str, float]:
        """What has ended since this was called last."""
        spent, self._spent = self._spent, {}
        return spent


def reply(request: Request, laps: Laps) -> Reply:
    """The answer to one question, and what it took."""
    found = answer(request, laps)
    laps.end(_part(request))
    return Reply(found, laps.taken())


def _part(request: Request) -> str:
    """What the last of it was computed for."""
    if isinstance(request, Measure):
        return ERRORS if request.errors else CODECS
    return PLANS if isinstance(request, Plan) else STUDIES


def answer(request: Request, laps: Laps) -> Answer:
    """The answer to one question; what cannot be done is an answer as well."""
    try:
        if isinstance(request, Measure):
            return measure(request, laps)
        if isinstance(request, Plan):
            return Planned(auto.compose(request.profile, request.wish))
        if isinstance(request, Predict):
            live = Live(request.profile, portions(request.profile, request.buckets, request.groups))
            return Predicted(live.step(auto_rules.applied(live, request.rules)))
        return Advised(advise(request.profile, request.bandwidths, request.quality, request.now))
    except (PeekError, ValueError, LookupError, ArithmeticError, OSError) as error:
        return Refused(f"{type(error).__name__}: {error}")


def measure(request: Measure, laps: Laps) -> Measured:
    """What the codecs of a quality cost this machine, and lose of this job. Ends a lap between the two."""
    quality = request.wish.quality
    specs = dict.fromkeys((families.DENSE, *families.ladder(quality), *filter(None, [request.wish.family])))
    # Without files the profile, which lives as long as the daemon, is what remembers.
    known = {} if request.caches else {s: request.profile.codecs[s] for s in specs if s in request.profile.codecs}
    missing = tuple(s for s in specs if s not in known)
    try:
        codecs = known | calibration.costs(missing, Path(request.caches) if request.caches else None)
    finally:
        laps.end(CODECS)
    errors: dict[str, tuple[LevelErrors, ...]] | None = None
    if request.errors:
        known_errors = request.profile.errors
        with Peek(request.watched) as peek:
            tables = ErrorTables(peek, later={row.name for rows in known_errors.values() for row in rows})
            _sample(tables)
            errors = _merged(tables.tables(), known_errors)
    return Measured(codecs, errors)


def _sample(tables: ErrorTables) -> None:
    """Look at all gradients, and again as long as there is time: by then they are a later step's."""
    began = time.thread_time()
    for _ in range(SAMPLES):
        left = SAMPLE_FOR - (time.thread_time() - began)
        if left <= 0 or tables.sample(left) < len(tables.peek.tensors):
            return


def _merged(
    new: Mapping[str, tuple[LevelErrors, ...]], old: Mapping[str, tuple[LevelErrors, ...]]
) -> dict[str, tuple[LevelErrors, ...]]:
    """Errors by family: of tensors that were not looked at this time, what is known of them."""
    seen = {family: {row.name for row in rows} for family, rows in new.items()}
    return {
        family: (*new.get(family, ()), *(r for r in old.get(family, ()) if r.name not in seen.get(family, ())))
        for family in {**old, **new}
    }


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Until ``source`` ends."""
    decoder, laps = msgspec.msgpack.Decoder(Request), Laps()
    laps.end(START)
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        if length > MAX_MESSAGE:
            return
        content = msgspec.msgpack.encode(reply(decoder.decode(source.read(length)), laps))
        target.write(LENGTH.pack(len(content)))
        target.write(content)
        target.flush()


def main() -> int:
    """Entry point of the process: one argument, how it logs, as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends_with_parent(signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    # The daemon may be one that the kernel spares when memory runs out: not so what can be started again at any time.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    # Answers alone go to the pipe: whatever a library prints goes where the log goes.
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    voice = msgspec.json.decode(sys.argv[1].encode(), type=Voice)
    logsetup.begin_child(voice)
    if voice.form == JSON:
        sys.stdout = sys.stderr
    serve(sys.stdin.buffer, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
