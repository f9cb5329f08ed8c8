"""A step as predicted beside the same as measured, drawn: a page, a picture, or a trace for Chrome and Perfetto.

What may live here: from the jobs of a plan's timeline to a file. What may not: predicting, measuring.
"""

from __future__ import annotations

import argparse
import html
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gcserver.admin.exits import CtlError
from gcserver.admin.tables import clean

FORMS: Final = (".html", ".png", ".json")
_SIDES: Final = ("predicted", "measured")
#: by the first word of a resource; others take what is left
_COLOURS: Final = {
    "worker": "#8d99ae",
    "push": "#c9ada7",
    "lane": "#e07a5f",
    "out": "#3d85c6",
    "in": "#81b29a",
    "exchange": "#7c9885",
}
_OTHER: Final = "#b0a8d0"
#: longest step that is drawn, s
_LONGEST: Final = 1e6
#: rows that fit into a picture of matplotlib's
_MOST_ROWS: Final = 1000
_WIDTH, _ROW = 1000, 18
#: of a letter of the row names, 11 px
_LETTER = 6.2
_ABOUT: Final = {
    "predicted": "as the planner expects it, all nodes",
    "measured": "one step of the node that was asked, as its lanes worked it off; what its workers computed is told by "
    "their pushes",
}

Job = dict[str, Any]


class DrawingError(CtlError):
    """No drawing could be made; says why and what to do."""


def target(text: str) -> Path:
    """A file to draw to. Raises argparse.ArgumentTypeError."""
    path = Path(text)
    if path.suffix not in FORMS:
        raise argparse.ArgumentTypeError(f"expected a file that ends in {', '.join(FORMS)}, got {text!r}")
    return path


def draw(answer: dict[str, Any], path: Path) -> None:
    """Write the timelines in GetPlan's answer to ``path``. Raises DrawingError."""
    drawn = [(_label(d, side), side, list(filter(_usable, d[side]))) for d in answer["domains"] for side in _SIDES]
    sides = [(label, side, jobs) for label, side, jobs in drawn if jobs]
    # Of models that are planned for: no step of single calls is traced.
    unmeasured = [d["label"] for d in answer["domains"] if d["predicted"] and not any(map(_usable, d["measured"]))]
    if not sides:
        raise DrawingError(
            "no step was predicted, and none ended while it was waited for: let the job run some steps, or give it a "
            "mode (`gcctl set-plan --mode auto`)"
        )
    try:
        if path.suffix == ".json":
            path.write_text(
                json.dumps({"traceEvents": list(_events(sides)), "displayTimeUnit": "ms"}), encoding="utf-8"
            )
        elif path.suffix == ".html":
            path.write_text(_page(str(answer["job"]), sides, unmeasured), encoding="utf-8")
        else:
            _picture(str(answer["job"]), sides, path)
    except OSError as error:
        raise DrawingError(f"{path} cannot be written: {error.strerror}") from None


def _usable(job: Job) -> bool:
    """Whether it may lie in a step: a daemon that is none says anything."""
    return -_LONGEST <= job["start_seconds"] <= job["end_seconds"] <= _LONGEST


def _label(domain: dict[str, Any], side: str) -> str:
    other = side == "predicted" and domain["forecast"] is not None and not domain["forecast"]["plan_version"]
    return f"{domain['label']}{', only proposed' if other else ''}"


def colour(resource: str) -> str:
    """Of a resource, whichever of its kind it is: lanes are alike."""
    return _COLOURS.get(resource.partition(" ")[0], _OTHER)


def _rows(jobs: Sequence[Job]) -> dict[tuple[str, str], list[Job]]:
    """Jobs by (node, resource), in order of first start."""
    found: dict[tuple[str, str], list[Job]] = {}
    for job in sorted(jobs, key=lambda j: (j["node"], j["start_seconds"])):
        found.setdefault((job["node"], job["resource"]), []).append(job)
    return found


def _events(sides: Sequence[tuple[str, str, list[Job]]]) -> Iterator[dict[str, Any]]:
    """Chrome's trace events: a process for each side, a thread for each resource of a node; microseconds."""
    for pid, (label, side, jobs) in enumerate(sides, 1):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{label} {side}"}}
        for tid, ((node, resource), row) in enumerate(_rows(jobs).items(), 1):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": f"{node} {resource}"}}
            for job in row:
                start, length = job["start_seconds"] * 1e6, (job["end_seconds"] - job["start_seconds"]) * 1e6
                yield {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length, "name": job["what"], "cat": side}


