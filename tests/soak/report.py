"""The page of a soak with faults: throughput over time with the faults in it, each fault and what came of it, verdicts.

What may live here: from a record and its verdicts to HTML that needs nothing else, and to figures. What may not:
judging.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tests.soak.record import Injected, Record
from tests.soak.schedule import KINDS
from tests.soak.verdicts import Verdict, percentile, rates, recoveries

_WIDTH, _HEIGHT, _LEFT, _BELOW = 1100, 260, 46, 34
#: of a fault's stretch in the plot, by whether the job went on, was started again, or never recovered
_COLOURS: Final = {"went on": "#3d85c6", "started again": "#e07a5f", "not recovered": "#b00020"}


def fate(injected: Injected) -> str:
    """What became of the job."""
    if injected.recovered is None:
        return "not recovered"
    return "went on" if injected.after == injected.life else "started again"


def outcome(injected: Injected) -> str:
    """One line for the terminal."""
    f = injected.fault
    took = "" if injected.recovered is None else f", recovered after {injected.recovered - injected.ended:.2f} s"
    held = f" for {injected.ended - injected.began:.1f} s" if injected.ended - injected.began >= 0.5 else ""
    notes = f" ({injected.notes})" if injected.notes else ""
    return f"{f.number:3d} {f.kind} at n{f.node}{held}{notes}: {fate(injected)}{took}"


def figures(record: Record) -> dict[str, Any]:
    """The numbers of a run, flat."""
    found, speed = recoveries(record), rates(record)
    kept = [f.recovered - f.ended for f in record.faults if f.recovered is not None and f.after == f.life]
    return {
        "faults": len(record.faults),
        "lives": len(record.lives),
        "steps": len(record.completions()),
        "results": sum(len(steps) for life in record.lives for steps in life.steps.values()),
        "recovery_median_s": percentile(found, 0.5),
        "recovery_p95_s": percentile(found, 0.95),
        "recovery_median_job_kept_s": percentile(kept, 0.5),
        "recovery_p95_job_kept_s": percentile(kept, 0.95),
        "calm_steps_per_s": speed.calm,
        "outside_steps_per_s": speed.outside,
        "share": speed.share,
    }


def page(record: Record, verdicts: Sequence[Verdict], machine: str) -> str:
    """The whole page, self-contained."""
    good = all(v.good for v in verdicts)
    parts = [
        f"<h1>{len(record.faults)} faults on {record.nodes} nodes: {'passed' if good else 'FAILED'}</h1>",
        f"<p>Seed {record.seed}. {html.escape(machine)}.</p>",
        _table(("", "promise", "found", "wanted"), (_verdict(v) for v in verdicts)),
        "<h2>Throughput</h2><p>Steps a second that every rank has finished, second by second. A stripe reaches from "
        "the beginning of a fault to the recovery: "
        + ", ".join(f'<b style="color:{colour}">{name}</b>' for name, colour in _COLOURS.items())
        + ". The dashed line is the undisturbed pace, measured in the grey stretches. Hover for more.</p>",
        _plot(record),
        "<h2>Recovery</h2><p>From the end of a fault until steps come at their pace again.</p>",
        _table(("kind", "what is done", "times", "median", "95th percentile", "job"), _kinds(record)),
        "<h2>Faults</h2>",
        _table(("", "at", "kind", "node", "lasted", "recovery", "job", "what ranks were told"), _faults(record)),
    ]
    style = (
        "body{font:14px system-ui,sans-serif;max-width:1160px;margin:2rem auto;padding:0 1rem}h1{font-size:1.4rem}"
        "svg{width:100%}text{font-size:11px}table{border-collapse:collapse}td,th{padding:.2rem .7rem .2rem 0;"
        "text-align:left;vertical-align:top;border-bottom:1px solid #8884}.bad{color:#b00020;font-weight:bold}"
        "@media(prefers-color-scheme:dark){body{background:#16181d;color:#ddd}text{fill:#ddd}}"
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Faults</title>'
    body = "".join(parts)
    return f"<!doctype html><html lang=en><head>{head}<style>{style}</style></head><body>{body}</body></html>\n"


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """Cells are HTML."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _verdict(v: Verdict) -> tuple[str, ...]:
    mark = "kept" if v.good else '<span class="bad">NOT KEPT</span>'
    return (mark, *map(html.escape, (v.what, v.found, v.wanted)))


