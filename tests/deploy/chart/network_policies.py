"""Who may reach whom, as Kubernetes reads NetworkPolicies: allowed where no policy isolates, else where one allows."""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.deploy.chart.objects import Pods, selects
from tests.deploy.chart.rendering import NAMESPACE, Document

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True, slots=True)
class Peer:
    """A pod, or an address outside the cluster (then it has no labels). ports: by their names."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE
    ports: Mapping[str, int] = field(default_factory=dict)
    address: str = ""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, pods: Pods) -> "Peer":
        """One of these pods."""
        return cls(pods.labels, pods.namespace, pods.ports)

    @property
    def labels_of_namespace(self) -> Mapping[str, str]:
        """With the one that the API server sets on every namespace."""
        return {NAMESPACE_LABEL: self.namespace, **self.namespace_labels}


def may_reach(policies: Iterable[Document], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether the source may open a connection to that port of the target."""
    listed = list(policies)
    out = _allows(listed, source, target, port=(target, port, protocol), direction="egress")
    into = _allows(listed, target, source, port=(target, port, protocol), direction="ingress")
    return out and into


def _allows(policies: list[Document], pod: Peer, other: Peer, *, port: tuple[Peer, int, str], direction: str) -> bool:
    if pod.address:
        return True  # no policy here isolates what is outside
    isolating = [each["spec"] for each in policies if _isolates(each, pod, direction)]
    if not isolating:
        return True
    end = "from" if direction == "ingress" else "to"
    rules = [rule for spec in isolating for rule in spec.get(direction) or []]
    return any(_takes_peer(rule.get(end), other, pod.namespace) and _takes_port(rule, *port) for rule in rules)


def _isolates(policy: Document, pod: Peer, direction: str) -> bool:
    spec = policy["spec"]
    usual = ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"]
    is_here = policy["metadata"].get("namespace", NAMESPACE) == pod.namespace
    return is_here and direction.title() in spec.get("policyTypes", usual) and selects(spec["podSelector"], pod.labels)


def _takes_peer(peers: list[dict[str, Any]] | None, other: Peer, namespace: str) -> bool:
    return not peers or any(_is_peer(each, other, namespace) for each in peers)


def _is_peer(entry: Mapping[str, Any], other: Peer, namespace: str) -> bool:
    if "ipBlock" in entry:
        block = entry["ipBlock"]
        outside = [ipaddress.ip_network(each) for each in block.get("except") or []]
        address = ipaddress.ip_address(other.address) if other.address else None
        is_inside = address is not None and address in ipaddress.ip_network(block["cidr"])
        return is_inside and not any(address in each for each in outside)
    if other.address:
        return False
    by_namespace = entry.get("namespaceSelector")
    if by_namespace is None and other.namespace != namespace:
        return False
    if by_namespace is not None and not selects(by_namespace, other.labels_of_namespace):
        return False
    return selects(entry.get("podSelector"), other.labels)


def _takes_port(rule: Mapping[str, Any], target: Peer, port: int, protocol: str) -> bool:
    entries = rule.get("ports") or []
    return not entries or any(_is_port(each, target, port, protocol) for each in entries)


def _is_port(entry: Mapping[str, Any], target: Peer, port: int, protocol: str) -> bool:
    if entry.get("protocol", "TCP") != protocol:
        return False
    named = entry.get("port")
    if named is None:
        return True
    first = target.ports.get(named) if isinstance(named, str) else named
    return first is not None and first <= port <= entry.get("endPort", first)
