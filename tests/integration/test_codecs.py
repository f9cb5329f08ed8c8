"""Every codec through real daemons: two nodes, DistributedDataParallel, a loss that falls, the same weights on both.

What may live here: codecs in training. What may not: their bytes (tests/unit/codecs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gcserver.codecs import names, parse
from tests.integration.cluster import Cluster, parts

#: spec and the learning rate at which it trains the small model: what sends bare signs takes steps of that length
RATES = {
    "none": 0.5,
    "fp16": 0.5,
    "bf16": 0.5,
    "topk(ratio=0.01)": 0.5,
    "topk(ratio=0.01,packed=1,values=16)": 0.5,
    "topk(ratio=0.01)+momentum": 0.05,
    "randomk(ratio=0.1)": 0.5,
    "randomk(ratio=0.5,unbiased=1)": 0.2,
    "dgc(ratio=0.01)": 0.05,
    "threshold(value=0.001)": 0.5,
    "redsync(ratio=0.01)": 0.5,
    "gaussiank(ratio=0.01)": 0.5,
    "sidco-e(ratio=0.01)": 0.5,
    "sidco-gp(ratio=0.01)": 0.5,
    "sidco-p(ratio=0.01)+ef(decay=0.9)": 0.5,
    "onebit": 0.2,
    "signsgd": 0.002,
    "signum": 0.002,
    "efsignsgd": 0.2,
    "qsgd": 0.5,
    "qsgd(bits=2)+ef": 0.2,
    "terngrad": 0.2,
    "natural": 0.5,
    "powersgd(rank=4)": 0.5,
}
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
