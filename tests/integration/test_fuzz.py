"""Hostile bytes to a running daemon: at every socket, then a real job."""

from __future__ import annotations

import pytest

from tests.fuzz import harness
from tests.fuzz.daemon import DOORS, Daemon

INPUTS = 150


@pytest.mark.slow
def test_a_daemon_that_was_fed_rubbish_answers_and_serves_a_job() -> None:
    result = harness.run(Daemon, 1, range(INPUTS), INPUTS)
    assert not result.failures, "\n".join(f.error for f in result.failures)
    assert set(result.outcomes) == set(DOORS)
