"""Workers of a lab: their variables, their logs, what they are told, and what is said when one fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab import netns
from benchmarks.lab.workers import WorkerError, Workers

SCRIPT = """
import json, os, sys
log = open(sys.argv[sys.argv.index("--log") + 1], "w")
def say(**line): print(json.dumps(line), file=log, flush=True)
say(rank=os.environ["RANK"], size=os.environ["WORLD_SIZE"])
word = sys.stdin.readline().strip()
say(word=word)
if word == "fail" and os.environ["RANK"] == "1":
    sys.exit("a reason at length")
"""


def started(folder: Path, script: str = SCRIPT) -> Workers:
    (folder / "script.py").write_text(script)
    return Workers("some name", [str(folder / "script.py")], netns.Loopback(2).hosts, None, folder, "job")


def test_logs_are_followed_and_a_word_is_passed_on(tmp_path: Path) -> None:
    heard: list[int] = []
    with started(tmp_path) as ranks:
        ranks.wait(60.0, until=lambda: all(ranks.lines))
        assert [log[0] for log in ranks.lines] == [{"rank": "0", "size": "2"}, {"rank": "1", "size": "2"}]
        ranks.say("go on")
        ranks.wait(60.0, lambda: heard.append(min(map(len, ranks.lines))))
        assert [log[1] for log in ranks.lines] == [{"word": "go on"}] * 2
    assert set(heard) <= {2}


def test_a_failure_names_the_run_and_quotes_what_was_printed(tmp_path: Path) -> None:
    with started(tmp_path) as ranks:
        ranks.say("fail")
        with pytest.raises(WorkerError, match="some name: workers ended with") as caught:
            ranks.wait(60.0)
    assert "rank 1: a reason at length" in str(caught.value)
    assert all(w.poll() is not None for w in ranks.workers)


def test_workers_that_do_not_come_to_it_are_ended(tmp_path: Path) -> None:
    with started(tmp_path) as ranks, pytest.raises(WorkerError, match=r"took longer than 0.2 s"):
        ranks.wait(0.2)
    (tmp_path / "other").mkdir()
    with started(tmp_path / "other", "") as ranks, pytest.raises(WorkerError, match="ended before they had done"):
        ranks.wait(60.0, until=lambda: all(ranks.lines))


def test_a_word_to_one_that_has_ended_is_a_failure_of_the_run(tmp_path: Path) -> None:
    def tell() -> None:
        with started(tmp_path, "") as ranks:
            for worker in ranks.workers:
                worker.wait(60.0)
            ranks.say("go on")

    with pytest.raises(WorkerError, match="ended before it was told 'go on'"):
        tell()
