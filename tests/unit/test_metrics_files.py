"""What is generated of the metrics' catalogue is current, and what alerts and dashboard ask for exists.

What may live here: the files as they lie in the tree. What may not: Prometheus itself (`tests/system`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from gcserver.admin import catalogue
from tools import gen_grafana, gen_metrics_page

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "gradcomm.rules.yml"
LABELS = {
    name: {*s.labels, "le"} if name.endswith("_bucket") else {*s.labels} for s in catalogue.SERIES for name in s.samples
}
#: that Prometheus gives to whatever it scrapes
TARGETS = {"job", "instance"}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    """(name, labels it is chosen by) of every series that a parsed query asks for."""
    if isinstance(node, promql.VectorSelector):
        yield node.name, {m.name for m in node.matchers.matchers}
    for part in ("vector_selector", "expr", "lhs", "rhs", "param"):
        if (inner := getattr(node, part, None)) is not None:
            yield from selectors(inner)
    for argument in getattr(node, "args", None) or ():
        yield from selectors(argument)


def asked(query: str) -> list[tuple[str, set[str]]]:
    return list(selectors(promql.parse(query.replace("$__rate_interval", "5m"))))


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert gen_grafana.main(["--check"]) == 0 and gen_metrics_page.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="one pair of marks named series"):
        gen_metrics_page.filled("# Metrics")


def test_the_parser_sees_all_that_a_query_asks_for() -> None:
    query = 'max by (x) (rate(a_total{p="q"}[5m])) / (sum(b_bucket{r=~"s"}) > 0) or topk(3, -c) + c{d="e"} offset 5m'
    assert asked(query) == [("a_total", {"p"}), ("b_bucket", {"r"}), ("c", set()), ("c", {"d"})]


def test_every_series_that_is_asked_for_exists() -> None:
    recorded = {r["record"] for r in rules() if "record" in r}
    queries = [*gen_grafana.queries(), *(r["expr"] for r in rules())]
    for query in queries:
        found = asked(query)
        assert found
        for name, labels in found:
            if name not in recorded | {"up"}:
                assert labels <= LABELS[name] | TARGETS, query
    in_panels = {name for query in gen_grafana.queries() for name, _ in asked(query)}
    assert {s.name for s in catalogue.SERIES if not in_panels & set(s.samples)} == set(), "a series without a panel"


def test_the_dashboards_variables_are_what_its_queries_use() -> None:
    dashboard = json.loads(gen_grafana.TARGET.read_text())
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]))) - {"__rate_interval"}
    assert {v["name"] for v in dashboard["templating"]["list"]} == used
    panels = [p for p in dashboard["panels"] if p["type"] != "row"]
    places = [tuple(p["gridPos"].values()) for p in panels]
    assert len(panels) == len(set(places)) == sum(len(row) for _, row in gen_grafana.ROWS)
    assert [t["expr"] for p in panels for t in p["targets"]] == list(gen_grafana.queries())


def test_kinds_that_alerts_name_are_counted() -> None:
    for rule in alerts():
        for named in re.findall(r'kind=~?"([^"]+)"', rule["expr"]):
            if named not in ("raw", "wire"):
                assert set(named.split("|")) <= catalogue.KINDS.keys()


def test_the_page_has_every_alert_with_its_severity() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(Gradcomm\w+)` \| .* \| (\w+) \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted((rule["alert"], rule["labels"]["severity"]) for rule in alerts())
    assert all(f"`{r['record']}`" in page for r in rules() if "record" in r)


def test_each_alert_is_tested_where_it_fires() -> None:
    tests = yaml.safe_load(RULES.with_suffix(".test.yml").read_text())["tests"]
    fired = {t["alertname"] for test in tests for t in test.get("alert_rule_test", ()) if t["exp_alerts"]}
    assert fired == {rule["alert"] for rule in alerts()}
