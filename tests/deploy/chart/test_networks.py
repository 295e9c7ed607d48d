"""Who may reach whom, by the rendered NetworkPolicies read as Kubernetes reads them."""

import pytest

from tests.deploy.chart.network_policies import Peer, may_reach
from tests.deploy.chart.objects import Pods, pods_of
from tests.deploy.chart.rendering import Document, render
from tests.deploy.chart.value_sets import NAMES, SETS, merged, rendered

pytestmark = pytest.mark.xdist_group("chart")

NEIGHBOUR = Peer({"app": "shop"})  # a pod of the same namespace
STRANGER = Peer({"app": "shop"}, "elsewhere")
PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, "monitoring")
DNS = Peer({"k8s-app": "kube-dns"}, "kube-system", {"dns": 53, "dns-tcp": 53})
OUTSIDE = Peer(address="192.0.2.77")
CAMERA, STORE, TRITON_OF_OTHERS = Peer(address="10.20.0.9"), Peer(address="10.30.0.9"), Peer({"app": "t"}, "serving")
GUARDED = [name for name in NAMES if SETS[name].get("networkPolicy", {}).get("enabled", True)]


def policies(name: str) -> list[Document]:
    """The NetworkPolicies of a set."""
    return rendered(name).of_kind("NetworkPolicy")


def peers(name: str) -> dict[str, Peer]:
    """One pod of each component of a set."""
    return {pods.component: Peer.of(pods) for pods in pods_of(rendered(name))}


@pytest.mark.parametrize("name", GUARDED)
def test_every_pod_is_isolated_both_ways(name: str) -> None:
    """No pod of the chart but the one of `helm test` is without a policy for what comes in and for what goes out."""
    for pods in pods_of(rendered(name)):
        here = Peer.of(pods)
        if is_hook(pods):
            continue
        assert not may_reach(policies(name), here, OUTSIDE, 443), pods.name
        assert not may_reach(policies(name), OUTSIDE, here, 9), pods.name


@pytest.mark.parametrize("name", GUARDED)
def test_gateway_is_reached_by_those_who_may_call_it(name: str) -> None:
    """Pods of the namespace, unless the values say otherwise; metrics by Prometheus, wherever it is."""
    gateway, of_namespace = (
        peers(name)["gateway"],
        SETS[name].get("networkPolicy", {}).get("gatewayFromNamespace", True),
    )
    for port in (8000, 8001):
        assert may_reach(policies(name), NEIGHBOUR, gateway, port) is of_namespace
        assert not may_reach(policies(name), STRANGER, gateway, port)
    assert may_reach(policies(name), PROMETHEUS, gateway, 8002)
    assert not may_reach(policies(name), PROMETHEUS, gateway, 9000)


def test_gateway_is_reached_by_whom_the_values_name() -> None:
    """networkPolicy.gatewayFrom adds to who may call, metricsFrom stands in place of everybody."""
    gateway = peers("everything")["gateway"]
    named = Peer({}, "shop", namespace_labels={"team": "shop"})
    assert may_reach(policies("everything"), named, gateway, 8000)
    assert not may_reach(policies("everything"), named, gateway, 8002)
    assert not may_reach(policies("everything"), STRANGER, gateway, 8002)


def test_ingress_controller_that_is_named_takes_nobodys_place() -> None:
    """An added Ingress keeps the callers of the namespace, and the notes say so."""
    ingress = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}]
    result = render(merged(SETS["t4"], {"networkPolicy": {"gatewayFrom": ingress}}))
    found, gateway = result.of_kind("NetworkPolicy"), peers("t4")["gateway"]
    assert may_reach(found, Peer({"app": "controller"}, "ingress-nginx"), gateway, 8000)
    assert may_reach(found, NEIGHBOUR, gateway, 8000)
    assert not may_reach(found, STRANGER, gateway, 8000)
    assert "pods of namespace ml, and from whom networkPolicy.gatewayFrom names" in result.notes


@pytest.mark.parametrize("name", [name for name in GUARDED if SETS[name].get("topology") == "separate"])
def test_triton_is_reached_by_the_gateway_alone(name: str) -> None:
    """Neither neighbours nor strangers nor our own video pods come to an engine that asks for no key."""
    found = peers(name)
    for port in (8000, 8001):
        assert may_reach(policies(name), found["gateway"], found["triton"], port)
        for other in (NEIGHBOUR, STRANGER, PROMETHEUS, OUTSIDE, found["triton"], found.get("video", NEIGHBOUR)):
            assert not may_reach(policies(name), other, found["triton"], port)
    assert may_reach(policies(name), found["gateway"], found["triton"], 8002), "its metrics go through the gateway"
    assert not may_reach(policies(name), NEIGHBOUR, found["triton"], 22)


@pytest.mark.parametrize("name", [name for name in GUARDED if SETS[name].get("video", {}).get("enabled")])
def test_video_reaches_the_gateway_and_its_cameras(name: str) -> None:
    """Frames go to the gateway's gRPC, cameras where the values allow them; its API is no stranger's."""
    found = peers(name)
    assert may_reach(policies(name), found["video"], found["gateway"], 8001)
    assert may_reach(policies(name), PROMETHEUS, found["video"], 8010)
    assert not may_reach(policies(name), OUTSIDE, found["video"], 8010)
    has_egress = bool(SETS[name].get("networkPolicy", {}).get("egress"))
    assert may_reach(policies(name), found["video"], CAMERA, 554) is has_egress


@pytest.mark.parametrize("name", GUARDED)
def test_pods_that_name_others_may_ask_dns(name: str) -> None:
    """Programs that call others by name may resolve names, over UDP and TCP."""
    for component in {"gateway", "video", "test"} & peers(name).keys():
        for protocol in ("UDP", "TCP"):
            assert may_reach(policies(name), peers(name)[component], DNS, 53, protocol), component


def test_gateway_reaches_tritons_of_others_where_the_values_allow_it() -> None:
    """topology external: the way out is the user's to say."""
    assert may_reach(policies("external"), peers("external")["gateway"], TRITON_OF_OTHERS, 8000)
    assert not may_reach(policies("cpu"), peers("cpu")["gateway"], TRITON_OF_OTHERS, 8000)


def test_triton_reaches_its_object_store_where_the_values_allow_it() -> None:
    """Models from a store: Triton itself fetches them."""
    assert may_reach(policies("models-object-store"), peers("models-object-store")["triton"], STORE, 443)
    assert not may_reach(policies("separate"), peers("separate")["triton"], STORE, 443)


def is_hook(pods: Pods) -> bool:
    """Whether `helm test` makes it."""
    return "helm.sh/hook" in (pods.owner["metadata"].get("annotations") or {})
