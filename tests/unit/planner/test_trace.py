"""Traces: the nine files that come with the project, and files that are none."""

from __future__ import annotations

import pytest

from benchmarks import traces
from gcserver.planner.trace import TraceError, parse_trace

MODELS = {"LSTM": 10, "vgg16": 32, "gpt2": 148, "ugatit": 148, "resnet101": 314, "ncf": 12}


@pytest.mark.parametrize(("model", "tensors"), MODELS.items())
def test_a_trace_is_in_the_order_of_back_propagation(model: str, tensors: int) -> None:
    (trace,) = traces.read([model])
    assert len(trace.tensors) == tensors and trace.elements == sum(t.elements for t in trace.tensors)
    ready = [t.ready for t in trace.tensors]
    assert ready == sorted(ready) and trace.backward == ready[-1] > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "Expected `object`"),
        ('{"model": "\udcff"}', "utf-8"),
        ('{"model": "m"}', "tensors"),
        ('{"model": "m", "tensors": [{"name": "w", "elements": 0, "gap_us": 1}]}', "'w' has 0 elements"),
        ('{"model": "m", "tensors": [{"name": "w", "elements": 4, "gap_us": -1}]}', "gap of -1"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(TraceError, match="odd.json.*" + said):
        parse_trace(text.encode(errors="surrogateescape"), "odd.json")
