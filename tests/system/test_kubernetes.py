"""`deploy/kubernetes`: the chart by Helm's own judgement, what it renders by Kubernetes' schemas, and what that says.

What may live here: values, and what must be in the manifests they lead to. What may not: Helm and the schemas
(`charts.py`, in a process of its own); there is no cluster to install it in. A PodMonitor is of the Prometheus
operator, whose types there are for TypeScript: its compiler knows every field, and the types what is in one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gcserver import config
from tests.system.installed import from_npm, from_pip

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "deploy/kubernetes/gradcomm"
EXAMPLES: Final = ROOT / "deploy/kubernetes/examples"
#: Helm, as a library with Python bindings, and the schemas of all versions
TOOLS: Final = ("helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0")
OPERATOR: Final = "@kubernetes-models/prometheus-operator"
TYPES: Final = (f"{OPERATOR}@6.0.0", "typescript@5.9.3")

KEYS: Final = {"keys": {"secret": "node-keys", "peersConfigMap": "node-list"}}
OPEN: Final = {"insecure": True}
FULL: Final = KEYS | {
    "lanes": 3,
    "hostNetwork": False,
    "admin": {"tlsSecret": "certificates"},
    "metrics": {"enabled": True},
    "podMonitor": {"enabled": True, "tlsSecret": "viewer", "labels": {"release": "prometheus"}},
    "networkPolicy": {
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/28"}}], "ports": [{"port": 2379}]}],
    },
    # As Helm reads the numbers of a file of values.
    "uid": 1_000_650_000.0,
    "settings": {
        "codec.default": "topk(ratio=0.01)",
        "cluster.lease": "60s",
        "plan.mode": "auto",
        "partition_bytes": 8_388_608.0,
    },
    "nodeSelector": {"accelerator": "gpu"},
    "priorityClassName": "system-node-critical",
    "podAnnotations": {"example.com/a": "b"},
    "imagePullSecrets": [{"name": "registry"}],
}
CASES: Final = {"open": OPEN, "keys": KEYS, "full": FULL, "host network": KEYS | {"hostNetwork": True}}

Ask = Callable[..., Any]
pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """A question to Helm or the schemas; both are installed into a folder of their own."""
    folder = from_pip(tmp_path_factory.mktemp("helm"), *TOOLS)
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests/system/charts.py")], env={"PYTHONPATH": str(folder)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout

        def question(**about: Any) -> Any:
            print(json.dumps(about), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield question
        process.stdin.close()


def rendered(ask: Ask, values: dict[str, Any]) -> dict[str, Any]:
    """Manifests by kind."""
    found = ask(render=str(CHART), values=values)
    assert isinstance(found, list), found
    return {manifest["kind"]: manifest for manifest in found}


@pytest.mark.parametrize("case", CASES)
def test_helm_and_the_schemas_have_nothing_to_say(ask: Ask, case: str) -> None:
    assert ask(lint=str(CHART), values=CASES[case]) == []
    manifests = rendered(ask, CASES[case])
    # an extension: its schema comes with the Prometheus operator
    manifests.pop("PodMonitor", None)
    assert {"DaemonSet", "Service", "ServiceAccount"} <= manifests.keys()
    assert ask(judge=list(manifests.values())) == []


def test_the_schemas_would_notice(ask: Ask) -> None:
    daemons = rendered(ask, KEYS)["DaemonSet"]
    daemons["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    assert "readynessProbe" in " ".join(ask(judge=[daemons]))


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], str]:
    """What the Prometheus operator's types have to say of a PodMonitor."""
    folder = tmp_path_factory.mktemp("operator")
    executables = from_npm(folder, *TYPES)
    model = f"{OPERATOR}/monitoring.coreos.com/v1/PodMonitor"
    compiler = [executables / "tsc", "--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext"]

    def judge(manifest: Any) -> str:
        text = json.dumps(manifest)
        typed, values = folder / "typed.mts", folder / "values.mjs"
        typed.write_text(f'import type {{ IPodMonitor }} from "{model}";\nexport const it: IPodMonitor = {text};\n')
        values.write_text(f'import {{ PodMonitor }} from "{model}";\nnew PodMonitor({text}).validate();\n')
        said = ""
        for command in ([*compiler, typed], ["node", values]):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            said += done.stdout + done.stderr if done.returncode else ""
        return said

    return judge


def test_the_operators_types_have_nothing_to_say_of_the_monitor(ask: Ask, operator: Callable[[Any], str]) -> None:
    monitor = rendered(ask, FULL)["PodMonitor"]
    assert operator(monitor) == ""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    endpoint["interval"] = "15 s"
    assert "must match pattern" in operator(monitor)
    endpoint["interval"], endpoint["tlsConfig"]["servername"] = "15s", "x"
    assert "'\"servername\"' does not exist in type" in operator(monitor)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "daemons need keys"),
        ({"keys": {"secret": "only"}}, "belong together"),
        (KEYS | {"metrics": {"enabled": True}}, "metrics.enabled needs admin.tlsSecret"),
        (OPEN | {"podMonitor": {"enabled": True}}, "podMonitor.enabled needs metrics.enabled"),
        (FULL | {"networkPolicy": {"metricsFrom": []}}, "podMonitor.enabled needs networkPolicy.metricsFrom"),
        (FULL | {"podMonitor": {"enabled": True}}, "podMonitor.tlsSecret is needed"),
        (OPEN | {"lane": 2}, "lane"),
        (OPEN | {"resources": {"cpu": 0.5, "memory": "1Gi"}}, "cpu"),
    ],
)
def test_values_that_would_not_work_are_refused(ask: Ask, values: dict[str, Any], said: str) -> None:
    answer = ask(render=str(CHART), values=values)
    assert isinstance(answer, dict) and said in answer["refused"]


