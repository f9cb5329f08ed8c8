"""L-GreCo on the gradients of a small transformer: what it saves at equal error, and what deciding costs.

``python -m benchmarks.lgreco [--layers 4] [--width 248] [--steps 100] [--json FILE] [--quick]``

A GPT (``examples.gpt``, a token a byte) is trained on the sources of the standard library, one thread. Its gradients
are accumulated over windows of ten steps at the end of each fifth of the run, which stand for epochs. For every family
the table of errors is built from the last window and the levels decided; the ratio is float32 bytes over bytes sent, of
the same gradients, at the default for all layers ("uniform") and at L-GreCo's levels, whose error is at most as large.
"k-means" keeps no budget, so its error is given beside its ratio, and "less" is how many times less L-GreCo sends at
k-means' error.

Levels by weights, of times or of priorities, are compared with those by bytes on a simulated exchange.

Overhead is accumulating, the table and the decision, over the time of CADENCE training steps. Then what is wanted, as
met or missed.

What may live here: this measurement, uniform ratios beside the paper's, and times of the decision alone. What may not:
how anything is decided (``gcserver.planner``).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import common, lgreco_times
from gcserver.planner import errors, uniform, uniform_shapes
from gcserver.planner.accordion import accordion
from gcserver.planner.errors import F32, LevelTable
from gcserver.planner.errors_lowrank import lowrank_table
from gcserver.planner.errors_quantised import qsgd_table
from gcserver.planner.errors_sparse import sparse_table
from gcserver.planner.kmeans import kmeans_levels
from gcserver.planner.lgreco import LevelSets, solve

#: training steps between decisions: the paper's Transformer-XL decides every 1000, its ResNets once an epoch
CADENCE = 1000
WINDOW = 10
WINDOWS = 5
LEAST = WINDOW * WINDOWS
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
#: so many seconds for a decision over so many layers and levels,
DECISION_S, DECISION = 0.05, (161, 10)
#: so much of training time, and so near the paper's uniform ratios
OVERHEAD, AS_PRINTED = 0.01, 0.02

Gradients = Mapping[str, F32]


@dataclass(frozen=True, slots=True)
class Family:
    """A codec with its default level and range, and the least that the gain over uniform should be."""

    name: str
    range: str
    table: Callable[[Gradients], LevelTable]
    wanted: float | None = None


def families() -> list[Family]:
    """The paper's ranges (section 5.1), and the wider one of its code for Transformer-XL."""
    four, one, ten = errors.quantiser_levels(4), errors.sparse_levels(10_000), errors.sparse_levels(100_000)
    coarse = errors.sparse_levels(10_000, 21)
    narrow, wide = errors.rank_levels(8), errors.rank_levels(8, narrower=4, wider=4)
    return [
        Family("qsgd, 4 bits", "2..8", lambda g: qsgd_table(g, four, 4), 1.1),
        Family("powersgd, rank 8", "2..32", lambda g: lowrank_table(g, wide, 8), 1.4),
        Family("powersgd, rank 8", "4..16", lambda g: lowrank_table(g, narrow, 8)),
        Family("topk, 1 %", "0.1..10 %", lambda g: sparse_table(g, one, 10_000), 2.0),
        Family("topk, 1 %", "21 of them", lambda g: sparse_table(g, coarse, 10_000)),
        Family("topk, 10 %", "1..100 %", lambda g: sparse_table(g, ten, 100_000), 2.0),
    ]


# ------------------------------------------------------------------------------------------------ training
@dataclass(frozen=True, slots=True)
class Run:
    """Mean gradients of each window; losses of the first and last step; median seconds of a step and of an addition."""

    windows: list[dict[str, F32]]
    losses: tuple[float, float]
    step_s: float
    add_s: float


def train(layers: int, width: int, steps: int) -> Run:
    """Trains the model; every number but the times is the same on every machine with the same Python and torch."""
    import torch

    from examples import gpt, text

    torch.set_num_threads(1)
    model = gpt.GPT(gpt.Shape(layers=layers, width=width))
    optimizer = gpt.Optimizer(model)
    data, generator = text.load(1 << 19), torch.Generator().manual_seed(0)
    every = steps // WINDOWS
    windows: list[dict[str, F32]] = []
    losses, step_s, add_s = [], [], []
    sums: dict[str, F32] = {}
    for step in range(every * WINDOWS):
        start = time.perf_counter()
        inputs, targets = text.batch(data.train, 8, model.shape.context, generator)
        value = gpt.loss(model(inputs), targets)
        value.backward()
        middle = time.perf_counter()
        if step % every >= every - WINDOW:
            for name, p in model.named_parameters():
                assert p.grad is not None
                sums[name] = sums.get(name, np.float32(0)) + p.grad.numpy() / np.float32(WINDOW)
            if step % every == every - 1:
                windows.append(sums)
                sums = {}
        after = time.perf_counter()
        optimizer.step()
        step_s.append(time.perf_counter() - after + middle - start)
        add_s.append(after - middle)
        losses.append(value.item())
    added = [s for i, s in enumerate(add_s) if i % every >= every - WINDOW]
    return Run(windows, (losses[0], losses[-1]), statistics.median(step_s), statistics.median(added))


