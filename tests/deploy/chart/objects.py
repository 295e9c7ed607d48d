"""What is asked again and again of rendered objects: their pods, labels, ports, variables and mounts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.deploy.chart.pod_security import Spec, all_containers
from tests.deploy.chart.rendering import NAMESPACE, Document, Rendered

WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job", "Pod")
COMPONENT = "app.kubernetes.io/component"


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of one workload: all alike. owner: the workload, or the pod itself. template: metadata and spec."""

    owner: Document
    template: Spec
    namespace: str = NAMESPACE

    @property
    def name(self) -> str:
        """Kind and name of what makes them, for messages."""
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"

    @property
    def labels(self) -> Mapping[str, str]:
        """Their labels."""
        return self.template["metadata"].get("labels") or {}

    @property
    def component(self) -> str:
        """gateway, triton, video, mps or test."""
        return self.labels[COMPONENT]

    @property
    def spec(self) -> Spec:
        """Their spec."""
        return self.template["spec"]

    @property
    def containers(self) -> list[Spec]:
        """All, init containers included."""
        return all_containers(self.spec)

    def container(self, name: str) -> Spec:
        """The container of this name."""
        return next(each for each in self.containers if each["name"] == name)

    @property
    def ports(self) -> dict[str, int]:
        """Container ports by name."""
        return {each["name"]: each["containerPort"] for one in self.containers for each in one.get("ports") or []}


def pods_of(rendered: Rendered) -> list[Pods]:
    """Whatever makes pods."""
    found = rendered.of_kind(*WORKLOADS)
    return [_pods(each) for each in found]


def _pods(owner: Document) -> Pods:
    template = owner if owner["kind"] == "Pod" else owner["spec"]["template"]
    return Pods(owner, template, owner["metadata"].get("namespace", NAMESPACE))


def component(rendered: Rendered, name: str) -> Pods:
    """The pods of a component that is there once."""
    (found,) = (pods for pods in pods_of(rendered) if pods.component == name)
    return found


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels; an empty one takes all."""
    asked = selector or {}
    if any(labels.get(key) != value for key, value in (asked.get("matchLabels") or {}).items()):
        return False
    return all(_meets(each, labels) for each in asked.get("matchExpressions") or [])


def _meets(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or []
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise AssertionError(f"unknown operator: {expression}")


def variables(container: Spec) -> dict[str, str]:
    """The variables that have a value in the manifest, as the kubelet expands them; those of Secrets and fields not."""
    values = {each["name"]: each["value"] for each in container.get("env") or [] if "value" in each}
    return {name: _expanded(str(value), values) for name, value in values.items()}


def _expanded(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"$({name})", str(value))
    return text


def strings(value: object) -> Iterator[str]:
    """Every string in a document, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)
