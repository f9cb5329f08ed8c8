"""A codec whose code fails: which codec, at which block, with what, as the end of the job that uses it.

What may live here: from an effect and what its codec raised to a fault. What may not: the end of the domain
(`endings.py`), payloads that a codec refuses as damaged (`executor.check`).

Codecs may be anybody's. One that raises would raise again in the next life of its lane, which would be started until
the deadline while other jobs wait; so the job that wanted it ends, and the lane goes on with the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from gcserver.core.effects import Accumulate, Decode, Encode, Finalise, LaneEffect, ReportFault
from gcserver.core.events import DomainKey
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.statefiles import MemoryShort
from gcserver.runtime.states import NONE_ID

_DOING = {Encode: "encoding", Accumulate: "adding", Finalise: "averaging", Decode: "decoding"}
ADVICE = "mend or replace the codec, or choose another one; the daemon's log has the traceback"


def codec_fault(effect: LaneEffect, error: Exception, domains: Mapping[DomainKey, DomainMemory]) -> ReportFault | None:
    """The end of the job whose codec raised ``error`` when ``effect`` was carried out; None where no codec was called:
    then the defect is the daemon's own. Memory that is short is no fault of a codec's."""
    if not isinstance(effect, Encode | Accumulate | Finalise | Decode) or isinstance(error, MemoryShort):
        return None
    codec, memory = effect.codec, domains.get(effect.domain)
    number = codec if isinstance(codec, int) or codec is None else codec.id
    if number is None or number == NONE_ID or memory is None:
        return None
    name = f"codec {number}, level {effect.level}" if isinstance(effect, Accumulate | Decode) else ""
    if codec is not None and not isinstance(codec, int):
        name = f"codec {codec.spec}"
    raised = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = f"{name} failed {_DOING[type(effect)]} {_block(memory, effect.key)}: {raised}"
    phase = "push" if isinstance(effect, Encode) else "exchange"
    return ReportFault(effect.domain, "CodecError", message, effect.step, phase, (), ADVICE)


def _block(memory: DomainMemory, key: int) -> str:
    """A block by the tensor that fills most of it."""
    for section, blocks in zip(memory.space.sections, memory.space.blocks, strict=True):
        for block in blocks:
            if block.key == key:
                return f"block {key} ({section.tensors[block.tensor].name})"
    return f"block {key}"
