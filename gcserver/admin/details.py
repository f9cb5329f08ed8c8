"""What the dashboard shows of one job beyond its state, as plain JSON: layers, plan, a step predicted and measured.

What may live here: pure functions from a daemon's answers to that, bounded in size. What may not: asking
(`dashboard.py`), how it is drawn (`page/`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gcserver.admin.planning import Forecast, TimelineJob
from gcserver.admin.source import DomainPlan, JobStatus, PlanStatus, TensorStatus

#: The largest of a model's layers, rules and groups of its plan, and the longest bars of a drawn step; more than a page
#: can show is only counted.
MOST_LAYERS: Final = 300
MOST_RULES: Final = 60
MOST_BARS: Final = 600
#: kinds of work in the order of a step
_ORDER: Final = ("encode", "exchange", "add", "finalise", "decode")

JSON = dict[str, Any]


def details(job: JobStatus, tensors: Sequence[TensorStatus], plan: PlanStatus) -> JSON:
    """Of one job. What has no number yet is None; all numbers are finite."""
    shown = sorted(tensors, key=lambda t: (-t.bytes_raw, t.domain, t.address))[:MOST_LAYERS]
    places = {id(t): i for i, t in enumerate(tensors)}
    models = [d for d in plan.domains if d.measured or d.predicted or d.forecast]
    raw, wire = sum(t.bytes_raw for t in tensors if t.bytes_wire), sum(t.bytes_wire for t in tensors)
    return {
        "id": job.id,
        "label": job.label,
        "layers": {
            "tensors": len(tensors),
            "raw": sum(t.bytes_raw for t in tensors),
            "ratio": raw / wire if wire else None,
            "shown": [_layer(t) for t in sorted(shown, key=lambda t: places[id(t)])],
        },
        "plan": {
            "mode": plan.mode,
            "quality": plan.quality,
            "says": plan.planner,
            "version": plan.proposed_version,
            "domains": [_domain(d) for d in plan.domains if (d.groups and not d.note) or d.forecast],
        },
        "steps": [
            {
                "domain": d.label,
                "parts": breakdown(d.measured),
                "seconds": _end(d.measured),
                "expected": _known(d.forecast.expected_seconds) if d.forecast else None,
                "predicted": _bars(d.predicted),
                "measured": _bars(d.measured),
            }
            for d in models
        ],
    }


def breakdown(jobs: Iterable[TimelineJob]) -> list[JSON]:
    """For how long of a step each kind of work was under way, on whichever lane; seconds from its beginning.

    ``compute``: until the first gradient was pushed. Kinds overlap, so their sum is no step.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    pushes = []
    for job in jobs:
        kind = job.what.partition(" ")[0]
        if job.resource == "worker":
            continue  # told by pushes, below
        if kind == "push":
            pushes.append(job.start_seconds)
        else:
            spans.setdefault(kind, []).append((job.start_seconds, job.end_seconds))
    first = [{"what": "compute", "seconds": max(min(pushes), 0.0), "count": 1}] if pushes else []
    kinds = [*(k for k in _ORDER if k in spans), *sorted(spans.keys() - set(_ORDER))]
    return first + [{"what": k, "seconds": covered(spans[k]), "count": len(spans[k])} for k in kinds]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def _layer(t: TensorStatus) -> JSON:
    held = _finite(t.residual_norm)
    gradient = _finite(t.gradient_norm)
    return {
        "name": t.name,
        "domain": t.domain,
        "dtype": t.dtype,
        "shape": list(t.shape),
        "codec": t.codec,
        "raw": t.bytes_raw,
        "wire": t.bytes_wire,
        "ratio": t.bytes_raw / t.bytes_wire if t.bytes_wire else None,
        "held": held,
        "error": _finite(held / gradient) if held is not None and gradient else None,
    }


def _domain(d: DomainPlan) -> JSON:
    return {
        "label": d.label,
        "version": d.plan_version,
        "since": d.since_step,
        "coming": [{"step": first, "version": version} for first, version in d.switches],
        "rules": [
            {"pattern": r.pattern, "codec": r.codec, "scheme": r.scheme, "origin": r.origin}
            for r in d.rules[:MOST_RULES]
        ],
        "groups": [
            {
                "first": g.first_tensor,
                "tensors": g.tensors,
                "bytes": g.bytes,
                "codec": g.codec,
                "scheme": g.scheme,
                "why": g.reason or (f"rule {g.rule.pattern}" if g.rule else ""),
            }
            for g in sorted(d.groups, key=lambda g: -g.bytes)[:MOST_RULES]
        ],
        "forecast": _forecast(d.forecast),
        "controllers": [
            {"name": c.name, "ratio": _finite(c.ratio), "notch": c.notch, "steps": c.steps} for c in d.controllers
        ],
    }


def _forecast(f: Forecast | None) -> JSON | None:
    if f is None:
        return None
    return {
        "version": f.plan_version,
        "expected": _known(f.expected_seconds),
        "measured": _known(f.measured_seconds),
        "dense": _known(f.dense_seconds),
        "compute": _known(f.compute_seconds),
        "reason": f.reason,
    }


def _bars(jobs: Sequence[TimelineJob]) -> JSON:
    longest = sorted(jobs, key=lambda j: j.start_seconds - j.end_seconds)[:MOST_BARS]
    return {
        "end": _end(jobs),
        "left_out": len(jobs) - len(longest),
        "bars": [
            [f"{j.node} {j.resource}", j.what, j.start_seconds, j.end_seconds]
            for j in sorted(longest, key=lambda j: (j.node, j.resource, j.start_seconds))
        ],
    }


def _end(jobs: Iterable[TimelineJob]) -> float | None:
    return max((j.end_seconds for j in jobs), default=None)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _known(seconds: float) -> float | None:
    """Seconds that are 0 where nothing is known of them."""
    return seconds if math.isfinite(seconds) and seconds > 0 else None
