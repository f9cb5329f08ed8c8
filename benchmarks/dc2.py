"""DC2's controllers on a link whose rate changes, beside ratios that never change.

``python -m benchmarks.dc2 [--steps 2700] [--seeds 1] [--nodes 4] [--apart] [--json FILE] [--plot FILE.png]``. Nothing
is sent: steps are those of ``gcserver.planner.dc2_link``, ResNet-50 over links of 1 Gbit/s times 1, 1/2, 1/5 or 1/10, a
new rate every 100 steps, all nodes' links alike (``--apart``: each its own). Columns: mean ratio, lowest and highest
tenth, how often the ratio turned back (share of steps), mean and 95th percentile of the network's delay, time of the
run. Then for each seed whether mean ratios come in the paper's order. Deterministic for a seed.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks import common
from benchmarks.common import Row, Table
from gcserver.planner.dc2 import LAWS, Controller, Dc2Config
from gcserver.planner.dc2_link import Played, RateProfile, Workload, play

GIGABIT = 1.25e8
#: the paper's uniform ratios, and no compression: four bytes an element are half of value and index
UNIFORM = {"0.001": 0.001, "0.1": 0.1, "none": 0.5}


def profiles(seed: int, nodes: int, apart: bool) -> list[RateProfile]:
    return [RateProfile(seed * 1000 + node if apart else seed, GIGABIT) for node in range(nodes)]


def run(system: str, links: list[RateProfile], steps: int, seed: int, config: Dc2Config | None = None) -> Played:
    """One run: ``system`` is a law, or a name in ``UNIFORM``."""
    nodes = [UNIFORM[system] if system in UNIFORM else Controller(system, config) for _ in links]  # type: ignore[arg-type]
    return play(nodes, links, steps, Workload(), seed)


def turns(ratios: np.ndarray) -> float:
    """Share of steps after which the ratio turned back: up after down or down after up."""
    moves = np.diff(ratios, axis=0)
    return float(np.mean(moves[1:] * moves[:-1] < 0.0))


def row(system: str, seed: int, played: Played) -> Row:
    return {
        "system": system, "seed": seed, "steps": len(played.ratios), "nodes": played.ratios.shape[1],
        "ratio_mean": float(played.ratios.mean()),
        "ratio_p10": float(np.quantile(played.ratios, 0.1)), "ratio_p90": float(np.quantile(played.ratios, 0.9)),
        "turns": turns(played.ratios), "delay_mean_s": float(played.delays.mean()),
        "delay_p95_s": float(np.quantile(played.delays, 0.95)), "total_s": played.seconds,
    }  # fmt: skip


#: the paper's order of mean ratios, lowest first, those of one place in any order
ORDER = (("DA2",), ("DA4", "DA5"), ("DA3",))


def verdict(rows: list[Row], seed: int) -> common.Verdict:
    """Whether a seed's mean ratios come in the paper's order."""
    mean = {row["system"]: row["ratio_mean"] for row in rows if row["seed"] == seed}
    met = all(mean[a] < mean[b] for low, high in pairwise(ORDER) for a in low for b in high)
    detail = ", ".join(f"{law} {mean[law]:.3f}" for laws in ORDER for law in laws)
    return common.Verdict(
        f"mean ratios of seed {seed} in the order {' < '.join(map(' and '.join, ORDER))}", met, detail
    )


def plot(path: Path, runs: dict[str, Played]) -> None:
    """Rate, ratio and delay of the first node over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rate, ratio, delay) = pyplot.subplots(3, 1, sharex=True, figsize=(10, 9), layout="constrained")
    first = next(iter(runs.values()))
    rate.step(range(len(first.rates)), 8e-6 * first.rates[:, 0], color="black", linewidth=1)
    rate.set_ylabel("link, Mbit/s")
    for i, (name, played) in enumerate(runs.items()):
        style = {"label": name, "linewidth": 1, "color": f"C{i}"}
        if name not in UNIFORM:
            ratio.plot(played.ratios[:, 0], **style)
        if name != "none":  # would hide the others
            delay.plot(np.convolve(played.delays[:, 0], np.ones(10) / 10, "valid"), **style)
    ratio.set_ylabel("ratio")
    delay.set_ylabel("delay, s (mean of 10 steps)")
    delay.set_xlabel("step")
    for axis in (ratio, delay):
        axis.legend(loc="upper right", ncols=7, fontsize="small")
    for axis in (rate, ratio, delay):
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2700)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--apart", action="store_true", help="every node's link has a profile of its own")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="the first seed's runs")
    args = parser.parse_args()
    table = Table(
        {"seed, system": 16, "ratio": 9, "p10": 9, "p90": 9, "turns": 8, "delay s": 9, "p95 s": 9, "run s": 9}
    )
    print(table.head())
    rows: list[Row] = []
    for seed in args.seeds:
        links = profiles(seed, args.nodes, args.apart)
        runs = {system: run(system, links, args.steps, seed) for system in (*UNIFORM, *LAWS)}
        for system, played in runs.items():
            rows.append(r := row(system, seed, played))
            ratios = [f"{r[f'ratio_{name}']:.4f}" for name in ("mean", "p10", "p90")]
            delays = [f"{r[f'delay_{name}_s']:.3f}" for name in ("mean", "p95")]
            print(
                table.line(f"{seed}, {system}", *ratios, f"{r['turns']:.2f}", *delays, f"{r['total_s']:.0f}"),
                flush=True,
            )
        print(verdict(rows, seed), flush=True)
        if args.plot and seed == args.seeds[0]:
            plot(args.plot, runs)
    common.write_json(args.json, rows)


if __name__ == "__main__":
    main()
