"""A job that compresses while the rate of its links changes: it is planned again, though its own frames do not tell,
and another plan is put in force on both nodes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from benchmarks.lab import daemons, netns
from examples.runs import Method, Record, Run

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(240)]

SETTINGS = {
    "plan.mode": "auto", "plan.quality": "fast", "plan.warmup_steps": "5", "plan.probe_every": "40s",
    "min_compress_bytes": "0",
}  # fmt: skip
WITHIN = 150.0


class Enough(Exception):
    """All has been seen."""


@pytest.mark.parametrize("rate", [None, "20mbit"])
def test_a_link_that_recovers_or_falls_under_a_compressed_job_is_planned_for(tmp_path: Path, rate: str | None) -> None:
    if netns.shaping() is None:
        pytest.skip(netns.probe().reason)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.Lab(2, "100mbit"))
        cluster = stack.enter_context(daemons.Daemons(lab.hosts, SETTINGS))
        method = Method("auto", "gradcomm")
        training = stack.enter_context(
            Run(method, lab.hosts, cluster, tmp_path, seconds=WITHIN, job=daemons.job_name("follow"))
        )
        changed, noticed = False, 0

        def since(node: int, position: int = 0) -> list[int]:
            """The plans that came into force at a node, by what its log says from a position on."""
            text = cluster[node].log.read_text(errors="replace")[position:]
            return [int(version) for version in re.findall(r": plan (\d+) from step", text)]

        def on_step(record: Record) -> None:
            nonlocal changed, noticed
            said = cluster[0].log.read_text(errors="replace")
            if not changed and re.search(r"plan 1 since step \d+: (sidco|topk|qsgd)", said):
                assert "has drifted" not in said
                lab.set_rate(rate)
                changed = True
            elif changed and not noticed:
                drifted = re.search(r"is planned: what was measured (has drifted by \d+%|cannot be compared)", said)
                noticed = drifted.end() if drifted else 0
            elif noticed and (new := since(0, noticed)) and new[-1] in since(1):
                raise Enough

        with contextlib.suppress(Enough):
            training.follow(on_step, WITHIN + 60.0)
            pytest.fail(f"nobody noticed (changed: {changed}, at {noticed}):\n{cluster[0].log_tail()}")
