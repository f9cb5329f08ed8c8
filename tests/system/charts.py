"""Helm and the schemas of Kubernetes in a process of its own: `python charts.py`, with both packages on its path.

What may live here: linting and rendering a chart, judging manifests. What may not: what is expected of them
(`test_kubernetes.py`); nothing of gradcomm is imported.

Reads questions and prints answers, each a line of JSON:

- ``{"lint": CHART, "values": {...}}``: findings
- ``{"render": CHART, "values": {...}}``: manifests, or ``{"refused": why}``
- ``{"manifests": FILE}``: the manifests in a file
- ``{"judge": [MANIFEST, ...]}``: complaints
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

#: the oldest version that the chart is for, and the newest that there is a schema of
VERSIONS = ("1.27", kubernetes_validate.latest_version())
NAMES = {"name": "trial", "namespace": "training"}


def lint(chart: str, values: dict[str, Any]) -> list[str]:
    report = helm_python.lint(chart, values, strict=True, namespace=NAMES["namespace"])
    # 1 is advice, such as that a chart might have an icon
    return [*report["errors"], *(m["error"] for m in report["messages"] if m["severity"] > 1)]


def render(chart: str, values: dict[str, Any]) -> Any:
    try:
        rendered = helm_python.Chart.load(chart).render(values=values, **NAMES)
    except helm_python.HelmError as error:
        return {"refused": str(error)}
    return [m for name, text in rendered.items() if name.endswith(".yaml") for m in yaml.safe_load_all(text) if m]


def judge(manifests: list[dict[str, Any]]) -> list[str]:
    found = []
    for manifest in manifests:
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f"{manifest['kind']} in {version}: {error}")
    return found


for line in sys.stdin:
    question = json.loads(line)
    if "lint" in question:
        answer: Any = lint(question["lint"], question["values"])
    elif "render" in question:
        answer = render(question["render"], question["values"])
    elif "manifests" in question:
        answer = list(yaml.safe_load_all(Path(question["manifests"]).read_text()))
    else:
        answer = judge(question["judge"])
    print(json.dumps(answer), flush=True)