def _kinds(record: Record) -> Iterator[tuple[str, ...]]:
    for name, kind in KINDS.items():
        hit = [f for f in record.faults if f.fault.kind == name]
        took = [f.recovered - f.ended for f in hit if f.recovered is not None]
        if hit:
            fates = ", ".join(f"{n} {what}" for what in _COLOURS if (n := sum(fate(f) == what for f in hit)))
            yield name, html.escape(kind.what), str(len(hit)), _seconds(took, 0.5), _seconds(took, 0.95), fates
    every = recoveries(record)
    yield "<b>all</b>", "", str(len(record.faults)), _seconds(every, 0.5), _seconds(every, 0.95), ""


def _seconds(values: Sequence[float], share: float) -> str:
    return f"{percentile(values, share):.2f} s" if values else "-"


def _faults(record: Record) -> Iterator[tuple[str, ...]]:
    for f in record.faults:
        told: dict[str, int] = {}
        for failure in record.failures:
            if failure.life == f.life and f.after != f.life:
                what = failure.error or "nothing"
                told[what] = told.get(what, 0) + 1
        said = ", ".join(f"{what} on {n}" for what, n in told.items())
        yield (
            str(f.fault.number),
            f"{f.began - record.began:.1f} s",
            f.fault.kind,
            f"n{f.fault.node}",
            f"{f.ended - f.began:.1f} s",
            "-" if f.recovered is None else f"{f.recovered - f.ended:.2f} s",
            fate(f),
            html.escape("; ".join(text for text in (said, f.notes) if text)),
        )


def _plot(record: Record) -> str:
    times = [at - record.began for at, _ in record.completions()]
    end = max([*times, *(f.ended - record.began for f in record.faults), 1.0])
    counts = [0] * (math.floor(end) + 1)
    for t in times:
        counts[math.floor(t)] += 1
    top = 1.1 * max([*counts, 1])
    x_scale, y_scale = (_WIDTH - _LEFT) / len(counts), (_HEIGHT - 14) / top

    def x(seconds: float) -> float:
        return _LEFT + seconds * x_scale

    def y(rate: float) -> float:
        return _HEIGHT - rate * y_scale

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _BELOW}" role="img" aria-label="steps a second over time">']
    for start, stop in record.calm:
        parts.append(_stripe(x(start - record.began), x(stop - record.began), "#888", "undisturbed"))
    for f in record.faults:
        stop = f.recovered if f.recovered is not None else f.ended
        parts.append(_stripe(x(f.began - record.began), x(stop - record.began), _COLOURS[fate(f)], outcome(f).strip()))
        parts.append(f'<text x="{x(f.began - record.began):.1f}" y="10">{f.fault.number}</text>')
    for tick in _ticks(top, 5):
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(end, 12):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT + 15}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH}" y="{_HEIGHT + 30}" text-anchor="end">seconds</text>')
    calm = rates(record).calm
    parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(calm):.1f}" y2="{y(calm):.1f}" stroke="#2a9d5c" '
                 'stroke-dasharray="6 4"/>')  # fmt: skip
    line = " ".join(f"{x(i):.1f},{y(n):.1f} {x(i + 1):.1f},{y(n):.1f}" for i, n in enumerate(counts))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#2a9d5c" stroke-width="1.3"/></svg>')
    return "".join(parts)


def _stripe(left: float, right: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="14" width="{max(right - left, 1.5):.1f}" height="{_HEIGHT - 14}" fill="{colour}" '
        f'fill-opacity="0.28"><title>{html.escape(title)}</title></rect>'
    )


def _ticks(end: float, most: int) -> list[float]:
    """At most about ``most`` round numbers from 0 to ``end``."""
    rough = end / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    return [i * step for i in range(int(end / step * (1 + 1e-9)) + 1)]
