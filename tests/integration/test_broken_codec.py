"""A third party's codec that fails while it encodes ends the job that uses it, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.unit.codecs.test_registry import install

CODEC = """
import numpy as np
from gcserver.codecs import Codec, CodecError, Encoded

class Broken(Codec):
    id, name, units, conserves = 40001, "acme-broken", "mean", True

    def max_bytes(self, n, segments=1):
        return 4 * n

    def encode(self, x, state_in, state_out, out, segments, scale=1.0, seed=0, levels=None):
        raise ZeroDivisionError("no bits left")

    def check(self, payload, n):
        if len(payload) != 4 * n:
            raise CodecError("payload.nbytes", 4 * n, len(payload))

    def decode(self, payload, out, scale=1.0):
        np.multiply(payload.view("f4"), np.float32(scale), out=out)

    def decode_add(self, payload, acc):
        acc += payload.view("f4")
"""


def test_a_codec_that_raises_ends_its_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", "acme", {"acme": CODEC}, {"acme-broken": "acme:Broken"})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    training = "tests.integration.ddp_workers:training"
    with Cluster(tmp_path, nodes=2, options={"min_compress_bytes": "0"}, forked=False) as cluster:
        lanes = [daemon.lane_pids() for daemon in cluster.daemons]
        good = cluster.start(training, [0, 1], job="good", steps=120, compressions=["onebit"])
        good.wait_mark("onebit 3")
        bad = cluster.start(training, [0, 1], job="bad", steps=20, compressions=["acme-broken"])
        for outcome in bad.wait(60):
            # as torch hands on what a hook raises
            for words in ("CodecError: codec acme-broken failed encoding block ", "ZeroDivisionError: no bits left"):
                assert words in outcome.message, f"{outcome.error}: {outcome.message}\n{outcome.log}"
        values = [o.ok() for o in good.wait(90)]
        assert values[0]["hashes"] == values[1]["hashes"] and not values[0]["reconnects"]
        assert [daemon.lane_pids() for daemon in cluster.daemons] == lanes, "no lane was started again"
        # Who fails first ends the job on both nodes, so that the other may never come to encode.
        assert any("no bits left" in daemon.text() and "Traceback" in daemon.text() for daemon in cluster.daemons)
