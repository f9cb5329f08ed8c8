"""Accordion's two levels, alone and as the defaults of L-GreCo."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.planner.accordion import accordion, critical
from gcserver.planner.errors import TableError
from gcserver.planner.kmeans import kmeans_levels
from gcserver.planner.lgreco import solve
from tests.unit.planner.lgreco_tables import spectra_table


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (None, 1.0, True),
        (0.0, 1.0, True),
        (2.0, 1.0, True),
        (2.0, 1.01, False),
        (2.0, 2.99, False),
        (2.0, 3.0, True),
        (1.0, 1.0, False),
        (float("nan"), 1.0, True),
        (1.0, float("inf"), True),
    ],
)
def test_a_regime_is_critical_where_the_norm_changed_by_half(before, now, expected):
    assert critical(before, now) is expected


def test_levels():
    assert accordion(None, [1, 1], low=16, high=64) == (64, 64)
    assert accordion([1, 1, 1], [0.9, 0.4, 2], low=16, high=64) == (16, 64, 64)
    assert accordion([1, 1], [1, 1], low=16, high=64, rate_decayed=True) == (64, 64)
    assert accordion([1.0], [0.8], low=16, high=64, eta=0.1) == (64,)
    for more, said in (
        ({"low": 65}, "low: expected"),
        ({"eta": 0.0}, "eta: expected"),
        ({"before": [1.0]}, "before: "),
    ):
        with pytest.raises(TableError, match=said):
            accordion(**({"before": [1.0, 1.0], "now": [1.0, 1.0], "low": 16, "high": 64} | more))


def test_with_lgreco_it_sends_less_than_either_alone():
    """Table 4's order over epochs in which norms fall fast, then slowly: uniform < accordion, l-greco < both."""
    layers, epochs = 24, 16
    norms = [np.full(layers, 0.4 ** min(e, 2) * 0.9**e) for e in range(epochs)]
    ranks = list(range(8, 129))
    sent = dict.fromkeys(("uniform", "accordion", "lgreco", "both", "kmeans"), 0.0)
    for e in range(epochs):
        table = spectra_table(0, layers, ranks, 32, norms=norms[e])
        narrow = spectra_table(0, layers, ranks[:57], 32, norms=norms[e])
        chosen = accordion(norms[e - 1].tolist() if e else None, norms[e].tolist(), low=16, high=64)
        sent["uniform"] += table.default_bytes
        sent["accordion"] += table.with_default(chosen).default_bytes
        sent["lgreco"] += solve(narrow).full.bytes
        sent["both"] += solve(table.with_default(chosen)).full.bytes
        sent["kmeans"] += narrow.with_default(kmeans_levels(narrow)).default_bytes
    assert sent["both"] < 0.8 * min(sent["accordion"], sent["lgreco"])
    assert max(sent["accordion"], sent["lgreco"], sent["kmeans"]) < sent["uniform"]
