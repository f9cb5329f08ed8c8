"""What the rows of ``benchmarks.training`` say: a table a cell, the rules of acceptance as met or missed, a picture.

What may live here: figures from finished rows. What may not: running anything.

A cell is a model, a number of nodes and the rate of the links. Losses belong to a codec and not to a cell: neither the
links nor DDP's buckets change what is computed, but by ``auto``, whose plan follows the links.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import common
from benchmarks.lab import netns
from benchmarks.training_systems import AUTO, COMPUTE, DDP

NEAR_BEST: Final = 1.10  #: auto's step over the best static one's
NEAR_LOSS: Final = 1.02  #: a loss over DDP's in float32
OF_COMPUTE: Final = {"slow": 1.6, "fast": 1.4}  #: auto's step over computing alone, below and from 1 Gbit/s
NOISE: Final = 1.05  #: medians closer than this are the same
SEEDS: Final = 3  #: of which a loss is the mean
STEPS: Final = 10  #: that a median is of


class Cell(NamedTuple):
    """Where steps were timed."""

    model: str
    nodes: int
    network: str

    def __str__(self) -> str:
        return f"{self.model}, {self.nodes} nodes, {self.network}"


@dataclass(frozen=True, slots=True)
class Loss:
    """What a codec (or a hook of DDP's) trains to: means over seeds, and over DDP's float32 with the same seeds.

    ``elsewhere`` says with what it was measured where that is other nodes or links than asked for. ``failed``: seeds
    that came to no loss.
    """

    loss: float
    held_out: float
    ratio: float | None
    held_out_ratio: float | None
    seeds: int
    elsewhere: str = ""
    failed: int = 0


def cells(rows: Iterable[common.Row]) -> dict[Cell, dict[str, common.Row]]:
    """The timed rows of each cell by method, in the order they were first measured; rounds are merged.

    Of several rounds the median is that of their medians, so that of three or more one beside a busy neighbour counts
    little; the percentiles are the lowest and highest. A system failed if all its rounds did; ``failed``: how many did.
    """
    found: dict[Cell, dict[str, list[common.Row]]] = {}
    for row in rows:
        if row["mode"] == "speed":
            cell = Cell(row["model"], row["nodes"], row["network"])
            found.setdefault(cell, {}).setdefault(row["method"], []).append(row)
    return {cell: {m: _merged(turns) for m, turns in timed.items()} for cell, timed in found.items()}


def _merged(turns: Sequence[common.Row]) -> common.Row:
    good = [r for r in turns if "error" not in r]
    if not good:
        return turns[0]
    return good[0] | {
        "median_s": statistics.median(r["median_s"] for r in good),
        "p10_s": min(r["p10_s"] for r in good),
        "p90_s": max(r["p90_s"] for r in good),
        "runs": sum(r["runs"] for r in good),
        "failed": len(turns) - len(good),
        **{key: statistics.median(r[key] for r in good) for key in ("step_bytes", "worker_cpu_s", "daemon_cpu_s")},
    }


def _name(row: common.Row) -> str:
    """What a loss belongs to: the codec or the comm, without the buckets; auto's to links of a rate as well."""
    shaped = row["comm"] == AUTO and row["network"] not in netns.UNSHAPED
    return f"{AUTO}, {row['network']}" if shaped else row["codec"] or row["comm"]


def losses(rows: Iterable[common.Row], model: str, nodes: int) -> dict[str, Loss]:
    """By codec or comm: those of ``nodes`` nodes where there are any, else of however many were measured."""
    every = [r for r in rows if r["mode"] == "loss" and r["model"] == model]
    measured = [r for r in every if "error" not in r]
    here = [r for r in measured if r["nodes"] == nodes]
    counts = sorted({r["nodes"] for r in measured})
    elsewhere = "" if here else f" ({' and '.join(map(str, counts))} nodes)"
    measured = here or measured
    exact = {(r["nodes"], r["seed"]): r for r in measured if r["comm"] == "ddp"}
    out = {}
    for name in dict.fromkeys(map(_name, measured)):
        own = [r for r in measured if _name(r) == name]
        pairs = [(r, exact[r["nodes"], r["seed"]]) for r in own if (r["nodes"], r["seed"]) in exact]

        def ratio(key: str, pairs: Sequence[tuple[common.Row, common.Row]] = pairs) -> float | None:
            return statistics.fmean(r[key] / base[key] for r, base in pairs) if pairs else None

        means = [statistics.fmean(r[key] for r in own) for key in ("loss", "loss_held_out")]
        failed = sum(_name(r) == name and (not here or r["nodes"] == nodes) for r in every if "error" in r)
        out[name] = Loss(means[0], means[1], ratio("loss"), ratio("loss_held_out"), len(own), elsewhere, failed)
    return out


def judge(cell: Cell, timed: Mapping[str, common.Row], trained: Mapping[str, Loss]) -> list[common.Verdict]:
    """The rules of acceptance in one cell; only the best of auto's rows is judged. No rows of auto: no verdicts."""
    good = {m: r for m, r in timed.items() if "error" not in r}
    auto = _fastest(good.values(), "comm", AUTO)
    if auto is None:
        return []
    static = acceptable(good, trained)
    ran = common.Verdict(
        f"auto ran in every round, {STEPS} steps or more", not auto.get("failed") and auto["runs"] >= STEPS,
        f"{auto.get('failed', 0)} rounds failed, {auto['runs']} steps",
    )  # fmt: skip
    return [
        *([] if ran.met else [ran]),
        _near_best(auto, static, trained),
        _faster_than_ddp(auto["median_s"], good),
        _of_compute(auto["median_s"], cell, good),
        _not_slower_than_none(auto["median_s"], static),
    ]


def acceptable(timed: Mapping[str, common.Row], trained: Mapping[str, Loss]) -> list[common.Row]:
    """gradcomm's static systems that are not known to train to a loss more than 2 % above DDP's, the fastest first."""
    rows = [r for r in timed.values() if r["comm"] == "gradcomm" and "error" not in r]
    rows = [r for r in rows if (_ratio(trained, r) or 0.0) <= NEAR_LOSS]
    return sorted(rows, key=lambda r: r["median_s"])


def _known(trained: Mapping[str, Loss], row: common.Row) -> Loss | None:
    """What the system of a timed row trains to. For auto that on links of no rate stands in, and says so."""
    found, other = trained.get(_name(row)), trained.get(row["comm"])
    if found is None and other is not None and _name(row) != row["comm"]:
        return replace(other, elsewhere=f"{other.elsewhere} (unshaped)")
    return found or other


def _ratio(trained: Mapping[str, Loss], row: common.Row) -> float | None:
    known = _known(trained, row)
    return known.ratio if known is not None else None


def _loss(trained: Mapping[str, Loss], row: common.Row) -> str:
    known = _known(trained, row)
    if known is None or known.ratio is None:
        return "was not measured"
    seeds = f" ({known.seeds} seeds, {known.failed} failed)" if known.failed or known.seeds < SEEDS else ""
    return f"x {known.ratio:.3f}{known.elsewhere}{seeds}"


def _near_best(auto: common.Row, static: Sequence[common.Row], trained: Mapping[str, Loss]) -> common.Verdict:
    rule = f"auto within {NEAR_BEST - 1:.0%} of the best static system, at a loss within {NEAR_LOSS - 1:.0%}"
    if not static:
        return common.Verdict(rule, None, "no static system was measured")
    best, own = static[0], _ratio(trained, auto)
    theirs, seconds = _ratio(trained, best), auto["median_s"]
    # A timed job may use at once what one that is trained waits with: see docs/training.md.
    detail = (
        f"{seconds / best['median_s']:.2f} of {best['method']}; loss, late families waiting for their time: "
        f"{_loss(trained, auto)}, that of {best['method']} {_loss(trained, best)}"
    )
    sure = [r for r in static if _ratio(trained, r) is not None]
    mine = _known(trained, auto)
    # also where it diverged, no number is below NaN, or came to no loss at all
    lost = (own is not None and not own <= NEAR_LOSS) or (mine is not None and mine.failed > 0)
    if lost or (sure and seconds > NEAR_BEST * sure[0]["median_s"]):
        return common.Verdict(rule, False, detail)
    # A loss over other links, which plans follow, or of fewer seeds says nothing for sure.
    known = theirs is not None and mine is not None and own is not None and not mine.elsewhere and mine.seeds >= SEEDS
    return common.Verdict(rule, True if known and seconds <= NEAR_BEST * best["median_s"] else None, detail)


def _faster_than_ddp(auto: float, timed: Mapping[str, common.Row]) -> common.Verdict:
    ratios = {m: timed[m]["median_s"] / auto for m in DDP if m in timed}
    detail = ", ".join(f"{m} takes {ratio:.2f} of it" for m, ratio in ratios.items()) or "no hook was measured"
    lost = any(ratio <= 1.0 for ratio in ratios.values())
    return common.Verdict(
        "auto faster than every DDP hook", False if lost else True if len(ratios) == len(DDP) else None, detail
    )


def _of_compute(auto: float, cell: Cell, timed: Mapping[str, common.Row]) -> common.Verdict:
    limit = compute_limit(cell)
    rule = f"auto at most {limit} times computing alone"
    if COMPUTE not in timed:
        return common.Verdict(rule, None, "computing alone was not measured")
    ratio = auto / timed[COMPUTE]["median_s"]
    return common.Verdict(rule, ratio <= limit, f"{ratio:.2f}")


def compute_limit(cell: Cell) -> float:
    """How many times computing alone a step may take."""
    slow = cell.network not in netns.UNSHAPED and netns.bits_per_second(cell.network) < 10**9
    return OF_COMPUTE["slow" if slow else "fast"]


def _not_slower_than_none(auto: float, static: Sequence[common.Row]) -> common.Verdict:
    rule = "auto not slower than none where compression cannot help"
    dense = [r for r in static if r["codec"] == "none"]
    compressed = [r for r in static if r["codec"] != "none"]
    if not dense or not compressed:
        return common.Verdict(rule, None, "none or every codec is missing")
    if compressed[0]["median_s"] < dense[0]["median_s"]:
        return common.Verdict(rule, None, f"it helps here: {compressed[0]['method']} is faster than none")
    ratio = auto / dense[0]["median_s"]
    return common.Verdict(rule, ratio <= NOISE, f"{ratio:.2f} of none; medians within {NOISE - 1:.0%} count as equal")


# ------------------------------------------------------------------------------------------------ text
def table(timed: Mapping[str, common.Row], trained: Mapping[str, Loss]) -> str:
    """A cell in markdown, with what each system trains to where that was measured."""
    head = (
        "system",
        "step",
        "p10 to p90",
        "steps",
        "x compute",
        "CPU of rank + daemon",
        "MB sent",
        "loss x ddp",
        "held out x ddp",
    )
    lines = [_line(head), _line(["---"] * len(head))]
    base = timed.get(COMPUTE, {}).get("median_s")
    for method, row in timed.items():
        if "error" in row:
            lines.append(_line([f"`{method}`", f"failed: {row['error']}", *[""] * (len(head) - 2)]))
            continue
        known = _known(trained, row)
        lines.append(
            _line(
                [
                    f"`{method}`",
                    common.show_seconds(row["median_s"]),
                    f"{common.show_seconds(row['p10_s'])} to {common.show_seconds(row['p90_s'])}",
                    str(row["runs"]),
                    f"{row['median_s'] / base:.2f}" if base else "",
                    f"{common.show_seconds(row['worker_cpu_s'])} + {common.show_seconds(row['daemon_cpu_s'])}",
                    f"{row['step_bytes'] / 1e6:.2f}",
                    _show(known.ratio, known.elsewhere) if known else "",
                    _show(known.held_out_ratio, known.elsewhere) if known else "",
                ]
            )
        )
    return "\n".join(lines)


def loss_table(trained: Mapping[str, Loss]) -> str:
    """What every system trained to, in markdown."""
    head = ("system", "seeds", "loss", "x ddp", "held out", "x ddp")
    lines = [_line(head), _line(["---"] * len(head))]
    for name, loss in trained.items():
        cells = [str(loss.seeds), f"{loss.loss:.3f}", _show(loss.ratio)]
        lines.append(_line([f"`{name}`", *cells, f"{loss.held_out:.3f}", _show(loss.held_out_ratio)]))
    return "\n".join(lines)


def _line(parts: Iterable[str]) -> str:
    return f"| {' | '.join(parts)} |"


def _show(ratio: float | None, elsewhere: str = "") -> str:
    return "" if ratio is None else f"{ratio:.3f}{elsewhere}"


def summary(cell: Cell, timed: Mapping[str, common.Row], trained: Mapping[str, Loss]) -> str:
    """The verdicts of a cell; without auto, what the best static system would come to."""
    verdicts = judge(cell, timed, trained)
    if verdicts:
        return "\n".join(f"- {v}" for v in verdicts)
    good = {m: r for m, r in timed.items() if "error" not in r}
    best = next(iter(acceptable(good, trained)), None)
    if best is None or COMPUTE not in good:
        return "- nothing to judge: auto was not measured, nor computing alone and a static system"
    ratio = best["median_s"] / good[COMPUTE]["median_s"]
    hooks = [f"{good[m]['median_s'] / best['median_s']:.2f} of {m}" for m in DDP if m in good]
    return (
        f"- auto was not measured; the best static system, {best['method']}, takes {ratio:.2f} of computing alone "
        f"(auto may take {compute_limit(cell)}); its speed is {', '.join(hooks) or 'not compared with any hook'}"
    )


def overview(rows: Sequence[common.Row]) -> str:
    """All cells in one table: what is fastest of each kind, and auto as a multiple of it."""
    head = ("cell", "compute", "ddp", "fastest of DDP's", "none", "fastest static", "auto")
    head += ("auto x compute", "x static", "x DDP's")
    lines = [_line(head), _line(["---"] * len(head))]
    for cell, timed in cells(rows).items():
        good = [r for r in timed.values() if "error" not in r]
        compute, ddp, none = (
            _fastest(good, "comm", COMPUTE),
            _fastest(good, "comm", "ddp"),
            _fastest(good, "codec", "none"),
        )
        hook, auto = _fastest(good, "comm", *DDP), _fastest(good, "comm", AUTO)
        static = next(iter(acceptable(timed, losses(rows, cell.model, cell.nodes))), None)
        shown = [_step(compute), _step(ddp), _step(hook, True), _step(none), _step(static, True), _step(auto)]
        ratios = [f"{auto['median_s'] / r['median_s']:.2f}" if auto and r else "" for r in (compute, static, hook)]
        lines.append(_line([str(cell), *shown, *ratios]))
    return "\n".join(lines)


def _fastest(rows: Iterable[common.Row], key: str, *values: str) -> common.Row | None:
    return min((r for r in rows if r[key] in values), key=lambda r: r["median_s"], default=None)


def _step(row: common.Row | None, named: bool = False) -> str:
    if row is None:
        return ""
    return common.show_seconds(row["median_s"]) + (f" `{row['method']}`" if named else "")


def report(rows: Sequence[common.Row]) -> str:
    """Everything that was measured, in markdown."""
    parts = [f"### All cells\n\n{overview(rows)}"] if len(cells(rows)) > 1 else []
    for cell, timed in cells(rows).items():
        trained = losses(rows, cell.model, cell.nodes)
        parts.append(f"### {cell}\n\n{table(timed, trained)}\n\n{summary(cell, timed, trained)}")
    for model, nodes in dict.fromkeys((r["model"], r["nodes"]) for r in rows if r["mode"] == "loss"):
        own = [r for r in rows if r["mode"] == "loss" and (r["model"], r["nodes"]) == (model, nodes)]
        if trained := losses(own, model, nodes):
            parts.append(f"### Loss of {model}, {nodes} nodes\n\n{loss_table(trained)}")
        failed = [r for r in own if "error" in r]
        parts += [f"`{r['method']}` with seed {r['seed']} failed: {r['error']}" for r in failed]
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------ picture
def plot(rows: Sequence[common.Row], path: Path) -> None:
    """Step times as bars, a panel a cell; the line is computing alone. Nothing where no cell was timed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {c: {m: r for m, r in timed.items() if "error" not in r} for c, timed in cells(rows).items()}
    found = {c: timed for c, timed in found.items() if timed}
    if not found:
        return
    columns = min(3, len(found))
    height = 1.0 + 0.22 * max(map(len, found.values()))
    down = -(-len(found) // columns)
    figure, panels = pyplot.subplots(
        down, columns, figsize=(5.2 * columns, height * down), dpi=80, layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(found) :]:
        panel.set_visible(False)
    for panel, (cell, timed) in zip(panels.flat, found.items(), strict=False):
        colours = ["C1" if r["comm"] == AUTO else "C0" if r["comm"] == "gradcomm" else "C7" for r in timed.values()]
        times = [r["median_s"] for r in timed.values()]
        drawn = panel.barh(list(timed), times, color=colours)
        panel.bar_label(drawn, [common.show_seconds(t) for t in times], padding=3, fontsize=7)
        if COMPUTE in timed:
            panel.axvline(timed[COMPUTE]["median_s"], color="C3", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_xlim(0.7 * min(times), 2.5 * max(times))
        panel.set_title(str(cell), fontsize=9)
        panel.tick_params(labelsize=7)
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("seconds a step", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
