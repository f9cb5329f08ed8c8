"""Every codec through real daemons: two nodes, DistributedDataParallel, a loss that falls, the same weights on both.

What may live here: codecs in training. What may not: their bytes (tests/unit/codecs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gcserver.codecs import names, parse
from tests.integration.cluster import Cluster, parts
from tests.integration.codec_rates import RATES

STEPS = 64


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    with Cluster(tmp_path_factory.mktemp("codecs"), nodes=2, options={"min_compress_bytes": "4KiB"}) as cluster:
        arguments = {"rates": RATES, "steps": STEPS}
        (outcomes,) = parts(
            cluster.run(
                "tests.integration.cluster:several",
                [0, 1],
                functions=[("tests.integration.ddp_workers:every_codec", arguments)],
            )
        )
        yield [o.ok() for o in outcomes]


def test_no_codec_is_forgotten() -> None:
    assert {parse(spec).name for spec in RATES} == set(names())


@pytest.mark.parametrize("spec", RATES)
def test_a_model_learns(trained: list[dict[str, Any]], spec: str) -> None:
    first, second = (ranks[spec] for ranks in trained)
    assert first["hash"] == second["hash"], "the same bytes on every rank"
    for rank in (first, second):
        assert rank["last"] < 0.75 * rank["first"], rank