# ------------------------------------------------------------------------------------------------ measurements
def uniform_rows() -> list[common.Row]:
    """Uniform ratios from shapes, beside those of the paper's tables 2 and 3."""
    r18, r50, txl = uniform_shapes.resnet18_cifar(), uniform_shapes.resnet50(), uniform_shapes.transformer_xl()
    cases = [
        ("ResNet18", "powersgd, rank 4", uniform.lowrank_ratio(r18, 4), 72.2),
        ("ResNet50", "powersgd, rank 4", uniform.lowrank_ratio(r50, 4), 66.5),
        ("Transformer-XL", "powersgd, rank 32", uniform.lowrank_ratio(txl, 32), 14.1),
        ("ResNet18", "qsgd, 4 bits", uniform.qsgd_ratio(r18, 4), 7.8),
        ("ResNet50", "qsgd, 4 bits", uniform.qsgd_ratio(r50, 4), 7.7),
        ("Transformer-XL", "qsgd, 4 bits", uniform.qsgd_ratio(txl, 4), 7.8),
        ("ResNet18", "topk, 1 %", uniform.topk_ratio(r18, 0.01), 48.1),
        ("ResNet50", "topk, 1 %", uniform.topk_ratio(r50, 0.01), 45.6),
        ("Transformer-XL", "topk, 10 %", uniform.topk_ratio(txl, 0.1), 4.9),
    ]
    return [{"system": "uniform", "model": m, "codec": c, "ratio": r, "paper": p} for m, c, r, p in cases]


