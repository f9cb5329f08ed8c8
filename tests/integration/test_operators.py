"""A real daemon with certificates, and a running job: who may look and steer, what is written down and counted."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from benchmarks.lab.ports import free_ports
from gcserver import cli
from gcserver.admin.exits import Exit
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT, Daemon
from tests.integration.operators import ctl, until

pytestmark = pytest.mark.slow
WORKER = "tests.integration.admin_workers:loop"


class Secured:
    """A daemon named a, the certificates that three commands made, and its audit log."""

    def __init__(self, cluster: Cluster, pki: Path) -> None:
        self.cluster, self.pki, self.audit = cluster, pki, cluster.folder / "audit.jsonl"

    @property
    def daemon(self) -> Daemon:
        return self.cluster.daemons[0]

    def ctl(self, who: str, *command: str) -> tuple[int, str]:
        """(exit status, what it printed or complained of)"""
        status, said, complained = ctl(
            self.daemon, "--json", "--tls-ca", f"{self.pki}/ca.pem", "--tls-cert", f"{self.pki}/operator-{who}.pem",
            "--tls-key", f"{self.pki}/operator-{who}.key", *command,
        )  # fmt: skip
        return status, said or complained

    def ask(self, who: str, *command: str) -> Any:
        status, said = self.ctl(who, *command)
        assert status == 0, said + self.daemon.text()
        return json.loads(said)

    def metrics(self, who: str) -> str:
        context = ssl.create_default_context(cafile=self.pki / "ca.pem")
        context.load_cert_chain(self.pki / f"operator-{who}.pem", self.pki / f"operator-{who}.key")
        host, _, port = self.daemon.options["node.metrics"].rpartition(":")
        connection = http.client.HTTPSConnection(host, int(port), timeout=30, context=context)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("operators")
    pki = folder / "pki"
    for command in (
        ["init", str(pki)], ["node", "a", "--dir", str(pki)],
        ["operator", "alice", "--role", "operator", "--dir", str(pki)],
        ["operator", "eve", "--role", "viewer", "--dir", str(pki)],
    ):  # fmt: skip
        assert cli.main(["pki", *command]) == 0
    options = {
        "admin.ca": str(pki / "ca.pem"), "admin.cert": str(pki / "node-a.pem"), "admin.key": str(pki / "node-a.key"),
        "admin.audit_log": str(folder / "audit.jsonl"), "node.admin": f"127.0.0.1:{free_ports(1)}",
        "node.metrics": f"127.0.0.1:{free_ports(1)}",
    }  # fmt: skip
    with Cluster(folder, nodes=1, options=options) as cluster:
        yield Secured(cluster, pki)


def test_a_job_is_looked_at_and_steered_by_roles(secured: Secured, tmp_path: Path) -> None:
    job = secured.cluster.start(WORKER, [0, 0], job="steered", stop=str(tmp_path / "stop"))
    job.wait_mark("running")
    assert secured.ask("eve", "jobs")["jobs"][0]["label"] == "steered"
    status, said = secured.ctl("eve", "set-codec", "fp16")
    assert status == Exit.DENIED
    assert said == "gcctl: SetCodec needs the role operator; the certificate 'eve' has the role viewer\n"
    assert [t["codec"] for t in secured.ask("eve", "tensors", "--pattern", "model*")["tensors"]] == ["none"]
    changed = secured.ask("alice", "set-codec", "fp16")
    until("the change", lambda: secured.ask("eve", "jobs")["jobs"][0]["step"] > changed["effective_step"])
    assert [t["codec"] for t in secured.ask("eve", "tensors", "--pattern", "model*")["tensors"]] == ["fp16"]
    refused, done = secured.lines()
    assert (refused["who"], refused["role"], refused["outcome"]) == ("eve", "viewer", "refused")
    assert (done["who"], done["arguments"], done["outcome"]) == ("alice", {"pattern": "*", "codec": "fp16"}, "done")
    assert secured.audit.stat().st_mode & 0o777 == 0o600
    numbers = secured.metrics("eve")
    assert 'gradcomm_errors_total{kind="admin_denied"} 1.0' in numbers
    ends = x509.load_pem_x509_certificate((secured.pki / "node-a.pem").read_bytes()).not_valid_after_utc.timestamp()
    (expires,) = re.findall(r'gradcomm_certificate_expires_timestamp_seconds{certificate="node"} (\S+)', numbers)
    assert float(expires) == ends
    assert secured.ask("alice", "status")["errors"]["admin_denied"] == 1
    (tmp_path / "stop").touch()
    for outcome in job.wait():
        outcome.ok()


def test_certificates_are_renewed_while_the_daemon_runs(secured: Secured) -> None:
    host, _, port = secured.daemon.options["node.admin"].rpartition(":")

    def shown() -> str:
        return ssl.get_server_certificate((host, int(port)), timeout=30)

    before, pid = shown(), secured.daemon.pid
    assert cli.main(["pki", "node", "a", "--dir", str(secured.pki), "--force"]) == 0
    assert shown() != before and shown().encode() == (secured.pki / "node-a.pem").read_bytes()
    assert secured.ask("eve", "status")["node"] == secured.daemon.name
    assert 'gradcomm_build_info{node="' in secured.metrics("eve") and secured.daemon.pid == pid
    old = secured.pki / "operator-eve.pem"
    assert cli.main(["pki", "operator", "eve", "--role", "operator", "--dir", str(secured.pki), "--force"]) == 0
    assert old.exists() and secured.ctl("eve", "set-codec", "fp16")[1] == "gcctl: no job runs here\n"
    assert secured.lines()[-1]["status"] == "NOT_FOUND"


def test_a_daemon_does_not_start_with_certificates_that_cannot_be_used(secured: Secured, tmp_path: Path) -> None:
    own = {
        "node.name": "stranger", "node.listen": f"tcp://127.0.0.1:{free_ports(2)}", "node.metrics": "",
        "node.admin": f"127.0.0.1:{free_ports(1)}", "node.socket": str(tmp_path / "stranger.sock"),
        "node.state": f"/dev/shm/gradcomm-test-{os.getpid()}-stranger", "admin.ca": f"{secured.pki}/ca.pem",
        "admin.cert": f"{secured.pki}/node-a.pem", "admin.key": f"{secured.pki}/node-a.key",
    }  # fmt: skip
    for changed, status, part in [
        ({"admin.key": f"{secured.pki}/operator-eve.key"}, 1, "operator-eve.key is not the key of"),
        ({"admin.cert": f"{secured.pki}/none.pem"}, 1, "none.pem cannot be read"),
        ({"admin.ca": ""}, 2, "and admin.ca is missing"),
        ({"admin.audit_log": str(tmp_path / "no" / "log")}, 1, "admin.audit_log: "),
    ]:
        flags = [f"--{key}={value}" for key, value in (own | changed).items()]
        done = subprocess.run(
            [sys.executable, "-m", "gcserver.cli", "run", *flags],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (status, ""), done.stderr
        assert part in done.stderr and "Traceback" not in done.stderr, done.stderr
