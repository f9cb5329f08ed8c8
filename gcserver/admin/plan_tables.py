"""Plans, profiles and advice as tables for a person.

What may live here: which columns a person wants of what the planner says. What may not: how tables are made
(`tables.py`), drawings (`drawing.py`), asking the daemon (`gcctl_calls.py`). Input is what `convert.plain` makes of
a message.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

import msgspec

from gcproto.modes import STATIC
from gcproto.rates import say_rate
from gcserver.admin.tables import Row, clean, facts, table
from gcserver.planner.profile import LevelErrors
from gcserver.values import human_duration, human_size

#: so many alternatives and tensors are shown; `--json` has all
_MOST = 40
#: so many levels of an error curve are shown, the first and the last among them
_LEVELS = 8


def plan(answer: dict[str, Any]) -> str:
    version = answer["proposed_version"]
    pairs = [
        ("job", f"{answer['job']} ({answer['job_id']})"),
        ("plan", f"{version}, its rules: {len(answer['rules'])}" if version else "none, the defaults hold"),
        ("made by", _made_by(answer)),
    ]
    return "\n\n".join([facts(pairs), *(_domain_plan(d, version) for d in answer["domains"])])


def _made_by(answer: dict[str, Any]) -> str:
    mode, says = answer["mode"], answer["planner"]
    who = f"the planner ({mode}, {answer['quality']})" if mode not in ("", STATIC) else ""
    return ": ".join(filter(None, (who, says))) or "operators"


def _domain_plan(d: dict[str, Any], proposed: int) -> str:
    force = f"plan {d['plan_version']} since step {d['since_step']}" if d["plan_version"] else "the defaults"
    coming = [f"plan {s['plan_version']} from step {s['first_step']}" for s in d["switches"]]
    if proposed > max([d["plan_version"], *(s["plan_version"] for s in d["switches"])]):
        coming.append(f"plan {proposed} from a step not settled yet")
    lines = [f"domain {d['id']} ({clean(d['label'])}): {', then '.join([force, *coming])}"]
    if d["note"]:
        # One line a tensor would hide the model's: what is called or broadcast one by one are many.
        held = f" ({sum(g['tensors'] for g in d['groups'])} tensors; --json has them)" if d["groups"] else ""
        return "\n".join([*lines, clean(d["note"]) + held])
    if d["rules"]:
        rules = [(r["pattern"], r["codec"], r["scheme"], r["origin"]) for r in d["rules"]]
        lines.append(table(("RULE", "CODEC", "SCHEME", "FROM"), rules))
    if d["groups"]:
        lines.append(table(_GROUP, [_group(g) for g in d["groups"]]))
    if d["forecast"]:
        lines.append(_forecast(d["forecast"]))
    if d["controllers"]:
        lines.append(table(_CONTROLLER, [_controller(c) for c in d["controllers"]]))
    return "\n".join(lines)


_CONTROLLER = ("CONTROLLER", "RATIO", "NOTCH", "DELAY", "OF IT SKEW", "STEPS")


def _controller(c: dict[str, Any]) -> Row:
    notch = "-" if c["notch"] is None else c["notch"]
    delay, skew = human_duration(c["delay_seconds"]), human_duration(c["skew_seconds"])
    return c["name"], f"{c['ratio']:.4g}", notch, delay, skew, c["steps"]


def _forecast(f: dict[str, Any]) -> str:
    measured = human_duration(f["measured_seconds"]) if f["measured_seconds"] else "not yet"
    if not f["plan_version"]:
        measured = "-"
    pairs = [
        ("planned", f"plan {f['plan_version']}" if f["plan_version"] else "no change: what follows was only proposed"),
        ("because", f["reason"]),
        ("step", f"expected {_known(f['expected_seconds'])}, measured {measured}"),
        ("without", f"compression {_known(f['dense_seconds'])}, "
                    f"any exchange {_known(f['compute_seconds'])} (expected)"),
    ]  # fmt: skip
    if len(f["alphas"]) > 1:
        pairs.append(("notches", "error budgets " + ", ".join(f"{a:.3g}" for a in f["alphas"])))
    if f["proposed_groups"]:
        sizes = ", ".join(str(len(g["tensors"])) for g in f["proposed_groups"][:_MOST])
        pairs.append(("groups", f"tensors to bring together: {sizes}; --json has their names and DDP's bucket sizes"))
    parts = [facts(pairs)]
    if f["groups"]:
        rows = [
            (g["tensors"], g["first_tensor"], human_size(g["bytes"]), g["codec"], g["scheme"],
             human_duration(g["expected_seconds"]), g["reason"])
            for g in f["groups"]
        ]  # fmt: skip
        parts.append(table(("TENSORS", "FIRST", "SIZE", "CODEC", "SCHEME", "EXPECTED", "WHY"), rows))
    if f["considered"]:
        others = [(c["codec"], _known(c["expected_seconds"]), c["reason"]) for c in f["considered"][:_MOST]]
        parts.append(table(("CONSIDERED", "STEP", "WHY NOT"), others))
    return "\n".join(parts)


def _known(seconds: float) -> str:
    """Seconds that are 0 where nothing is known of them."""
    return human_duration(seconds) if seconds else "-"


def profile(answer: dict[str, Any]) -> str:
    return "\n\n".join(_profile(d) for d in answer["domains"])


def _profile(d: dict[str, Any]) -> str:
    known = _shown(d["json"])
    pairs = [
        ("job", f"{d['job']}, {d['domain']}, {d['nodes']} nodes"),
        ("computes", f"{human_duration(d['forward_seconds'])} before the first gradient, "
                     f"{human_duration(d['backward_seconds'])} to the last"),
        ("link", f"{_link(d)}, {human_duration(d['link_latency_seconds'])} one way"),
        ("kernels", f"{d['busy']:.2f} times as long as on an idle machine"),
        ("optimizer", "stands late gradients" if known.tolerant else "not known to stand late gradients"),
    ]  # fmt: skip
    parts = [facts(pairs)]
    steps = [
        (s["plan_version"], human_duration(s["median_seconds"]), f"{s['noise']:.1%}", s["steps"]) for s in d["steps"]
    ]
    if steps:
        parts.append(table(("PLAN", "STEP", "NOISE", "STEPS"), steps))
    codecs = [
        (
            c["codec"],
            f"{c['ratio']:.4g}",
            *(human_duration(c[f"{op}_seconds"]) for op in ("encode", "decode", "decode_add")),
        )
        for c in d["codecs"]
    ]
    if codecs:
        parts.append(table(("CODEC", "RATIO", "ENCODE 1 Mi", "DECODE", "DECODE AND ADD"), codecs))
    errors = [row for family, curves in _curves(known).items() for row in _levels(family, curves)]
    if errors:
        parts.append(table(("FAMILY", "LEVEL", "TENSORS", "ERROR", "SENDS"), errors))
    tensors = [(t["name"], t["elements"], human_duration(t["ready_seconds"])) for t in d["tensors"]]
    shown = tensors if len(tensors) <= _MOST else tensors[: _MOST - 1] + tensors[-1:]
    if shown:
        parts.append(table(("TENSOR", "ELEMENTS", "READY"), shown))
    if len(shown) < len(tensors):
        parts.append(f"({len(tensors) - len(shown)} tensors in between; --json has all)")
    return "\n".join(parts)


class _Shown(msgspec.Struct):
    """Of a profile (`gcserver.planner.profile`), of which other daemons may have another form, what is shown."""

    errors: dict[str, list[LevelErrors]] = {}
    tolerant: bool = False


def _shown(profile: str) -> _Shown:
    """Nothing is known where the text, which is another's, is no profile."""
    try:
        return msgspec.json.decode(profile, type=_Shown)
    except msgspec.DecodeError:
        return _Shown()


