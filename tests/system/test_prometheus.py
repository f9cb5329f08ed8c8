"""A real Prometheus: it scrapes running daemons, judges their names, evaluates the alerts and answers the dashboard.

What may live here: what Prometheus and promtool make of the files in `deploy` and of real daemons. What may not: what
is in those files (`tests/unit/test_metrics_files.py`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from benchmarks.lab.ports import free_ports
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT
from tests.integration.forked import ends_with_parent
from tests.integration.operators import reachable, scrape, until
from tests.unit.admin.test_metrics import filled
from tools import gen_grafana

RULES = ROOT / "deploy" / "prometheus" / "gradcomm.rules.yml"
SERVER, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not (SERVER and PROMTOOL), reason="Prometheus is not installed (Debian: prometheus)"),
]


def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    command = [PROMTOOL, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)


class Prometheus:
    """A server on loopback that scrapes ``targets`` every second and evaluates our rules."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        self._folder, self._port = folder, free_ports(1)
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "gradcomm", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        self._log = (folder / "log").open("wb")

    def __enter__(self) -> Prometheus:
        assert SERVER is not None
        flags = {
            "config.file": self._folder / "prometheus.yml", "storage.tsdb.path": self._folder / "data",
            "web.listen-address": f"127.0.0.1:{self._port}",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [SERVER, *(f"--{k}={v}" for k, v in flags.items())], stdout=self._log, stderr=self._log,
            preexec_fn=ends_with_parent,
        )  # fmt: skip
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API; None while it does not answer."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None  # it is starting
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        except OSError:
            assert self._process.poll() is None, (self._folder / "log").read_text()
            return None

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series that a query finds now."""
        found = self.get("query", query=query)
        return [(r["metric"], float(r["value"][1])) for r in found["result"]] if found else []


def test_the_rules_are_right_and_each_alert_fires_when_it_should() -> None:
    checked = promtool("check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", str(RULES.with_suffix(".test.yml")))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_promtool_has_nothing_to_say_of_any_series() -> None:
    judged = promtool("check", "metrics", given=generate_latest(filled().registry).decode())
    assert (judged.returncode, judged.stdout, judged.stderr) == (0, "", "")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Cluster, Prometheus]]:
    """Two daemons, a job that compresses, and Prometheus."""
    options = {"codec.default": "topk(ratio=0.01)", "min_compress_bytes": "0"}
    folder = tmp_path / "prometheus"
    folder.mkdir()
    with reachable(Cluster(tmp_path, nodes=2, options=options), metrics=True) as cluster:
        cluster.start("tests.integration.admin_workers:loop", [0, 1], job="gpt", stop=f"{tmp_path}/stop")
        with Prometheus(folder, [d.options["node.metrics"] for d in cluster.daemons]) as prometheus:
            yield cluster, prometheus


@pytest.mark.slow
def test_a_running_job_as_prometheus_sees_it(running: tuple[Cluster, Prometheus]) -> None:
    cluster, prometheus = running
    a, b = cluster.daemons
    at_a = f'instance="{a.options["node.metrics"]}"'
    until("both to be scraped", lambda: prometheus.ask('sum(up{job="gradcomm"}) == 2'))
    until("steps", lambda: prometheus.ask(f'rate(gradcomm_steps_total{{{at_a},outcome="settled"}}[5s]) > 0'))
    ((labels, _),) = prometheus.ask(f'gradcomm_steps_total{{{at_a},outcome="settled"}}')
    assert (labels["job"], labels["training_job"]) == ("gradcomm", "gpt"), "nothing is pushed aside"

    ratio = f'instance_peer:gradcomm_compression:ratio_rate5m{{{at_a},peer="{b.name}"}} > 5'
    ((_, times),) = until("the link to be compressed", lambda: prometheus.ask(ratio))
    assert times < 200, "of a hundredth of the elements, with their indices"
    # What hardly ever happens has no series here.
    rare = ("audit", "gradcomm_peer_lane_up", "certificate", "waiting_seconds", "errors_total", 'outcome="void"')
    filled = {"$instance": ".*", "$training_job": ".*", "$__rate_interval": "5s"}
    for query in gen_grafana.queries():
        for name, value in filled.items():
            query = query.replace(name, value)
        if any(word in query for word in rare):
            assert prometheus.get("query", query=query) is not None
        else:
            until(f"an answer to {query}", lambda query=query: prometheus.ask(query))

    judged = promtool("check", "metrics", given=scrape(a)[1])
    assert (judged.returncode, judged.stdout, judged.stderr) == (0, "", "")

    b.kill_lane()
    until(
        "the restart to be seen",
        lambda: prometheus.ask(f'gradcomm_lane_restarts_total{{instance="{b.options["node.metrics"]}"}} == 1'),
    )
    b.kill()
    pending = 'ALERTS{alertname=~"GradcommDaemonDown|GradcommPeerDown"}'
    until("two alerts", lambda: len({labels["alertname"] for labels, _ in prometheus.ask(pending)}) == 2)
    healthy = {g["name"]: {r["health"] for r in g["rules"]} for g in prometheus.get("rules")["groups"]}
    assert healthy == {"gradcomm-recorded": {"ok"}, "gradcomm-alerts": {"ok"}}
