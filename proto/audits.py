"""What a worker tells its daemon of an audit, and what it is answered.

What may live here: these two messages and their bounds. What may not: how an audit is made (`gcclient.auditor`), what
follows from one (`gcserver.runtime.audits`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from gcproto.manifest import MAX_NAME
from gcproto.packed import Message

#: A report names at most so many tensors.
MAX_WORST: Final = 8
#: What the label of the process group begins with that exchanges a model's gradients once more.
AUDIT_OF: Final = "audit of "


def audit_label(model: str, window: int) -> str:
    """That label, of a process group ``model`` whose audits compare sums over so many steps."""
    return f"{AUDIT_OF}{model}" + (f" over {window} steps" if window > 1 else "")


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Ratio = Annotated[float, msgspec.Meta(ge=0)]
Cosine = Annotated[float, msgspec.Meta(ge=-1, le=1)]


class TensorError(msgspec.Struct, frozen=True, array_like=True):
    """One tensor's delivered average d beside the exact one e: ||d - e|| / ||e||, their cosine, ||d|| / ||e||."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    error: Ratio
    cosine: Cosine
    ratio: Ratio


class AuditReport(Message, frozen=True, tag="audit"):
    """What was delivered beside the exact average, as :class:`TensorError` over all tensors of the domain: sums over
    ``window`` steps, of which ``step`` is the last.

    ``worst``: the tensors with the largest errors, largest first. ``audits``: how many were made so far, ``skipped``:
    how many more met a void step. ``dense``: the error is above ``limit``, and the job is to go on uncompressed.
    """

    domain: Count
    step: Count
    error: Ratio
    cosine: Cosine
    ratio: Ratio
    worst: Annotated[tuple[TensorError, ...], msgspec.Meta(max_length=MAX_WORST)] = ()
    audits: Count = 0
    skipped: Count = 0
    limit: Ratio | None = None
    dense: bool = False
    window: Count = 1


class AuditAnswer(Message, frozen=True, tag="audited"):
    """To a report that asked for it: ``domain`` is dense from ``step`` on, by ``plan``; ``error``: why it is not."""

    domain: int
    plan: int = 0
    step: int = 0
    error: str = ""
