"""What the lane machine asks the outside to do.

What may live here: frozen records, one per action, each with the order it must keep. What may not:
behaviour. Effects of one event are carried out in the order given, each before the next: several of them
are writes to memory that outlives the process, and their order is what makes a kill at any point harmless.
"""

from __future__ import annotations

from gcproto.records import Record
from gcproto.wire import Header
from gcserver.core.events import CodecChoice, Decision, DomainKey, Handle


class Send(Record, frozen=True, gc=False):
    """Put one frame on the link to ``peer``: the payload is ``handle``'s bytes, or ``body``."""

    peer: int
    header: Header
    handle: Handle | None = None
    body: bytes = b""


class Reconnect(Record, frozen=True, gc=False):
    """Drop the socket to ``peer`` with everything queued in it, and open a new one."""

    peer: int


class Release(Record, frozen=True, gc=False):
    """The machine will not name ``handle`` again."""

    handle: Handle


class LogDecision(Record, frozen=True, gc=False):
    """Write the decision to the block's record, before the Encode that follows it."""

    domain: DomainKey
    key: int
    decision: Decision


class Encode(Record, frozen=True, gc=False):
    """Sum the local ranks' inputs in rank order and encode them; answer with Encoded.

    ``read``/``write``: residual versions (ignored without feedback). ``retain``: the payload goes to this
    one of the block's retained memories (all scheme), committed with its step before the answer; None:
    it may live anywhere until released. ``stage`` 1: the payload of the second exchange, from the sum of the
    first (``aggregate``) and what encoding stage 0 of this step left in this process.

    ``levels``: of the block's segments, empty for the codec's own everywhere; ``codec.level`` is what the frame says.
    ``flush``: a dense contribution takes up what earlier codecs held back: bit 0 for this node's residual, bit 1 for
    the owner's (whose versions are ``owner_read`` and the other one); what is read is added, zeros are written.
    """

    domain: DomainKey
    key: int
    step: int
    codec: CodecChoice
    seed: int
    read: int
    write: int
    retain: int | None
    flags: int
    proposal: int
    stage: int = 0
    aggregate: Handle | None = None
    levels: tuple[int, ...] = ()
    flush: int = 0
    owner_read: int = 0


class Accumulate(Record, frozen=True, gc=False):
    """Add one member's decoded payload to the round's accumulator; the first starts it from zero."""

    domain: DomainKey
    key: int
    step: int
    member: int
    handle: Handle | None
    codec: int
    level: int
    first: bool
    nonfinite: bool
    stage: int = 0


class Finalise(Record, frozen=True, gc=False):
    """Turn the accumulator into the result; answer with Finalised.

    Owner scheme: encode the aggregate (``codec``, owner residual versions ``read``/``write``) into
    retained memory ``retain``, commit that, and write what the payload decodes to into the output slot. All scheme
    (``codec`` None): write the accumulator into the output slot. ``divisor`` is applied once.
    ``nonfinite``: some contribution was; the output becomes NaN and the payload is empty.

    A codec of two exchanges: the aggregate is the sum as a payload, committed to ``retain``. Only ``stage`` 1 writes
    the output slot (unless ``nonfinite``), and with it the next state into version ``write`` of the node's own.

    ``levels``: of the block's segments, as in Encode.
    """

    domain: DomainKey
    key: int
    step: int
    codec: CodecChoice | None
    seed: int
    read: int
    write: int
    retain: int
    divisor: int
    nonfinite: bool
    flags: int
    proposal: int
    stage: int = 0
    levels: tuple[int, ...] = ()


class Decode(Record, frozen=True, gc=False):
    """Decode an aggregate into the output slot (times 1/divisor if it is in sum units); NaN if nonfinite.

    ``stage`` 1: the second of two; with what the stages before left in this process.
    """

    domain: DomainKey
    key: int
    step: int
    handle: Handle | None
    codec: int
    level: int
    divisor: int
    flags: int
    nonfinite: bool
    stage: int = 0


class CommitOutput(Record, frozen=True, gc=False):
    """Mark the output slot as holding ``step``; after this a restart knows the round is complete."""

    domain: DomainKey
    key: int
    step: int
    nonfinite: bool
    proposal: int


class EnterEpoch(Record, frozen=True, gc=False):
    """What an earlier epoch left of steps that do not count is gone: the output is that of ``step`` at the latest, and
    nothing is retained. The block's epoch is noted last."""

    domain: DomainKey
    key: int
    epoch: int
    step: int


class LogStep(Record, frozen=True, gc=False):
    """Append a finished step to the lane's ring, before the workers hear of it."""

    domain: DomainKey
    step: int
    nonfinite: bool
    proposal: int
    digest: int
    epoch: int = 1


class Flip(Record, frozen=True, gc=False):
    """Make residual version ``version``, written in ``step``, the settled one. ``owner``: the owner's residual."""

    domain: DomainKey
    key: int
    step: int
    version: int
    owner: bool


class Notify(Record, frozen=True, gc=False):
    """Tell the node's workers that blocks are in their output slots. ``rank``: only that local rank.

    ``skipped``: the step was given up with a lost node, and there is nothing in the slots.
    """

    domain: DomainKey
    step: int
    keys: tuple[int, ...]
    nonfinite: bool
    rank: int | None = None
    skipped: bool = False


class ReportStep(Record, frozen=True, gc=False):
    """To the control machine: this lane finished ``step`` in ``epoch``. ``digest``: of the keys in it."""

    domain: DomainKey
    step: int
    nonfinite: bool
    proposal: int
    digest: int
    epoch: int = 1


class ReportClosed(Record, frozen=True, gc=False):
    """To the control machine: ``step`` hangs; local workers had closed it with the keys of this digest."""

    domain: DomainKey
    step: int
    digest: int


class ReportWaiting(Record, frozen=True, gc=False):
    """To the control machine: the oldest open step and whom it waits for (empty ``missing``: nothing open).

    ``wanted``: of each in ``missing`` what is awaited: "push", "contribution", "aggregate" or "contribution and
    aggregate". ``newest``: the last step that is open, of ``epoch``.
    """

    domain: DomainKey
    step: int
    since: float
    phase: str
    missing: tuple[str, ...]
    wanted: tuple[str, ...]
    newest: int = 0
    epoch: int = 1


class ReportFault(Record, frozen=True, gc=False):
    """To the control machine: the job cannot go on. ``kind`` is the client's exception name."""

    domain: DomainKey
    kind: str
    message: str
    step: int
    phase: str
    missing: tuple[str, ...]
    advice: str


class ReportLink(Record, frozen=True, gc=False):
    """A link changed: "up" (a new life of the peer), "quiet" (nothing heard for a while) or "refused"."""

    peer: int
    state: str
    reason: str = ""


class Count(Record, frozen=True, gc=False):
    """Add to a counter that operators see. ``peer`` 0: not about a peer."""

    name: str
    peer: int = 0
    value: int = 1


LaneEffect = (
    Send
    | Reconnect
    | Release
    | LogDecision
    | Encode
    | Accumulate
    | Finalise
    | Decode
    | CommitOutput
    | EnterEpoch
    | LogStep
    | Flip
    | Notify
    | ReportStep
    | ReportClosed
    | ReportWaiting
    | ReportFault
    | ReportLink
    | Count
)
