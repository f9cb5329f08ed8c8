"""Which codecs `plan = "auto"` may use: families by quality, from the least lossy to the most.

What may live here: specs taken apart as far as planning needs it, the rule of qualities, the order of loss. What may
not: codecs themselves (the planner does not import them; tests compare), costs, errors.

Errors of two families are never compared, so which of two is the less lossy is a rule: the order of `LADDER`, and
within a family the more bytes the better. Codecs that vote or send signs alone are on no ladder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from gcproto.modes import FAST, QUALITIES
from gcserver.planner.errors import TableError

DENSE: Final = "none"
CASTS: Final = ("fp16", "bf16")
#: codecs of two dependent exchanges, which take whole matrices and need an owner
TWO_EXCHANGES: Final = frozenset({"powersgd"})
#: codecs whose level is a ratio in millionths
SPARSE: Final = frozenset({"topk", "dgc", "redsync", "gaussiank", "randomk", "sidco-e", "sidco-gp", "sidco-p"})

#: What should be measured for a quality, the least lossy first. Of the sparsifiers sidco-e stands for all: it realises
#: k, costs no more than topk in the daemon's blocks and sends within a tenth of it. Packed indices lose nothing and
#: 16-bit values next to nothing, for 3.2 bytes an element instead of 8 (docs/codecs.md), and cost little beside the
#: rest. Those with float32 values are there for plans that exclude tensors, which then travel exactly.
LADDER: Final[dict[str, tuple[str, ...]]] = {
    "safe": (DENSE, *CASTS, "qsgd(bits=8)"),
    "balanced": (
        "qsgd(bits=4)", "powersgd(rank=16,values=16)", "powersgd(rank=4)",
        "sidco-e(ratio=0.05,packed=1,values=16)",
        "sidco-e(ratio=0.01,packed=1)", "sidco-e(ratio=0.01,packed=1,values=16)",
    ),
    "fast": (
        "sidco-e(ratio=0.005,packed=1,values=16)",
        "sidco-e(ratio=0.001,packed=1)", "sidco-e(ratio=0.001,packed=1,values=16)",
    ),
}  # fmt: skip

#: So many times later than low rank a sparsifier is in question in a model's training: what it does not send error
#: feedback keeps for some 1/ratio steps, which has to be little beside the steps made. Low rank, which keeps less,
#: waits as long where the optimizer is not known to stand late gradients.
LATER: Final = 10
#: From this rank on low rank waits for nothing: what it leaves out costs a training from scratch 1 % of its loss, lower
#: ranks up to 5 % with such an optimizer (docs/planner.md).
EARLY_RANK: Final = 16
#: What auto may use, by how much it may lose. Each kind has to be worth it over those before it: the gain, as a share
#: of the step, that it must bring (docs/planner.md says what that was measured by).
KINDS: Final = (frozenset({DENSE}), frozenset(CASTS), frozenset({"qsgd"}), TWO_EXCHANGES, SPARSE)
GAINS: Final = (0.05, 0.05, 0.05, 0.06, 0.06)
#: The same of what loses more over what loses something already, where the optimizer is known to stand late gradients:
#: whatever quantisers round and others send late costs such a training nothing that was found (docs/planner.md).
GAIN_TOLERANT: Final = 0.03

_ORDER: Final = (DENSE, *CASTS, "qsgd", "powersgd", "sidco-e", "topk")
#: family -> (parameter, the least of it that each quality accepts)
_LEAST: Final[dict[str, tuple[str, dict[str, float]]]] = {
    "qsgd": ("bits", {"safe": 8, "balanced": 4, "fast": 4}),
    "powersgd": ("rank", {"balanced": 4, "fast": 4}),
    "sidco-e": ("ratio", {"balanced": 0.01, "fast": 0.001}),
    "topk": ("ratio", {"balanced": 0.01, "fast": 0.001}),
}
#: what a spec means where it does not say so, and what is the same with and without "+ef"
_DEFAULTS: Final = {("bucket", "1024"), ("kind", "maxmin"), ("packed", "0"), ("values", "32"), ("unbiased", "0")}
#: how a family packs what it sends, and the narrowest values that auto takes: of 16 bits they are off by a 2048th at
#: most, which error feedback keeps; low rank's factors by a 256th, of which it keeps what nodes do not all have alike
_PACKING: Final = {name: frozenset({"packed", "values"}) for name in SPARSE} | {
    name: frozenset({"values"}) for name in TWO_EXCHANGES
}
NARROWEST: Final = 16
_FEEDBACK: Final = SPARSE | TWO_EXCHANGES | {"onebit", "efsignsgd", "threshold"}
_SPEC: Final = re.compile(r"([a-z][a-z0-9-]*)(?:\(([^()]*)\))?((?:\+.*)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Spec:
    """A spec taken apart: ``values`` as they are written, ``decorators`` with their plus, or empty."""

    text: str
    name: str
    values: tuple[tuple[str, str], ...]
    decorators: str

    @property
    def level(self) -> int:
        """What a segment's level is unless a plan says otherwise: bits, rank, millionths; 0 where there is none."""
        values = dict(self.values)
        for parameter, scale in (("bits", 1), ("rank", 1), ("ratio", 1_000_000)):
            if parameter in values:
                return round(float(values[parameter]) * scale)
        return 0

    @property
    def width(self) -> int:
        """Bits of a sparsifier's values, or of low rank's factors; below 32 they are rounded."""
        text = dict(self.values).get("values", "") if self.name in _PACKING else ""
        return int(text) if text.isdecimal() else 32

    @property
    def own(self) -> tuple[tuple[str, str], ...]:
        """The values that are not a codec's defaults."""
        return tuple(sorted((k, f"{float(v):g}" if _number(v) else v) for k, v in set(self.values) - _DEFAULTS))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for specs that mean the same codec."""
        same = self.decorators == "+ef" and self.name in _FEEDBACK
        return self.name, self.own, "" if same else self.decorators


@lru_cache(maxsize=1024)
def parse(text: str) -> Spec:
    """Raises TableError for a text that is no spec. Spaces mean nothing, as in what operators write."""
    text = "".join(text.split())
    match = _SPEC.fullmatch(text)
    if match is None:
        raise TableError("spec", "a codec such as topk(ratio=0.01)", repr(text))
    values = tuple(tuple(part.strip() for part in v.split("=", 1)) for v in (match[2] or "").split(",") if v.strip())
    if any(len(v) != 2 or not _number(v[1]) for v in values if v[0] in ("bits", "rank", "ratio")):
        raise TableError("spec", "numbers for bits, rank and ratio", repr(text))
    return Spec(text, match[1], tuple((v[0], v[-1]) for v in values), match[3])


def ladder(quality: str) -> tuple[str, ...]:
    """The specs of a quality and of those below it, the least lossy first. Raises TableError for another quality."""
    if quality not in QUALITIES:
        raise TableError("quality", f"one of {', '.join(QUALITIES)}", repr(quality))
    return tuple(s for q in QUALITIES[: QUALITIES.index(quality) + 1] for s in LADDER[q])


def kind(text: str) -> int:
    """Of which of `KINDS` a spec is; as dense for codecs that auto never takes, of which nothing is known."""
    name = parse(text).name
    return next((i for i, names in enumerate(KINDS) if name in names), 0)


def first_step(spec: Spec, late_after: int, tolerant: bool) -> int:
    """The step of a model's training from which a spec is in question. Low rank and sparsifiers send a small part of a
    gradient at a time, and the rest of it many steps late: low rank below `EARLY_RANK` waits for ``late_after`` steps
    if the optimizer is known to stand late gradients (``tolerant``), else for `LATER` times as many, as sparsifiers do.
    """
    if spec.name in TWO_EXCHANGES:
        return 0 if spec.level >= EARLY_RANK else late_after if tolerant else late_after * LATER
    return late_after * LATER if spec.name in SPARSE else 0


def late_steps(late_after: int, tolerant: bool) -> tuple[tuple[str, int], ...]:
    """(which codecs, the step from which they are in question) for each such step; late_after, tolerant: as in
    `first_step`. Which can be said before "in question"."""
    low, late = f"low rank below {EARLY_RANK}", late_after * LATER
    if tolerant:
        return (f"{low} is", late_after), ("sparsifiers are", late)
    return ((f"{low} is", late),)


def gain_wanted(some: int, lossier: int, tolerant: bool) -> float:
    """What the lossier of two `KINDS` must bring over the other, as a share of the step; tolerant: as in
    `first_step`."""
    return GAIN_TOLERANT if tolerant and DENSE not in KINDS[some] else GAINS[lossier]


def tolerated(spec: Spec, quality: str, tolerant: bool) -> bool:
    """Whether a model's optimizer lets ``quality`` take a spec: sparsifiers for none that is not known to stand late
    gradients (``tolerant``), unless the quality is fast."""
    return tolerant or quality == FAST or spec.name not in SPARSE


def refused(spec: Spec, quality: str) -> str:
    """Why ``quality`` does not take a spec; empty if it does."""
    if spec.decorators not in ("", "+ef"):
        return f"auto takes no {spec.decorators}"
    if spec.name == DENSE or spec.name in CASTS:
        return ""
    if spec.name not in _LEAST:
        return "not a family of auto"
    parameter, least = _LEAST[spec.name]
    values = dict(spec.own)
    packing = _PACKING.get(spec.name, frozenset())
    other = parameter not in values or set(values) - {parameter} - packing or spec.width < NARROWEST
    if quality in least and other:
        allowed = ", ".join((parameter, *sorted(packing)))
        return f"auto takes no other parameters than {allowed}" + (f", values from {NARROWEST} on" if packing else "")
    return too_lossy(spec, quality)


def too_lossy(spec: Spec, quality: str) -> str:
    """Why a spec of auto's families loses more than ``quality`` lets it; empty if it does not."""
    parameter, least = _LEAST.get(spec.name, ("", {quality: 0.0}))
    if quality not in least:
        return f"{spec.name} is too lossy for quality {quality}"
    if parameter and float(dict(spec.values).get(parameter, math.inf)) < least[quality]:
        return f"quality {quality} takes {parameter} from {least[quality]:g} on"
    return ""