def drawn(layers: int, levels: int) -> LevelTable:
    """A table of layers whose errors fall with the level, each at its own rate."""
    rng = np.random.default_rng(layers)
    each = np.arange(1, levels + 1)
    n = np.floor(np.exp(rng.uniform(np.log(1e3), np.log(1e7), layers)))
    rates = 4 * rng.uniform(0.1, 0.9, layers) / levels
    losses = rng.lognormal(0, 1, layers)[:, None] * np.exp(-rates[:, None] * each[None, :])
    names = tuple(f"layer{i}" for i in range(layers))
    return LevelTable(names, each, n[:, None] * each[None, :], losses, np.full(layers, levels // 2))


def dp_rows(runs: int) -> list[common.Row]:
    """Seconds of a decision, from table to levels, for several numbers of layers and levels, in turn."""
    cases = {(i, c): drawn(i, c) for i, c in ((19, 57), (62, 7), (161, 10), (161, 100), (400, 10))}
    times: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for table in cases.values():
        solve(table)  # compiles, touches pages
    for _ in range(runs):
        for case, table in cases.items():
            times[case].append(_timed(lambda t=table: solve(t))[1])
    return [common.median_row("dp", t, layers=i, levels=c) for (i, c), t in times.items()]


def gain_rows(run: Run, runs: int) -> list[common.Row]:
    """One row a family: ratios, errors, times."""
    gradients, rows = run.windows[-1], []
    dense = 4.0 * sum(g.size for g in gradients.values())
    layers = np.arange(len(gradients))
    for family in families():
        made = [_timed(lambda f=family: f.table(gradients)) for _ in range(runs + 1)][1:]
        table: LevelTable = made[0][0]
        decided = [_timed(lambda t=table: solve(t)) for _ in range(runs + 1)][1:]
        found: LevelSets = decided[0][0]
        groups = table.with_default(kmeans_levels(table))
        table_s, dp_s = (statistics.median(t for _, t in each) for each in (made, decided))
        spent = WINDOW * run.add_s + table_s + dp_s
        rows.append(
            {
                "system": "lgreco", "codec": family.name, "range": family.range, "levels": table.levels.size,
                "layers": layers.size, "uniform": dense / table.default_bytes, "ratio": dense / found.full.bytes,
                "gain": table.default_bytes / found.full.bytes, "wanted": family.wanted,
                "error_share": found.full.error / found.e_max, "kmeans": dense / groups.default_bytes,
                "kmeans_error_share": float(groups.errors[layers, groups.default].sum()) / found.e_max,
                "kmeans_gain": groups.default_bytes / solve(groups).full.bytes,
                "table_s": table_s, "dp_s": dp_s, "step_s": run.step_s, "cadence": CADENCE,
                "overhead": spent / (CADENCE * run.step_s), "median_s": table_s + dp_s, "runs": runs,
            }
        )  # fmt: skip
    return rows


def budget_rows(run: Run) -> list[common.Row]:
    """What smaller budgets send, all from one decision."""
    gradients = run.windows[-1]
    dense = 4.0 * sum(g.size for g in gradients.values())
    rows = []
    for family in families():
        if family.wanted is not None:
            sets = solve(family.table(gradients), alphas=ALPHAS)
            for s in sets.sets:
                share = s.error / sets.e_max
                rows.append(
                    {
                        "system": "budget",
                        "codec": family.name,
                        "alpha": s.alpha,
                        "ratio": dense / s.bytes,
                        "error": share,
                    }
                )
    return rows


def adaptive_rows(run: Run) -> list[common.Row]:
    """Table 4 in small: powersgd, all windows, ranks a quarter of the paper's; errors in units of uniform's."""
    dense = 4.0 * sum(g.size for g in run.windows[0].values())
    ranges = {"uniform": "8", "L-GreCo": "2..16", "Accordion": "4, 16", "k-means": "2..16", "both": "2..32"}
    sent, lost = (dict.fromkeys(ranges, 0.0) for _ in range(2))
    before: list[float] | None = None
    for gradients in run.windows:
        table, wider = (lowrank_table(gradients, np.arange(2, most + 1), 8) for most in (16, 32))
        norms = [float(np.linalg.norm(g.astype(np.float64))) for g in gradients.values()]
        critical = wider.with_default(accordion(before, norms, low=4, high=16))
        before = norms
        chosen = {
            "uniform": table,
            "L-GreCo": table.with_default(solve(table).full.levels),
            "Accordion": critical,
            "k-means": table.with_default(kmeans_levels(table)),
            "both": wider.with_default(solve(critical).full.levels),
        }
        for method, levels in chosen.items():
            sent[method] += levels.default_bytes
            lost[method] += float(np.take_along_axis(levels.errors, levels.default[:, None], 1).sum())
    return [
        {
            "system": "adaptive", "method": m, "range": r, "ratio": dense * len(run.windows) / sent[m],
            "error": lost[m] / lost["uniform"],
        }
        for m, r in ranges.items()
    ]  # fmt: skip


def weight_rows(run: Run) -> list[common.Row]:
    """Levels by what bytes cost a step, on a simulated exchange (``lgreco_times``)."""
    gradients = run.windows[-1]
    elements = np.array([g.size for g in gradients.values()], np.float64)
    return [
        {"system": "weights", "codec": f.name, "weights": name, "bytes": sent, "seconds": seconds}
        for f in families()
        if f.wanted is not None
        for name, (sent, seconds) in lgreco_times.weighted(f.table(gradients), elements).items()
    ]


def verdicts(rows: Sequence[common.Row]) -> list[common.Verdict]:
    """One line for each target, with what decides it."""
    of = {kind: [r for r in rows if r["system"] == kind] for kind in ("uniform", "dp", "lgreco")}
    (decision,) = (r["median_s"] for r in of["dp"] if (r["layers"], r["levels"]) == DECISION)
    printed = max(of["uniform"], key=lambda r: abs(r["ratio"] / r["paper"] - 1))
    dearest = max(of["lgreco"], key=lambda r: r["overhead"])
    # Of the ranges that are tried around one default, the best one is the one to use.
    best: dict[str, common.Row] = {}
    for row in of["lgreco"]:
        if row["wanted"] is not None and row["gain"] > best.get(row["codec"], row | {"gain": 0.0})["gain"]:
            best[row["codec"]] = row
    said = [
        common.Verdict(
            f"{name}: at least {row['wanted']:.1f} times fewer bytes than uniform at its error",
            row["gain"] >= row["wanted"],
            f"{row['gain']:.2f} with levels {row['range']}, at {row['error_share']:.4f} of the error",
        )
        for name, row in best.items()
    ]
    layers, levels = DECISION
    off = abs(printed["ratio"] / printed["paper"] - 1)
    return [
        *said,
        common.Verdict(
            f"{layers} layers x {levels} levels in {common.show_seconds(DECISION_S)}", decision <= DECISION_S,
            common.show_seconds(decision),
        ),
        common.Verdict(
            f"less than {OVERHEAD:.0%} of training time", dearest["overhead"] < OVERHEAD,
            f"{dearest['overhead']:.3%} for {dearest['codec']}, {dearest['range']}",
        ),
        common.Verdict(
            f"uniform ratios within {AS_PRINTED:.0%} of the paper's", off <= AS_PRINTED,
            f"{printed['ratio']:.1f} of {printed['paper']:.1f} for {printed['model']}, {printed['codec']}",
        ),
    ]  # fmt: skip


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


# ------------------------------------------------------------------------------------------------ tables
def show(rows: Sequence[common.Row]) -> None:
    """Prints the rows of each kind as a table."""
    for system, (title, columns, cells) in TABLES.items():
        table = common.Table(columns)
        print(f"\n{title}\n{table.head()}")
        for row in rows:
            if row["system"] == system:
                print(table.line(*cells(row)), flush=True)


TABLES: dict[str, tuple[str, dict[str, int], Callable[[common.Row], list[str]]]] = {
    "uniform": (
        "Uniform ratios, from shapes",
        {"model": 16, "codec": 20, "ratio": 8, "paper": 8},
        lambda r: [r["model"], r["codec"], f"{r['ratio']:.1f}", f"{r['paper']:.1f}"],
    ),
    "dp": (
        "The decision alone",
        {"layers": 8, "levels": 8, "time": 10},
        lambda r: [str(r["layers"]), str(r["levels"]), common.show_seconds(r["median_s"])],
    ),
    "lgreco": (
        "At no more error than uniform",
        {
            "codec": 18, "range": 12, "uniform": 9, "L-GreCo": 9, "gain": 7, "wanted": 8, "error": 8, "k-means": 9,
            "error ": 7, "less": 6, "table": 10, "decision": 10, "overhead": 10,
        },
        lambda r: [
            r["codec"], r["range"], f"{r['uniform']:.1f}", f"{r['ratio']:.1f}", f"{r['gain']:.2f}",
            "" if r["wanted"] is None else f"{r['wanted']:.1f}", f"{r['error_share']:.4f}", f"{r['kmeans']:.1f}",
            f"{r['kmeans_error_share']:.2f}", f"{r['kmeans_gain']:.2f}",
            common.show_seconds(r["table_s"]), common.show_seconds(r["dp_s"]), f"{r['overhead']:.3%}",
        ],
    ),
    "budget": (
        "Smaller budgets, from the same decision",
        {"codec": 18, "alpha": 8, "ratio": 8, "error": 8},
        lambda r: [r["codec"], f"{r['alpha']:.2f}", f"{r['ratio']:.1f}", f"{r['error']:.4f}"],
    ),
    "adaptive": (
        "Adaptive methods over all windows, powersgd; both: L-GreCo with Accordion's choice as its defaults",
        {"method": 12, "ranks": 8, "ratio": 8, "error": 8},
        lambda r: [r["method"], r["range"], f"{r['ratio']:.1f}", f"{r['error']:.2f}"],
    ),
    "weights": (
        f"Weighted by what a byte costs, {lgreco_times.BUCKETS} buckets over a simulated link; of levels by bytes",
        {"codec": 18, "weights": 12, "bytes": 8, "seconds": 8},
        lambda r: [r["codec"], r["weights"], f"{r['bytes']:.3f}", f"{r['seconds']:.3f}"],
    ),
}  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the model (default 4)")
    parser.add_argument("--width", type=int, default=248, help="of the model, a multiple of 4 (default 248)")
    parser.add_argument("--steps", type=int, default=100, help=f"of training, at least {LEAST} (default 100)")
    parser.add_argument("--runs", type=int, default=7, help="repetitions of what is timed (default 7)")
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps, some ten seconds")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.quick:
        args.layers, args.width, args.steps, args.runs = 2, 128, LEAST, 3
    if args.steps < LEAST or args.runs < 1:
        parser.error(f"expected --steps of at least {LEAST} and --runs of at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    print(common.describe(common.machine()))
    run = train(args.layers, args.width, args.steps)
    elements = sum(g.size for g in run.windows[-1].values())
    print(
        f"GPT of {args.layers} layers, {elements / 1e6:.2f} M parameters: loss {run.losses[0]:.2f} to "
        f"{run.losses[1]:.2f} in {args.steps} steps of {common.show_seconds(run.step_s)}; overhead: of {CADENCE} steps"
    )
    rows = [*uniform_rows(), *dp_rows(args.runs), *gain_rows(run, args.runs), *budget_rows(run)]
    rows += [*adaptive_rows(run), *weight_rows(run)]
    show(rows)
    print("", *verdicts(rows), sep="\n")
    model = {"layers": args.layers, "width": args.width, "steps": args.steps, "elements": elements}
    common.write_json(args.json, rows, model=model)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