@pytest.mark.parametrize("case", CASES)
def test_the_daemon_accepts_the_arguments(ask: Ask, case: str) -> None:
    """All but those that name files of a pod; what they come to is what the manifests promise elsewhere."""
    manifests = rendered(ask, CASES[case])
    pod = manifests["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    facts = {"NODE_NAME": "node-1.cluster", "POD_IP": "10.1.2.3"}
    flags = {}
    for argument in container["args"]:
        for name, value in facts.items():
            argument = argument.replace(f"$({name})", value)
        name, _, flags[name] = argument.removeprefix("--").partition("=")
    variables = {v["name"]: v["value"] for v in container["env"] if v["name"].startswith("GC_")}
    settings = config.load(None, flags, variables)
    lanes = CASES[case].get("lanes", 1)
    ports = [port["containerPort"] for port in container["ports"] if port["name"] != "metrics"]
    assert ports == [settings.node.listen.port + i for i in range(lanes + 1)]
    assert [port["port"] for port in manifests["Service"]["spec"]["ports"]] == ports
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    files = [settings.node.socket, settings.node.state, settings.security.key, settings.security.peers]
    for path in [*files, *(settings.admin.files or ()), settings.node.admin.removeprefix("unix:")]:
        assert path is None or any(Path(path).is_relative_to(folder) for folder in mounted), path
    if case == "full":
        assert settings.codec.default.startswith("topk(ratio=0.01)") and settings.cluster.lease == 60.0
        assert settings.partition_bytes == 8 << 20
        assert pod["securityContext"]["runAsUser"] == 1_000_650_000
        assert "--owner=1000650000" in pod["initContainers"][0]["command"]
        (endpoint,) = manifests["PodMonitor"]["spec"]["podMetricsEndpoints"]
        (port,) = (port for port in container["ports"] if port["name"] == endpoint["port"])
        assert settings.node.metrics.port == port["containerPort"] and endpoint["scheme"] == "https"


def test_the_alert_on_daemons_that_are_down_knows_them_by_the_monitors_word(ask: Ask) -> None:
    manifests = rendered(ask, FULL)
    label = manifests["PodMonitor"]["spec"]["jobLabel"]
    job = manifests["DaemonSet"]["spec"]["template"]["metadata"]["labels"][label]
    assert f'up{{job="{job}"}}' in (ROOT / "deploy/prometheus/gradcomm.rules.yml").read_text()


def test_cores_of_its_own_and_no_more_rights_than_needed(ask: Ask) -> None:
    manifests = rendered(ask, FULL)
    pod = manifests["DaemonSet"]["spec"]["template"]["spec"]
    for container in [*pod["initContainers"], *pod["containers"]]:
        # the static CPU manager wants whole cores, and limits that are the requests, of every container
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert isinstance(container["resources"]["limits"]["cpu"], int)
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (key,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "keys"]
    assert key["subPathExpr"] == "$(NODE_NAME).key", "no node sees the key of another"


def test_daemons_talk_to_each_other_and_to_nobody_else(ask: Ask) -> None:
    manifests = rendered(ask, FULL)
    policy, labels = manifests["NetworkPolicy"]["spec"], manifests["DaemonSet"]["spec"]["selector"]["matchLabels"]
    peers = {"from": [{"podSelector": {"matchLabels": labels}}], "ports": [{"port": 7470, "endPort": 7473}]}
    assert policy["podSelector"]["matchLabels"] == labels and policy["policyTypes"] == ["Ingress", "Egress"]
    metrics = {"from": FULL["networkPolicy"]["metricsFrom"], "ports": [{"port": 7461}]}
    assert policy["ingress"] == [peers, metrics]
    assert policy["egress"] == [
        {"to": peers["from"], "ports": peers["ports"]}, *FULL["networkPolicy"]["extraEgress"]
    ]  # fmt: skip
    assert "NetworkPolicy" not in rendered(ask, KEYS | {"hostNetwork": True}), "it would not apply"


def templates(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What an example of an extension's kind holds of Kubernetes' own kinds."""
    if manifest["kind"] == "PyTorchJob":
        for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **replica["template"]}
    else:
        for job in manifest["spec"]["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]}


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml"])
def test_training_pods_share_the_daemons_socket_folder_and_nothing_else(ask: Ask, name: str) -> None:
    daemons = rendered(ask, KEYS)["DaemonSet"]["spec"]["template"]["spec"]
    (socket,) = [v["hostPath"]["path"] for v in daemons["volumes"] if v["name"] == "socket"]
    for manifest in ask(manifests=str(EXAMPLES / name)):
        held = list(templates(manifest))
        assert held and ask(judge=held) == []
        for found in held:
            pod = found["spec"] if found["kind"] == "Pod" else found["spec"]["template"]["spec"]
            (container,), (volume,) = pod["containers"], pod["volumes"]
            assert volume["hostPath"]["path"] == socket
            (mount,) = container["volumeMounts"]
            environ = {e["name"]: e.get("value") for e in container["env"]}
            assert environ["GC_NODE_SOCKET"] == f"{mount['mountPath']}/daemon.sock" and "GC_JOB" in environ
            assert pod["securityContext"]["runAsUser"] == daemons["securityContext"]["runAsUser"]
