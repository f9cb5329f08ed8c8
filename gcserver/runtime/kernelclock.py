"""What a lane's arithmetic costs in the running job: some of its calls are timed, summed by codec and size.

What may live here: the clock around the executor's calls and its sums. What may not: the arithmetic (`executor.py`),
what is made of the sums (`profiler.py`).

One step in SAMPLE is timed; in the others each call costs one test. Dense blocks are not: their cost is that of
copying, which the worker measures.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, TypeVar, cast

from gcserver.codecs import by_id
from gcserver.core.effects import Accumulate, Decode, Encode, Finalise
from gcserver.core.events import DomainKey
from gcserver.runtime.executor import Executor
from gcserver.runtime.lanelink import KernelTime, KernelTimes
from gcserver.runtime.states import NONE_ID

#: steps SAMPLE, 2 SAMPLE, ... are timed (a power of two), and this early one
SAMPLE: Final = 16
EARLY: Final = 8
#: So many different sums at most between two reports; more are not taken in.
MAX_SUMS: Final = 512

#: (domain, spec, operation, elements)
_Key = tuple[DomainKey, str, str, int]
Call = TypeVar("Call", bound=Callable[..., Any])


class KernelClock:
    """Times ``executor``, whose ``encode``, ``accumulate``, ``finalise`` and ``decode`` it replaces."""

    def __init__(self, executor: Executor) -> None:
        self._domains = executor.domains
        self._sums: dict[_Key, list[float]] = {}
        executor.encode = self._timed(executor.encode, self._encode)
        executor.accumulate = self._timed(executor.accumulate, self._accumulate)
        executor.finalise = self._timed(executor.finalise, self._finalise)
        executor.decode = self._timed(executor.decode, self._decode)

    def _timed(self, call: Call, what: Callable[[Any], tuple[str, str] | None]) -> Call:
        def timed(e: Any) -> Any:
            step = e.step
            if step & (SAMPLE - 1) and step != EARLY:
                return call(e)
            began = perf_counter()
            result = call(e)
            seconds = perf_counter() - began
            if (known := what(e)) is not None:
                elements = self._domains[e.domain].blocks[e.key].block.elements
                # Both exchanges of a block are one call of its codec.
                self._add((e.domain, *known, elements), 0 if e.stage else 1, seconds)
            return result

        return cast(Call, timed)

    def _add(self, key: _Key, calls: int, seconds: float) -> None:
        found = self._sums.get(key)
        if found is not None:
            found[0] += calls
            found[1] += seconds
        elif len(self._sums) < MAX_SUMS:
            self._sums[key] = [calls, seconds]

    @staticmethod
    def _encode(e: Encode) -> tuple[str, str] | None:
        return None if e.codec.id == NONE_ID else (e.codec.spec, "encode")

    @staticmethod
    def _accumulate(e: Accumulate) -> tuple[str, str] | None:
        if e.codec == NONE_ID or e.nonfinite or e.handle is None:
            return None
        codec = by_id(e.codec, e.level)
        return codec.spec, "decode" if e.first and codec.rounds == 1 else "decode_add"

    @staticmethod
    def _finalise(e: Finalise) -> tuple[str, str] | None:
        if e.codec is None or e.codec.id == NONE_ID or e.codec.rounds > 1 or e.nonfinite:
            return None
        return e.codec.spec, "finalise"

    @staticmethod
    def _decode(e: Decode) -> tuple[str, str] | None:
        if e.codec == NONE_ID or e.nonfinite or e.handle is None:
            return None
        return by_id(e.codec, e.level).spec, "decode"

    def take(self) -> list[KernelTimes]:
        """What was summed since the last call, by domain."""
        sums, self._sums = self._sums, {}
        by_domain: dict[DomainKey, list[KernelTime]] = {}
        for (domain, spec, what, elements), (calls, seconds) in sums.items():
            by_domain.setdefault(domain, []).append(KernelTime(spec, what, elements, int(calls), seconds))
        return [KernelTimes(domain, tuple(found)) for domain, found in by_domain.items()]
