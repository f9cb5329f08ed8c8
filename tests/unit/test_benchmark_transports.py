"""The benchmark of transports: its arguments, its ratio. The measurement itself needs daemons and libucp."""

from __future__ import annotations

import pytest

from benchmarks import transports, turns
from gcserver import config


def test_the_ratio_is_of_time_over_ucx_to_time_over_zeromq() -> None:
    args = transports.parse(["--sizes", "4KiB"])
    result = {
        "times": {"zmq": [1.0, 2.0, 3.0], "ucx tcp": [3.0, 3.0, 9.0]},
        "cpu": dict.fromkeys(transports.WAYS, 0.002),
    }
    rows = turns.rows(result, args, 4096, "transport", tuple(transports.WAYS))
    assert [(row["transport"], row["ratio"]) for row in rows] == [("zmq", 1.0), ("ucx tcp", 1.5)]
    assert transports.show(rows[1]).split() == ["4", "KiB", "ucx", "tcp", "3.00", "s", "1.50", "2.00", "ms"]


@pytest.mark.parametrize("way", transports.WAYS)
def test_daemons_understand_what_they_are_told(way: str) -> None:
    settings, _ = transports.WAYS[way]
    assert config.load(flags=settings).node.transport == way.split()[0]
