"""A trace's file at a collector (`collector.py`).

What may live here: tests of `gcserver/admin/otlp.py`. What may not: files by themselves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gcserver.admin import gcctl, otlp, tracefile
from gcserver.admin.exits import Exit
from tests.unit.admin.collector import Collector, collecting, plain
from tests.unit.admin.traces import LENGTH, STEPS, parts, settled


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    with path.open("w") as out:
        tracefile.write(settled(parts()), out)
    return path


def test_each_step_is_a_trace_of_all_nodes(collector: Collector, file: Path) -> None:
    sent = otlp.send(file, collector.url)
    spans = collector.spans()
    slices = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] in "Xb"]
    assert sent == len(spans) == len(slices) + STEPS
    ids = {span.span_id for _, span in spans}
    assert len(ids) == len(spans) and all(len(i) == 8 for i in ids)
    traces = {span.trace_id for _, span in spans}
    assert len(traces) == STEPS and all(len(i) == 16 for i in traces)
    for trace in traces:
        of = [(resource, span) for resource, span in spans if span.trace_id == trace]
        (root,) = [span for _, span in of if not span.parent_span_id]
        assert root.name == "step"
        nodes = {resource["service.instance.id"]: span for resource, span in of if span.parent_span_id == root.span_id}
        assert sorted(nodes) == ["a", "b"] and {span.name for span in nodes.values()} == {"step"}
        for resource, span in of:
            assert resource["service.name"] == "gradcomm"
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano
            if span.name != "step":
                assert span.parent_span_id == nodes[resource["service.instance.id"]].span_id
        step = plain(root.attributes)["gradcomm.step"]
        assert root.start_time_unix_nano == pytest.approx((1.7e9 + 1000.0 + step * LENGTH) * 1e9, abs=2e3)
        (encode,) = [span for _, span in of if span.name == "encode"]
        assert plain(encode.attributes)["gradcomm.tensor"] == "ln"
        assert encode.end_time_unix_nano - encode.start_time_unix_nano == pytest.approx(2e6, abs=1e4)
    assert {s.name for _, s in spans} >= {"ready", "push", "encode", "wire", "aggregate", "decode", "pull"}


def test_gcctl_exports_without_a_daemon(collector: Collector, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--context", "gone", "trace", "export", str(file), "--otlp", collector.url]
    assert gcctl.main(said) == 0, "no daemon is asked, so which one does not matter"
    assert capsys.readouterr().out == f"{len(collector.spans())} spans sent to {collector.url}\n"
    assert gcctl.main(["trace", "export", f"{file}.gone", "--otlp", collector.url]) == Exit.USAGE
    assert capsys.readouterr().err == f"gcctl: {file}.gone cannot be read: No such file or directory\n"


def test_the_same_step_has_the_same_identity_wherever_it_is_exported(collector: Collector, file: Path) -> None:
    for _ in range(2):
        otlp.send(file, collector.url)
    first, second = collector.requests
    assert first == second


def test_many_spans_go_in_several_requests(collector: Collector, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "BATCH", 10)
    sent = otlp.send(file, collector.url)
    assert len(collector.requests) == -(-sent // 10) and len(collector.spans()) == sent


def test_a_collector_that_refuses_is_an_error(collector: Collector, file: Path) -> None:
    collector.status = 404
    with pytest.raises(otlp.ExportError, match=f"{collector.url} took only 0 of"):
        otlp.send(file, collector.url)


def test_without_the_packages_it_says_which_extra_has_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(otlp.ExportError, match=r"pip install 'gradcomm\[otel\]'"):
        otlp.send(file, "http://127.0.0.1:1/v1/traces")


@pytest.mark.parametrize(
    "content", ["{}", "[1", '{"otherData":{"made_by":"other"},"traceEvents":[]}', "[]", "[" * 100_000]
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(otlp.ExportError, match="is no trace that `gcctl trace stop --out` wrote"):
        otlp.send(path, "http://127.0.0.1:1/v1/traces")
    with pytest.raises(otlp.ExportError, match="cannot be read: No such file"):
        otlp.send(tmp_path / "none.json", "http://127.0.0.1:1/v1/traces")


def step(**arguments: object) -> list[dict[str, object]]:
    """The events of one step of node a."""
    both = {"pid": 1, "tid": 0, "id": "step1", "cat": "step", "name": "step of w"}
    node = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "a"}}
    return [node, {"ph": "b", "ts": 0, "args": arguments, **both}, {"ph": "e", "ts": 5, **both}]


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("otherData", {"made_by": "gradcomm"}),
        ("traceEvents", [5]),
        ("traceEvents", step(job_id="0", group="w", step=1)),
        ("traceEvents", step(job="gpt", job_id=[], group="w", step=1)),
        ("traceEvents", [{**step()[0], "args": {"name": []}}, *step(job="gpt", job_id="0", group="w", step=1)[1:]]),
    ],
)
def test_a_file_that_was_changed_is_refused(file: Path, tmp_path: Path, part: str, instead: object) -> None:
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**json.loads(file.read_text()), part: instead}))
    with pytest.raises(otlp.NoTraceError, match="was changed since"):
        otlp.send(path, "http://127.0.0.1:1/v1/traces")
