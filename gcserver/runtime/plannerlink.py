"""The planning process of a daemon: what it is asked and answers, and the supervisor's end of the pipes.

What may live here: requests and answers, starting the process when it is first needed, ending it when it is idle or
stuck, adding up what it has computed. What may not: what it does (`plannerprocess.py`), when to ask (`planning.py`).

Planning takes seconds of a core when codecs have to be measured, and tens of milliseconds later; a process of its own
at a low priority keeps all of it away from steps, and its end, however it comes, from the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from gcproto.packed import UNREADABLE
from gcserver.logsetup import Voice
from gcserver.planner.advice import Advice
from gcserver.planner.auto import Proposal, Wish
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.live import LiveStep
from gcserver.planner.profile import CodecCost, LevelErrors, Profile
from gcserver.runtime.peek import Watched

#: An answer takes at most so long; measuring codecs for the first time takes longest.
PATIENCE: Final = 120.0
#: An idle process is ended after so many seconds: it holds some hundred megabytes.
IDLE: Final = 60.0
COMMAND: Final = (sys.executable, "-m", "gcserver.runtime.plannerprocess")
MAX_MESSAGE: Final = 1 << 28
LENGTH: Final = struct.Struct("<I")
TEXT: Final = Voice()
#: What the process computes: to begin (interpreter, libraries), what codecs cost here, what levels would lose of
#: gradients (L-GreCo's tables), plans (with L-GreCo's levels), and what was predicted for who asked.
START, CODECS, ERRORS, PLANS, STUDIES = PARTS = ("start", "codecs", "errors", "plans", "studies")


class PlannerError(Exception):
    """No answer from the planning process, or a refusal; says what was asked and why."""


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """What do the codecs that a wish takes cost here, and what do they lose of a job's gradients (``errors`` False:
    not that)? ``watched``: where the gradients are; ``caches``: where measured costs are kept, empty: nowhere."""

    profile: Profile
    wish: Wish
    watched: Watched
    caches: str
    errors: bool = True


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """Make a plan of a profile that is filled in."""

    profile: Profile
    wish: Wish


class Advise(msgspec.Struct, frozen=True, tag="advise"):
    """What compression would bring at these bandwidths, bytes a second; ``now``: what is in force, and takes."""

    profile: Profile
    bandwidths: tuple[float, ...]
    quality: str
    now: Wish | None = None


class Predict(msgspec.Struct, frozen=True, tag="predict"):
    """One step under these rules, job by job."""

    profile: Profile
    rules: tuple[PlannedRule, ...]
    buckets: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...] = ()


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    codecs: dict[str, CodecCost]
    errors: dict[str, tuple[LevelErrors, ...]] | None


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    proposal: Proposal


class Advised(msgspec.Struct, frozen=True, tag="advised"):
    advice: Advice


class Predicted(msgspec.Struct, frozen=True, tag="predicted"):
    step: LiveStep


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    why: str


Request = Measure | Plan | Advise | Predict
Answer = Measured | Planned | Advised | Predicted | Refused


class Reply(msgspec.Struct, frozen=True):
    """An answer, and the CPU time since the reply before, s by PARTS; of the first one since the process began."""

    answer: Answer
    spent: dict[str, float]


class PlannerLink:
    """One planning process at most, one question at a time. ``close`` ends it. ``voice``: how it logs."""

    def __init__(
        self, patience: float = PATIENCE, idle: float = IDLE, command: Sequence[str] = COMMAND, voice: Voice = TEXT
    ) -> None:
        self._patience, self._idle = patience, idle
        self._command = (*command, msgspec.json.encode(voice).decode())
        self._process: asyncio.subprocess.Process | None = None
        #: the newest one that was told to end
        self._ending: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._decoder = msgspec.msgpack.Decoder(Reply)
        #: CPU time of all processes so far, s, but for what one that was ended used after its last answer
        self.spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    async def ask(self, request: Request) -> Answer:
        """The answer. Raises PlannerError; the process, if it was asked, is then ended, and started again for the next
        question."""
        try:
            content = msgspec.msgpack.encode(request)
        except OverflowError as error:
            raise PlannerError(f"{type(request).__name__} cannot be written: {error}") from None
        async with self._turn:
            if self._timer is not None:
                self._timer.cancel()
            try:
                answer = await asyncio.wait_for(self._exchange(content), self._patience)
            except TimeoutError:
                self.close()
                raise PlannerError(
                    f"no answer to {type(request).__name__} within {self._patience:g} s: the cores are busy, or "
                    "kernels of plans are still to be compiled (`gcserver warmup`, with the daemon's NUMBA_CACHE_DIR)"
                ) from None
            except (OSError, asyncio.IncompleteReadError, *UNREADABLE) as error:
                self.close()
                raise PlannerError(f"the planning process failed at {type(request).__name__}: {error}") from None
            except asyncio.CancelledError:
                self.close()
                raise
            self._timer = asyncio.get_running_loop().call_later(self._idle, self.close)
            if isinstance(answer, Refused):
                raise PlannerError(answer.why)
            return answer

    async def _exchange(self, content: bytes) -> Answer:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                limit=1 << 20,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(LENGTH.pack(len(content)))
        process.stdin.write(content)
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        if length > MAX_MESSAGE:
            raise OSError(f"an answer of {length} bytes")
        reply = self._decoder.decode(await process.stdout.readexactly(length))
        for part in PARTS:
            self.spent[part] += reply.spent.get(part, 0.0)
        return reply.answer

    def close(self) -> None:
        """End the process, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            self._ending = process
            with contextlib.suppress(ProcessLookupError):
                # Not process.kill(), which may wait for the process before asyncio does, and asyncio warns of that.
                os.kill(process.pid, signal.SIGKILL)

    async def ended(self) -> None:
        """Close, and wait until nothing of the process is left: its pipes belong to an event loop that may end."""
        self.close()
        if self._ending is not None:
            with contextlib.suppress(OSError):
                await self._ending.communicate()
            self._ending = None
