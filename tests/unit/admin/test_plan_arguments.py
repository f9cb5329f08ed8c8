"""Rules as operators write them.

What may live here: tests of `gcserver/admin/plan_arguments.py`. What may not: calls of a daemon (`test_gcctl.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from gcserver.admin.plan_arguments import rule, rules_in_file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*=none", ("*", "none", "")),
        ("layer.*=topk(ratio=0.01)+ef(decay=0.9)", ("layer.*", "topk(ratio=0.01)+ef(decay=0.9)", "")),
        ("layer.*=topk(ratio=0.01)@all", ("layer.*", "topk(ratio=0.01)", "all")),
        (" w@2.* = fp16 @ owner ", ("w@2.*", "fp16", "owner")),
    ],
)
def test_a_rule(text: str, expected: tuple[str, str, str]) -> None:
    found = rule(text)
    assert (found.pattern, found.codec, found.scheme) == expected


@pytest.mark.parametrize("text", ["", "fp16", "=fp16", "w=", "w=@all", "w=fp16@", "\udcff=fp16", "w=fp16@\udcff"])
def test_no_rule(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected .*got "):
        rule(text)


def test_rules_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([{"pattern": "*", "codec": "fp16"}, {"pattern": "w", "codec": "none", "scheme": "all"}]))
    found = [(r.pattern, r.codec, r.scheme) for r in rules_in_file(str(path))]
    assert found == [("*", "fp16", ""), ("w", "none", "all")]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"pattern": "*"}, "expected a list of rules, got dict"),
        ([{"pattern": "*", "codec": "fp16"}, {"pattern": "*"}], "rule 1: expected an object"),
        ([{"pattern": "*", "codec": 16}], "rule 0: expected an object"),
        ([{"pattern": "*", "codec": "fp16", "origin": "plan"}], "rule 0: expected an object"),
        (["*=fp16"], "rule 0: expected an object"),
        ([{"pattern": "\ud800", "codec": "fp16"}], "rule 0: "),
    ],
)
def test_a_file_of_something_else(tmp_path: Path, content: Any, why: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(argparse.ArgumentTypeError, match="plan.json: " + why):
        rules_in_file(str(path))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"none\.json: No such file"):
        rules_in_file(str(tmp_path / "none.json"))
    with pytest.raises(argparse.ArgumentTypeError, match="zero: expected JSON, got more than 16777216 bytes"):
        rules_in_file("/dev/zero")
    for content in (b"*=fp16", b"\xff\xff", b"[" * 100_000):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(argparse.ArgumentTypeError, match="text: expected JSON, got "):
            rules_in_file(str(tmp_path / "text"))


def test_a_file_of_more_rules_than_a_request_has_room_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    rules = [
        {"pattern": f"layers.{i}.attention.output.dense.weight", "codec": "topk(ratio=0.01)"} for i in range(10_000)
    ]
    path.write_text(json.dumps(rules))
    assert len(rules_in_file(str(path))) == len(rules)
    path.write_text(json.dumps(rules * 2))
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"plan.json: expected rules of 960 KiB at most, .*, got 12\d\d KiB"
    ):
        rules_in_file(str(path))
