"""MergeComp on traces: step times of its groupings beside its baselines, and what finding them takes.

``python -m benchmarks.mergecomp [--nodes 8] [--noise 0.05] [--own-cores] [--json FILE]``. Nothing is executed but the
planner: step times come from the timeline of ``gcserver.planner.mergecomp`` over the traces and the costs of six
codecs. The columns, all step times divided by that of the best cut into two groups (``opt2``, all cuts tried):

* ``layer``, ``whole``, ``naive``: every tensor by itself, one group, two groups of as many tensors each;
* ``search``: the measured search without noise, and the groupings it asked for;
* ``noisy``: the worst of five where each time it is told is off by ``--noise`` / sqrt(20), as a mean of 20 steps is;
* ``fitted``: two groups at most from costs fitted to measurements off by ``--noise`` each, and the steps measured;
* ``auto``: Algorithm 2 with up to 8 groups, the groups it took, and milliseconds to find them.

Then what is wanted of the worst of all rows, as met or missed.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks import common, traces
from benchmarks.common import Row, Table
from gcserver.planner.fit import AffineCost, fit_affine
from gcserver.planner.mergecomp import MergeModel, merge, merge_model, step_time, two_group_times
from gcserver.planner.mergecomp_groups import layer_wise, naive, whole_model
from gcserver.planner.mergecomp_search import MeasuredSearch, probe_groupings
from gcserver.planner.trace import Trace

#: us to encode and decode 2^20 elements on a V100 (Espresso's artifact), and bytes a worker sends for an element
CODECS = {
    "fp16": (48.0, 2.0),
    "randk": (122.0, 0.04),
    "dgc": (424.0, 0.08),
    "qsgd": (400.0, 1.0),
    "efsignsgd": (410.0, 1 / 8),
    "onebit": (790.0, 1 / 8),
}
#: seconds for a message, and for a byte at 10 Gbit/s
LATENCY, BYTE = 150e-6, 0.8e-9
#: how often each probe grouping is measured for a fit, and each cut for the search; how many searches hear noisy times
REPEATS, MEAN_OF, SEARCHES = 5, 20, 5
#: at most so many groupings asked for, so far above the best two groups without noise, and fitted with it
MOST_ASKED, ABOVE, ABOVE_NOISY = 50, 0.001, 0.01


def costs(codec: str, nodes: int) -> tuple[AffineCost, AffineCost]:
    """(encode, exchange) of a codec: a ring all-reduce for fp16, an all-gather for the others.

    The paper's section 3.3: encoding grows by half from no elements to 2^20.
    """
    million, nbytes = CODECS[codec]
    encode = AffineCost(million * 1e-6 / 1.5, million * 1e-6 / 3 / (1 << 20))
    if codec == "fp16":
        return encode, AffineCost(2 * (nodes - 1) * LATENCY, 2 * (nodes - 1) / nodes * nbytes * BYTE)
    return encode, AffineCost((nodes - 1) * LATENCY, (nodes - 1) * nbytes * BYTE)


def measured_search(model: MergeModel, noise: float = 0.0, seed: int = 0) -> MeasuredSearch:
    """The measured search over ``model``, at its end; every time it is told is off by ``noise``, relative."""
    rng = np.random.default_rng(seed)
    search = MeasuredSearch(model.elements, noise=noise)
    while (grouping := search.next()) is not None:
        search.tell(step_time(model, grouping) * (1.0 + noise * float(np.clip(rng.standard_normal(), -3, 3))))
    return search


def measured_model(model: MergeModel, noise: float, seed: int = 0) -> tuple[MergeModel, int]:
    """What measuring ``model`` gives where every time is off by ``noise``, relative; and the steps it takes."""
    rng = np.random.default_rng(seed)
    groupings = probe_groupings(len(model.elements)) * REPEATS
    sizes = np.array([size for grouping in groupings for size in grouping.sizes(model.elements)], np.float64)
    encode, exchange = (
        fit_affine(sizes, (cost.base + cost.per_element * sizes) * _factors(rng, noise, sizes.shape)).cost
        for cost in (model.encode, model.exchange)
    )
    gaps = np.diff(model.ready, prepend=0.0)
    mean = (gaps * _factors(rng, noise, (len(groupings), gaps.size))).mean(axis=0)
    return MergeModel(model.elements, tuple(mean.cumsum().tolist()), encode, exchange, model.own_cores), len(groupings)


def _factors(rng: np.random.Generator, noise: float, shape: tuple[int, ...]) -> np.ndarray:
    return 1.0 + noise * np.clip(rng.standard_normal(shape), -3, 3)


def measure(trace: Trace, codec: str, nodes: int, noise: float, own_cores: bool) -> Row:
    """One row: every column of this page, times in seconds."""
    model = merge_model(trace, *costs(codec, nodes), own_cores)
    n = len(model.elements)
    cuts = two_group_times(model)
    search = measured_search(model)
    noisy = [measured_search(model, noise / MEAN_OF**0.5, seed) for seed in range(SEARCHES)]
    noisy_s = [step_time(model, one.best.grouping) for one in noisy]
    fit_from, steps = measured_model(model, noise)
    start = time.perf_counter()
    auto = merge(model)
    took = time.perf_counter() - start
    return {
        "trace": trace.model, "tensors": n, "codec": codec, "nodes": nodes, "own_cores": own_cores, "noise": noise,
        "opt2_s": float(cuts.min()), "opt2_cut": int(cuts.argmin()) + 1,
        "layer_s": step_time(model, layer_wise(n)), "whole_s": step_time(model, whole_model(n)),
        "naive_s": step_time(model, naive(n, 2)),
        "search_s": search.best.seconds, "search_asked": len(search.told), "search_ended": search.best.reason,
        "noisy_s": max(noisy_s), "noisy_each_s": noisy_s, "noisy_asked": max(len(one.told) for one in noisy),
        "fitted_s": step_time(model, merge(fit_from, most=2, alpha=0.0).grouping), "fitted_steps": steps,
        "auto_s": auto.seconds, "auto_groups": len(auto.grouping), "auto_ends": list(auto.grouping.ends),
        "auto_took_s": took, "auto_reason": auto.reason,
    }  # fmt: skip


def verdicts(rows: list[Row]) -> list[common.Verdict]:
    """One line for each target: the worst row, and whether it is met."""
    asked, noisy_asked = (max(row[f"{name}_asked"] for row in rows) for name in ("search", "noisy"))
    # (A search that runs out of questions has asked no more than it may, either.)
    spent = sum("spent" in row["search_ended"] for row in rows)
    search, noisy, fitted = (
        max(row[f"{name}_s"] / row["opt2_s"] for row in rows) - 1 for name in ("search", "noisy", "fitted")
    )
    within = [each / row["opt2_s"] - 1 <= ABOVE_NOISY for row in rows for each in row["noisy_each_s"]]
    said = f"{asked}, {noisy_asked} of noisy times" + (f"; {spent} of {len(rows)} ran out of them" if spent else "")
    few = max(asked, noisy_asked) <= MOST_ASKED and not spent
    return [
        common.Verdict(f"at most {MOST_ASKED} groupings asked for", few, said),
        common.Verdict(f"the measured search within {ABOVE:.1%} without noise", search <= ABOVE, f"{search:.2%}"),
        common.Verdict(
            f"the measured search within {ABOVE_NOISY:.0%} with noise",
            noisy <= ABOVE_NOISY,
            f"{noisy:.2%}; within it {sum(within)} of {len(within)}",
        ),
        common.Verdict(f"fitted within {ABOVE_NOISY:.0%} with noise", fitted <= ABOVE_NOISY, f"{fitted:.2%}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--own-cores", action="store_true", help="encoding does not delay computing")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    ratios = {"layer": 8, "whole": 8, "naive": 8, "search": 8, "noisy": 8, "fitted": 8, "auto": 8}
    table = Table({"trace, codec": 24, "opt2 ms": 9} | ratios | {"asked": 7, "steps": 7, "groups": 8, "ms": 7})
    print(table.head())
    rows: list[Row] = []
    for trace in traces.read():
        for codec in CODECS:
            row = measure(trace, codec, args.nodes, args.noise, args.own_cores)
            rows.append(row)
            relative = [f"{row[f'{name}_s'] / row['opt2_s']:.4f}" for name in ratios]
            counts = [str(row[name]) for name in ("search_asked", "fitted_steps", "auto_groups")]
            head = f"{trace.model}, {codec}", f"{1e3 * row['opt2_s']:.2f}"
            print(table.line(*head, *relative, *counts, f"{1e3 * row['auto_took_s']:.0f}"), flush=True)
    print(*verdicts(rows), sep="\n")
    common.write_json(args.json, rows)


if __name__ == "__main__":
    main()
