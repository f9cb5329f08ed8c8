"""What command lines of benchmarks accept and refuse, and a run of parts that are made up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks import command
from benchmarks.lab import daemons, netns


def test_values_are_read() -> None:
    assert command.counts("2,4") == [2, 4]
    assert (command.size("1KiB"), command.sizes("1KiB,1MiB")) == (1024, [1024, 1 << 20])
    assert command.networks("1gbit,loopback,unshaped,2.5mbit") == ["1gbit", "loopback", "unshaped", "2.5mbit"]
    assert command.setting("node.cores=0-1,x=y") == ("node.cores", "0-1,x=y")
    assert command.setting("plan.profiles=") == ("plan.profiles", "")


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (command.count, "0", "whole number from 1 on, got '0'"),
        (command.count, "-1", "whole number"),
        (command.counts, "2,", "whole number from 1 on, got ''"),
        (command.size, "much", "size 'much': expected a number of bytes"),
        (command.sizes, "2MiB..1MiB", "expected FROM..TO"),
        (command.rate, "0gbit", "such as 100mbit"),
        (command.rate, "loopback", "got 'loopback'"),
        (command.network, "fast", "got 'fast'; or one of unshaped, loopback"),
        (command.networks, "1gbit,,", "got ''"),
        (command.setting, "node.lanes", "expected KEY=VALUE, got 'node.lanes'"),
        (command.setting, "=2", "expected KEY=VALUE"),
    ],
)
def test_values_are_refused_with_what_would_do(read: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        read(text)


def test_a_worker_does_its_task_and_nothing_else_does() -> None:
    done: list[netns.Host] = []
    task = netns.Host(1, "10.0.0.2", "eth0")
    args = command.parser("about", "less").parse_args(["--worker", msgspec.json.encode(task).decode()])
    assert command.worked(args, done.append, netns.Host) and done == [task]
    assert not command.worked(command.parser("about", "less").parse_args([]), done.append, netns.Host)


def test_parts_are_shown_one_after_the_other_and_kept_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(daemons, "warmup", lambda: None)
    args = command.parser("about", "less").parse_args(["--json", str(tmp_path / "rows.json")])
    parts = [("first", [[{"a": 1}, {"a": 2}]]), ("second", [[{"a": 3}], [{"a": 4}]])]
    assert command.run(args, command.written("x", ["--quick"]), parts, lambda row: f"row {row['a']}") == 0
    printed = capsys.readouterr().out.split("\n\n", 1)[1]
    assert printed.split("\n") == ["first", "row 1", "row 2", "", "second", "row 3", "row 4", ""]
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert (kept["command"], [row["a"] for row in kept["rows"]]) == ("python -m benchmarks.x --quick", [1, 2, 3, 4])


def test_a_network_that_cannot_be_had_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(netns, "probe", lambda: netns.Probe(None, "no tc here"))
    args = command.parser("about", "less").parse_args(["--network", "1gbit", "--json", str(tmp_path / "rows.json")])
    assert command.run(args, "x", [], str) == 1
    assert capsys.readouterr().err == "--network 1gbit: no tc here\n"
    assert not (tmp_path / "rows.json").exists()
