"""What operators do to the daemons of a test: gcctl, in this process, and the numbers for Prometheus.

What may live here: asking and waiting for an answer. What may not: what the answer should be.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import time
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lab.ports import free_ports
from gcserver.admin import gcctl
from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon


def reachable(cluster: Cluster, metrics: bool = False) -> Cluster:
    """The cluster, before it starts, with ``node.admin`` on Unix sockets and, if wanted, ``node.metrics`` on ports."""
    for daemon in cluster.daemons:
        daemon.options["node.admin"] = f"unix:{cluster.folder}/{daemon.name}-admin.sock"
        if metrics:
            daemon.options["node.metrics"] = f"127.0.0.1:{free_ports(1)}"
    return cluster


def ctl(daemon: Daemon, *arguments: str) -> tuple[int, str, str]:
    """(exit status, what it printed, what it complained of). A new interpreter each time would be most of a test."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        status = gcctl.main(["--address", daemon.options["node.admin"], "--timeout", "60s", *arguments])
    return status, said.getvalue(), complained.getvalue()


def ask(daemon: Daemon, *arguments: str) -> Any:
    """The answer as JSON."""
    status, said, complained = ctl(daemon, "--json", *arguments)
    assert status == 0, complained + daemon.text()
    return json.loads(said)


def scrape(daemon: Daemon, path: str = "/metrics") -> tuple[int, str]:
    """(status, body) of what the daemon serves for Prometheus."""
    connection = http.client.HTTPConnection(daemon.options["node.metrics"], timeout=5)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def series(daemon: Daemon) -> dict[str, float]:
    """``name{label=value,...}`` without the prefix, and its value."""
    found = {}
    for family in text_string_to_metric_families(scrape(daemon)[1]):
        for s in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(s.labels.items()))
            found[s.name.removeprefix("gradcomm_") + ("{" + labels + "}" if labels else "")] = s.value
    return found


def until(what: str, look: Callable[[], Any], timeout: float = 60.0) -> Any:
    """The first true answer of ``look``."""
    end = time.monotonic() + timeout
    while True:
        answer = look()
        if answer:
            return answer
        assert time.monotonic() < end, f"waited {timeout:g} s for {what}"
        time.sleep(0.05)
