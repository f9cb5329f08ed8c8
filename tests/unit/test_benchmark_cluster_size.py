"""What leaves a node in a step does not grow with the cluster, to the byte; messages do. At sizes that are cheap."""

from __future__ import annotations

import pytest

from benchmarks import cluster_size, common
from benchmarks.cluster_share import Share

MODEL = common.read_size("8MiB")


def test_bytes_do_not_grow_and_messages_do() -> None:
    rows = [cluster_size.cluster(nodes, MODEL, 2) for nodes in (2, 8, 32)]
    for row in rows:
        n = row["nodes"]
        assert row["payload_bytes_mean"] == row["payload_bytes_max"] == 2 * (n - 1) * MODEL / n
        assert row["payload_bytes_mean"] == row["payload_bytes_expected"] < 2 * MODEL
        assert row["messages_mean"] == row["messages_max"] == 2 * (n - 1)
        assert row["beats_mean"] == n - 1


def test_a_row_says_what_leaves_a_node() -> None:
    cells = cluster_size.show(cluster_size.cluster(2, MODEL, 2)).split()
    assert cells[:7] == ["2", "8.4", "8.4", "8.4", "0.000", "2.0", "1.0"]


def test_processes_play_the_same_cluster() -> None:
    one, two = (cluster_size.cluster(9, 9 << 20, 2, jobs) for jobs in (1, 3))
    times = {"jobs", "seconds", "cpu_seconds"}
    assert {k: v for k, v in one.items() if k not in times} == {k: v for k, v in two.items() if k not in times}


def test_a_model_that_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 3 pages"):
        Share(3, 1 << 20)


def test_a_wrong_sum_is_noticed() -> None:
    share = Share(4, 4 << 20)
    share._check(2, 20)
    with pytest.raises(AssertionError, match="is 21, expected 20"):
        share._check(2, 21)