def _curves(known: _Shown) -> dict[str, list[LevelErrors]]:
    """Of each family the error curves of the tensors."""
    return {
        family: [c for c in curves if c.levels and len(c.levels) == len(c.errors) == len(c.sizes)]
        for family, curves in known.errors.items()
    }


def _levels(family: str, curves: list[LevelErrors]) -> list[Row]:
    """The norm of all tensors' errors and what a contribution comes to, by level; a tensor has its own next below."""
    levels = sorted({level for curve in curves for level in curve.levels})
    spread = min(_LEVELS, len(levels))
    shown = [levels[round(i * (len(levels) - 1) / max(spread - 1, 1))] for i in range(spread)]
    rows: list[Row] = []
    for level in shown:
        at = [(curve, max(bisect_right(curve.levels, level) - 1, 0)) for curve in curves]
        error = math.hypot(*(curve.errors[i] for curve, i in at))
        size = human_size(sum(curve.sizes[i] for curve, i in at))
        rows.append((clean(family), level, len(at), f"{error:.4g}", size))
    return rows


def _link(d: dict[str, Any]) -> str:
    rate = say_rate(d["link_bandwidth"])
    if not d["link_samples"]:
        return f"not measured (too little is sent, or too unevenly): {rate} assumed"
    return f"{rate} (noise {d['link_noise']:.0%}, {d['link_samples']} samples)"


def advice(answer: dict[str, Any]) -> str:
    return "\n\n".join(_advice(d) for d in answer["domains"])


def _advice(d: dict[str, Any]) -> str:
    below = "on any link"
    if d["pays_below"] is not None:
        below = f"below {say_rate(d['pays_below'])}" if d["pays_below"] else "on no link"
    pairs = [
        ("domain", d["domain"]),
        ("verdict", d["verdict"]),
        ("computing", f"{human_duration(d['compute_seconds'])} a step"),
        ("pays", below),
    ]
    rows = [
        (say_rate(r["bandwidth"]) + (" (measured)" if r["measured"] else ""), r["plan"], r["codec"],
         human_duration(r["expected_seconds"]), f"{r['expected_seconds'] / max(d['compute_seconds'], 1e-9):.2f}")
        for r in d["rows"]
    ]  # fmt: skip
    return "\n".join([facts(pairs), table(("LINK", "PLAN", "CODEC", "STEP", "STEP / COMPUTING"), rows)])


_GROUP = ("SECTION", "TENSORS", "FIRST", "BLOCKS", "SIZE", "CODEC", "SCHEME", "RULE", "REASON")


def _group(g: dict[str, Any]) -> Row:
    rule = g["rule"]["pattern"] if g["rule"] else ""
    size = human_size(g["bytes"])
    return (
        g["section"], g["tensors"], g["first_tensor"], g["blocks"], size, g["codec"], g["scheme"], rule, g["reason"]
    )  # fmt: skip
