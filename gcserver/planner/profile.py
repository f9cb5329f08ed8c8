"""What is known of a running job: when gradients get ready, what codecs and the link cost, what each level loses.

What may live here: the record that planners of running jobs start from, and its JSON form. What may not: measuring
(`gcserver.runtime`), decisions (`auto.py`), the traces of the papers (`trace.py`).

All times are seconds, all sizes bytes unless a name says elements. A profile is a value: what measures makes a new one.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Final

import msgspec

from gcproto.packed import UNREADABLE
from gcserver.planner.errors import TableError
from gcserver.planner.families import parse

#: a profile of another form is measured anew, never guessed at
FORM: Final = 1
#: No codec has a level beyond: ranks and bits are far below, ratios are millionths.
MAX_LEVEL: Final = 1 << 20
#: How the files of what codecs cost begin, which lie beside those of profiles.
CODEC_COSTS: Final = "codec-costs-"


class ProfileError(ValueError):
    """A profile that cannot be read or used: says what was expected and what is there."""


class Curve(msgspec.Struct, frozen=True):
    """Seconds of one operation over elements: linear between ``points`` (elements ascending), and beyond them.

    Below the first point as long as there; beyond the last with the slope of the last two, never falling.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [n for n, _ in self.points]
        if not sizes or any(a >= b for a, b in pairwise(sizes)) or sizes[0] < 0:
            raise ProfileError(f"a curve needs points at ascending numbers of elements, got {sizes}")
        if not all(0.0 <= s < float("inf") for _, s in self.points):
            raise ProfileError(f"the seconds of a curve are finite and not negative, got {self.points}")

    def __call__(self, elements: float) -> float:
        points = self.points
        if elements <= points[0][0] or len(points) == 1:
            return points[0][1]
        for (n0, s0), (n1, s1) in pairwise(points):
            if elements <= n1:
                return s0 + (s1 - s0) * (elements - n0) / (n1 - n0)
        (n0, s0), (n1, s1) = points[-2:]
        return s1 + max(0.0, (s1 - s0) / (n1 - n0)) * (elements - n1)


class CodecCost(msgspec.Struct, frozen=True):
    """One spec on one core of this machine. ``ratio``: payload bytes over float32 bytes of a large block.

    For codecs of two exchanges ``encode`` is begin and middle, ``decode`` finish, ``decode_add`` adding both payloads,
    and ``ratio`` counts both payloads.
    """

    encode: Curve
    decode: Curve
    decode_add: Curve
    ratio: float


class LinkCost(msgspec.Struct, frozen=True):
    """A node's way to the others: ``latency`` of one message one way, ``bandwidth`` in bytes a second a direction.

    ``noise``: standard deviation of the bandwidth's samples relative to it; ``samples`` of them were had (0: a guess).
    """

    latency: float
    bandwidth: float
    noise: float = 0.0
    samples: int = 0


class ProfiledTensor(msgspec.Struct, frozen=True):
    """One gradient; ``ready``: seconds from the first gradient of the step to this one, in the worker.

    ``address``: of its first element, counted as those of the profile's blocks (-1: not known). ``group``: bytes of the
    tensors that it shares blocks with, itself among them, which decide whether it is compressed (-1: those of its
    section).
    """

    name: str
    shape: tuple[int, ...]
    elements: int
    dtype: str
    ready: float
    address: int = -1
    group: int = -1


class LevelErrors(msgspec.Struct, frozen=True):
    """Errors and bytes of one tensor at each level of one family, levels ascending (see `errors.LevelTable`)."""

    name: str
    levels: tuple[int, ...]
    errors: tuple[float, ...]
    sizes: tuple[float, ...]


class StepTime(msgspec.Struct, frozen=True):
    """Measured seconds from step to step under one plan: median and its noise (standard deviation over median)."""

    plan: int
    seconds: float
    noise: float
    steps: int


