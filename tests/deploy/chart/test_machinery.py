"""What the chart is held to can itself complain: a tiny chart, bad pods, and policies whose answers are known."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart.network_policies import Peer, may_reach
from tests.deploy.chart.objects import selects
from tests.deploy.chart.pod_security import violations
from tests.deploy.chart.rendering import Refused, lint, package, render

pytestmark = pytest.mark.xdist_group("chart")

SCHEMA = '{"type": "object", "additionalProperties": false, "properties": {"size": {"type": "integer"}}}'
TEMPLATE = """\
{{- if gt (int .Values.size) 8 }}{{ fail (printf "size is %v; give 8 at most" .Values.size) }}{{ end }}
apiVersion: v1
kind: ConfigMap
metadata: {name: "{{ .Release.Name }}", namespace: "{{ .Release.Namespace }}"}
data: {kube: "{{ .Capabilities.KubeVersion.Version }}", size: "{{ .Values.size }}"}
"""


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """A chart of one ConfigMap."""
    files = {
        "Chart.yaml": "apiVersion: v2\nname: tiny\nversion: 1.0.0\nicon: https://example.com/i.png\n",
        "values.yaml": "size: 3\n",
        "values.schema.json": SCHEMA,
        "templates/map.yaml": TEMPLATE,
        "templates/NOTES.txt": "Hello {{ .Release.Name }}",
        "files/rules.yaml": "groups: []\n",
    }
    for name, text in files.items():
        path = tmp_path / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tiny"


def test_chart_is_rendered_with_its_values_names_and_kubernetes_version(chart: Path) -> None:
    """Objects, notes and texts come back, with what was said and what the chart says by itself."""
    done = render({}, kube_version="v1.33.0", release="r", namespace="n", chart=chart)
    (only,) = done.objects
    assert only["metadata"] == {"name": "r", "namespace": "n"}
    assert only["data"] == {"kube": "v1.33.0", "size": "3"}
    assert (done.notes, list(done.texts)) == ("Hello r", ["map.yaml"])
    assert render({"size": 4}, chart=chart).objects[0]["data"]["size"] == "4"


@pytest.mark.parametrize(
    ("values", "message"),
    [({"size": 9}, "size is 9; give 8 at most"), ({"syze": 1}, "'syze'"), ({"size": "3"}, "/size")],
)
def test_chart_refuses_with_its_message(chart: Path, values: dict[str, Any], message: str) -> None:
    """What a template or the schema refuses is an exception that says it as the user reads it."""
    with pytest.raises(Refused) as refused:
        render(values, chart=chart)
    assert message in str(refused.value)
    assert "execution error" not in str(refused.value)


def test_object_with_a_key_given_twice_is_a_mistake(chart: Path) -> None:
    """The API server refuses a doubled field; so do the tests."""
    (chart / "templates" / "map.yaml").write_text("apiVersion: v1\nkind: A\nmetadata: {name: a}\nkind: B\n")
    with pytest.raises(yaml.YAMLError, match="kind"):
        render({}, chart=chart)


def test_lint_and_package_tell_what_they_find(chart: Path, tmp_path: Path) -> None:
    """A sound chart has no complaint and becomes an archive; a broken template is a complaint."""
    assert lint({}, chart=chart) == []
    assert package(tmp_path, chart=chart).name == "tiny-1.0.0.tgz"
    (chart / "templates" / "map.yaml").write_text("a: {{ .Values.size")
    assert lint({}, chart=chart)


GOOD: dict[str, Any] = {
    "metadata": {},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "a",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "readinessProbe": {"httpGet": {"path": "/", "port": 80}},
            }
        ],
        "volumes": [{"name": "v", "emptyDir": {}}],
    },
}
POD, CONTAINER = "spec", "spec.containers.0"
BAD_PODS: list[tuple[str, str, object]] = [
    ("metadata.annotations", "container.apparmor.security.beta.kubernetes.io/a", "unconfined"),
    (POD, "hostNetwork", True),
    (POD, "hostPID", True),
    (POD, "hostIPC", True),
    (POD, "volumes", [{"name": "v", "hostPath": {"path": "/run"}}]),
    (POD, "volumes", [{"name": "v", "nfs": {"server": "a", "path": "/"}}]),
    (POD, "initContainers", [{"name": "b"}]),
    (POD, "ephemeralContainers", [{"name": "b"}]),
    ("spec.securityContext", "runAsNonRoot", None),
    ("spec.securityContext", "runAsUser", 0),
    ("spec.securityContext", "seccompProfile", {"type": "Unconfined"}),
    ("spec.securityContext", "seccompProfile", None),
    ("spec.securityContext", "sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
    ("spec.securityContext", "windowsOptions", {"hostProcess": True}),
    ("spec.securityContext", "seLinuxOptions", {"type": "spc_t"}),
    ("spec.securityContext", "appArmorProfile", {"type": "Unconfined"}),
    (f"{CONTAINER}.securityContext", "runAsNonRoot", False),
    (f"{CONTAINER}.securityContext", "runAsUser", 0),
    (f"{CONTAINER}.securityContext", "privileged", True),
    (f"{CONTAINER}.securityContext", "allowPrivilegeEscalation", None),
    (f"{CONTAINER}.securityContext", "capabilities", {"drop": ["NET_RAW"]}),
    (f"{CONTAINER}.securityContext", "capabilities", {"drop": ["ALL"], "add": ["IPC_LOCK"]}),
    (f"{CONTAINER}.securityContext", "procMount", "Unmasked"),
    (f"{CONTAINER}.securityContext", "seccompProfile", {"type": "Unconfined"}),
    (CONTAINER, "ports", [{"containerPort": 80, "hostPort": 80}]),
    (CONTAINER, "livenessProbe", {"tcpSocket": {"host": "10.0.0.1", "port": 80}}),
    (CONTAINER, "lifecycle", {"preStop": {"httpGet": {"host": "10.0.0.1", "port": 80}}}),
]


def changed(path: str, key: str, value: object) -> dict[str, Any]:
    """The good pod with one field set, or taken away."""
    pod = copy.deepcopy(GOOD)
    place: Any = pod
    for part in path.split("."):
        place = place[int(part)] if part.isdecimal() else place.setdefault(part, {})
    place[key] = value
    if value is None:
        del place[key]
    return pod


def test_restricted_pod_breaks_nothing() -> None:
    """A pod as the published standard wants it has no violation."""
    assert violations(GOOD) == []
    assert violations(changed(f"{CONTAINER}.securityContext", "capabilities", {"drop": ["ALL"], "add": []})) == []


@pytest.mark.parametrize(("path", "key", "value"), BAD_PODS, ids=lambda value: str(value)[:40])
def test_pod_that_breaks_the_restricted_standard_is_named(path: str, key: str, value: object) -> None:
    """Each control of the published standard complains of a pod that breaks it alone."""
    assert violations(changed(path, key, value))


@pytest.mark.parametrize(
    ("selector", "is_taken"),
    [
        (None, True), ({}, True), ({"matchLabels": {"a": "1"}}, True), ({"matchLabels": {"a": "1", "b": "1"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "2"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]}, True),
    ],
)  # fmt: skip
def test_selector_takes_labels_as_kubernetes_does(selector: dict[str, Any] | None, is_taken: bool) -> None:
    """Labels and expressions all have to hold; an empty selector takes everything."""
    assert selects(selector, {"a": "1"}) is is_taken


WEB = Peer({"app": "web"}, "shop", {"http": 8000})
DB = Peer({"app": "db"}, "shop", {"sql": 5432})
STRANGER = Peer({"app": "web"}, "elsewhere")
OUTSIDE = Peer(address="192.0.2.1")


def policy(**spec: Any) -> dict[str, Any]:
    """A NetworkPolicy of the namespace shop."""
    return {"metadata": {"name": "p", "namespace": "shop"}, "spec": spec}


INTO_DB = policy(
    podSelector={"matchLabels": {"app": "db"}},
    policyTypes=["Ingress"],
    ingress=[{"from": [{"podSelector": {"matchLabels": {"app": "web"}}}], "ports": [{"port": "sql"}]}],
)
NOTHING_OUT = policy(podSelector={"matchLabels": {"app": "web"}}, policyTypes=["Egress"])
TO_NET = policy(
    podSelector={},
    policyTypes=["Egress"],
    egress=[{"to": [{"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.128/25"]}}], "ports": [{"port": 1}]}],
)
FROM_NAMESPACE = policy(
    podSelector={},
    ingress=[{"from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}]}],
)


@pytest.mark.parametrize(
    ("policies", "source", "target", "port", "is_allowed"),
    [
        ([], STRANGER, DB, 5432, True),
        ([INTO_DB], WEB, DB, 5432, True),
        ([INTO_DB], WEB, DB, 5433, False),
        ([INTO_DB], DB, DB, 5432, False),
        ([INTO_DB], STRANGER, DB, 5432, False),
        ([INTO_DB], OUTSIDE, DB, 5432, False),
        ([INTO_DB], STRANGER, WEB, 8000, True),
        ([INTO_DB, NOTHING_OUT], WEB, DB, 5432, False),
        ([INTO_DB, FROM_NAMESPACE], STRANGER, DB, 9, True),
        ([FROM_NAMESPACE], WEB, DB, 5432, False),
        ([TO_NET], WEB, OUTSIDE, 1, True),
        ([TO_NET], WEB, OUTSIDE, 2, False),
        ([TO_NET], WEB, Peer(address="192.0.2.200"), 1, False),
        ([TO_NET], WEB, DB, 1, False),
    ],
)
def test_network_policies_allow_as_kubernetes_reads_them(
    policies: list[dict[str, Any]], source: Peer, target: Peer, port: int, is_allowed: bool
) -> None:
    """Isolation by selection, the union of rules, both ends asked, peers by pod, namespace and address."""
    assert may_reach(policies, source, target, port) is is_allowed
