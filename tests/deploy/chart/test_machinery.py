"""What the chart is held to can itself complain: bad pods, and policies whose answers are known."""

import copy
from typing import Any

import pytest

from tests.deploy.chart.network_policies import Peer, may_reach
from tests.deploy.chart.pod_security import violations

pytestmark = pytest.mark.xdist_group("chart")


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
    (POD, "volumes", [{"name": "v", "hostPath": {"path": "/run"}}]),
    (POD, "initContainers", [{"name": "b"}]),
    ("spec.securityContext", "runAsNonRoot", None),
    ("spec.securityContext", "seccompProfile", None),
    ("spec.securityContext", "sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
    ("spec.securityContext", "seLinuxOptions", {"type": "spc_t"}),
    (f"{CONTAINER}.securityContext", "privileged", True),
    (f"{CONTAINER}.securityContext", "capabilities", {"drop": ["ALL"], "add": ["IPC_LOCK"]}),
    (CONTAINER, "ports", [{"containerPort": 80, "hostPort": 80}]),
    (CONTAINER, "livenessProbe", {"tcpSocket": {"host": "10.0.0.1", "port": 80}}),
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