class Profile(msgspec.Struct, frozen=True):
    """One domain of one job as this node measured it.

    forward: seconds in which the worker computes but brings no gradient (optimizer, data, forward pass): from the end
    of one step's results to the next step's first gradient. tensors: in the order their gradients get ready. blocks:
    (address, elements, owner, lane) of the blocks in force; addresses are elements from the domain's first. copy: bytes
    a second between worker and arena. round_seconds: what a block costs a lane besides its bytes. codecs: by spec.
    errors: by family ("topk", "qsgd", ...). steps: one entry per plan that ran long enough. busy: how much longer
    kernels take in the job than they do alone (neighbours on the same cores), 1 at least. interference: seconds by
    which a step grows for each second of CPU time that lanes and the network take, from 0 (cores of their own) to 1
    (the workers' cores). whole: no block cuts a tensor, as codecs of whole matrices need it. buckets: bytes of those in
    which the worker brings gradients, in order; empty where that is not known, or it brings them as they get ready.
    tolerant: whether the model's optimizer is known to stand gradients of which most come many steps late.
    """

    job: str
    domain: str
    nodes: int
    local_ranks: int
    lanes: int
    forward: float
    tensors: tuple[ProfiledTensor, ...]
    link: LinkCost
    partition_bytes: int
    min_compress_bytes: int
    blocks: tuple[tuple[int, int, int, int], ...] = ()
    copy: float = 4e9
    round_seconds: float = 5e-4
    busy: float = 1.0
    interference: float = 0.0
    codecs: dict[str, CodecCost] = {}
    errors: dict[str, tuple[LevelErrors, ...]] = {}
    steps: tuple[StepTime, ...] = ()
    form: int = FORM
    whole: bool = False
    buckets: tuple[int, ...] = ()
    tolerant: bool = False

    @property
    def elements(self) -> int:
        return sum(t.elements for t in self.tensors)

    @property
    def backward(self) -> float:
        """Seconds from a step's first gradient to its last."""
        return max((t.ready for t in self.tensors), default=0.0)

    @property
    def compute(self) -> float:
        """Seconds of a step in which nothing would be exchanged."""
        return self.forward + self.backward


def dump(profile: Profile) -> bytes:
    """As JSON."""
    return msgspec.json.encode(profile)


def load(text: bytes, name: str) -> Profile:
    """The profile in a file's content; ``name`` is the file's. Raises :class:`ProfileError`."""
    try:
        profile = msgspec.json.decode(text, type=Profile)
    except (*UNREADABLE, ProfileError) as error:
        raise ProfileError(f"{name} is no profile: {error}") from error
    if profile.form != FORM:
        raise ProfileError(f"{name}: expected a profile of form {FORM}, got {profile.form}; it has to be measured anew")
    if wrong := _wrong(profile):
        raise ProfileError(f"{name} is no profile: {wrong}")
    return profile


def _wrong(p: Profile) -> str:
    """The first of a file's figures that nobody can have measured, with what was expected; empty if there is none."""
    figures = {
        "forward": (p.forward, 0.0),
        "link.latency": (p.link.latency, 0.0),
        "link.bandwidth": (p.link.bandwidth, 1.0),
        "link.noise": (p.link.noise, 0.0),
        "link.samples": (p.link.samples, 0.0),
        "copy": (p.copy, 1.0),
        "round_seconds": (p.round_seconds, 0.0),
        "busy": (p.busy, 1.0),
        "interference": (p.interference, 0.0),
        "nodes": (p.nodes, 1.0),
        "lanes": (p.lanes, 1.0),
        "partition_bytes": (p.partition_bytes, 1.0),
        "min_compress_bytes": (p.min_compress_bytes, 0.0),
        **{f"codecs[{spec!r}].ratio": (cost.ratio, 0.0) for spec, cost in p.codecs.items()},
        **{f"{t.name!r}.ready": (t.ready, 0.0) for t in p.tensors},
        **{f"{t.name!r}.elements": (t.elements, 0.0) for t in p.tensors},
        **{f"{t.name!r}.group": (t.group, -1.0) for t in p.tensors},
        **{f"steps[{s.plan}].seconds": (s.seconds, 0.0) for s in p.steps},
        **{f"buckets[{i}]": (nbytes, 1.0) for i, nbytes in enumerate(p.buckets)},
    }
    for name, (value, least) in figures.items():
        if not least <= value < inf:
            return f"{name}: expected a finite number from {least:g} on, got {value}"
    try:
        msgspec.msgpack.encode(p)
    except OverflowError:  # JSON may have what nothing else here can write
        return "expected whole numbers of at most 64 bits"
    for text in p.codecs:
        try:
            level = parse(text).level
        except (TableError, OverflowError) as error:
            return f"codecs: {text!r}: {error}"
        if level > MAX_LEVEL:
            return f"codecs: expected a spec whose level is {MAX_LEVEL} at most, got {text!r}"
    for family, rows in p.errors.items():
        for row in rows:
            alike = len(row.levels) == len(row.errors) == len(row.sizes)
            rising = all(a < b for a, b in pairwise(row.levels))
            if not (alike and rising and all(0.0 <= x < inf for x in (*row.errors, *row.sizes))):
                return f"errors[{family!r}] of {row.name!r}: expected an error and a size from 0 on at rising levels"
    return ""