def least_level(spec: Spec, quality: str) -> int:
    """The lowest level that ``quality`` lets a tensor have in a plan of ``spec``; 0: any. What a quantiser without
    error feedback loses nothing brings back: no tensor has fewer bits than the quality takes at all. Of those that keep
    what they do not send some tensors may have less than others at no more error together."""
    parameter, least = _LEAST.get(spec.name, ("", {}))
    return int(least.get(quality, 0)) if parameter == "bits" else 0


def candidates(specs: Iterable[str], quality: str) -> list[Spec]:
    """Of ``specs``, those that ``quality`` takes, the least lossy first."""
    ladder(quality)  # checks the word
    return sorted((s for s in map(parse, specs) if not refused(s, quality)), key=loss)


def loss(spec: Spec) -> tuple[int, float, int, int, str]:
    """Sorts specs from the least lossy to the most; those on no ladder come last."""
    place = _ORDER.index(spec.name) if spec.name in _ORDER else len(_ORDER)
    # sparsifiers by their ratio, whichever they are
    family = _ORDER.index("sidco-e") if spec.name in SPARSE else place
    return family, -float(spec.level), place, -spec.width, spec.text


def exact_level(spec: Spec) -> int:
    """The level at which a codec sends a segment as nearly as it is as it can; 0 if it has none.

    It is what the daemon gives a segment whose tensor's own rule names another codec than the block's. Only sparsifiers
    with values of 32 bits (`Spec.width`) lose nothing at it.
    """
    if spec.name in SPARSE:
        return 1_000_000
    # a rank that saves nothing: the matrix is sent itself
    return {"qsgd": 8, "powersgd": 1 << 20}.get(spec.name, 0)


def error_families(spec: Spec) -> tuple[str, ...]:
    """Under which names a profile may have this family's errors, the nearest first."""
    return (spec.name, spec.name.split("-")[0], *(("topk",) if spec.name in SPARSE else ()))


def _number(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False