def _page(job: str, sides: Sequence[tuple[str, str, list[Job]]], unmeasured: Sequence[str]) -> str:
    end = max(1e-6, *(j["end_seconds"] for _, _, jobs in sides for j in jobs))
    left = 12 + _LETTER * max(len(f"{j['node']} {j['resource']}") for _, _, jobs in sides for j in jobs)
    scale = (_WIDTH - left - 30) / end  # the last tick's text needs some room
    parts = [f"<h1>A step of {html.escape(job)}</h1><p>Hover over a bar to see what it is. Times are in ms.</p>"]
    for label, side, jobs in sides:
        rows = _rows(jobs)
        last = max(j["end_seconds"] for j in jobs)
        height = len(rows) * _ROW + 2
        parts.append(f"<h2>{html.escape(label)}, {side}: {last * 1e3:.1f} ms</h2><p>{_ABOUT[side]}</p>")
        parts.append(f'<svg viewBox="0 0 {_WIDTH} {height + 18}" role="img" aria-label="{side}">')
        for tick in _ticks(end):
            x = left + tick * scale
            parts.append(f'<line x1="{x:.2f}" y1="0" x2="{x:.2f}" y2="{height}"/>')
            parts.append(f'<text x="{x:.2f}" y="{height + 13}" text-anchor="middle">{tick * 1e3:.4g}</text>')
        for y, ((node, resource), row) in enumerate(rows.items()):
            parts.append(f'<text x="0" y="{y * _ROW + 13}">{html.escape(f"{node} {resource}")}</text>')
            for j in row:
                x, width = left + j["start_seconds"] * scale, max((j["end_seconds"] - j["start_seconds"]) * scale, 0.5)
                title = f"{j['what']}: {j['start_seconds'] * 1e3:.2f} to {j['end_seconds'] * 1e3:.2f} ms"
                parts.append(
                    f'<rect x="{x:.2f}" y="{y * _ROW + 2}" width="{width:.2f}" height="{_ROW - 4}" '
                    f'fill="{colour(resource)}"><title>{html.escape(title)}</title></rect>'
                )
        parts.append("</svg>")
    parts += [f"<p>{html.escape(label)}: no step ended while it was waited for.</p>" for label in unmeasured]
    style = (
        "body{font:14px system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem}h1{font-size:1.4rem}"
        "svg{width:100%}text{font-size:11px}rect{stroke:#fff;stroke-width:.3}line{stroke:#8888;stroke-width:.5}"
        "@media(prefers-color-scheme:dark){body{background:#16181d;color:#ddd}text{fill:#ddd}rect{stroke:#16181d}}"
    )
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(job)}</title>'
    return f"<!doctype html><html lang=en><head>{head}<style>{style}</style></head><body>{''.join(parts)}</body></html>"


def _ticks(end: float) -> list[float]:
    """Five to thirteen round times from 0 to ``end``, s."""
    rough = end / 12
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    return [i * step for i in range(int(end / step * (1 + 1e-9)) + 1)]


def _picture(job: str, sides: Sequence[tuple[str, str, list[Job]]], path: Path) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise DrawingError("a .png needs matplotlib (`pip install matplotlib`); .html and .json need nothing") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [len(_rows(jobs)) for _, _, jobs in sides]
    if sum(heights) > _MOST_ROWS:
        raise DrawingError(
            f"{sum(heights)} rows are too many for a .png (at most {_MOST_ROWS}); .html and .json take any"
        )
    figure, axes = plt.subplots(
        len(sides), 1, sharex=True, squeeze=False, figsize=(12, 1 + 0.35 * sum(heights)),
        gridspec_kw={"height_ratios": heights}, layout="constrained",
    )  # fmt: skip
    for axis, (label, side, jobs) in zip(axes[:, 0], sides, strict=True):
        rows = _rows(jobs)
        for y, ((_, resource), row) in enumerate(rows.items()):
            bars = [(j["start_seconds"] * 1e3, (j["end_seconds"] - j["start_seconds"]) * 1e3) for j in row]
            axis.broken_barh(bars, (y - 0.4, 0.8), color=colour(resource))
        # Names are no formulas, whatever is in them.
        axis.set_yticks(range(len(rows)), [clean(f"{node} {resource}") for node, resource in rows], parse_math=False)
        axis.invert_yaxis()
        axis.set_title(clean(f"{job}, {label}, {side}"), fontsize=10, parse_math=False)
    axes[-1, 0].set_xlabel("ms")
    figure.savefig(path, dpi=120)
    plt.close(figure)
