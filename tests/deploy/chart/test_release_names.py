"""Every release name that Helm allows gives objects that Kubernetes accepts."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from tests.deploy.chart.objects import pods_of, selects
from tests.deploy.chart.rendering import RELEASE, Rendered, render
from tests.deploy.chart.value_sets import SETS, merged

pytestmark = pytest.mark.xdist_group("chart")

# YAML 1.1 parses most of these as a number, a boolean, null or a date if they are not quoted.
WORDS = ("true", "null", "no", "y")
NUMBERS = ("2026", "007", "1e3", "0x1f", "1.5", "2026-11-27", "190.20.30")
LONG = ("1" * 53, "a." * 26 + "a", "a" * 39 + "--" + "b" * 12, "1" * 39 + ".penstock")
ODD = (*WORDS, *NUMBERS, *LONG, "my.release")
ORDINARY = {
    RELEASE: RELEASE,
    "vision": "vision-penstock",
    "vision-2": "vision-2-penstock",
    "my-penstock-eu": "my-penstock-eu",
    "a" * 53: "a" * 40,
    "a" * 39 + "-" + "b" * 10: "a" * 39,
}
SET_NAMES = ("everything", "mps-own", "mps-plugin", "hpa")
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS-1035, of Services: it begins with a letter
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
HOST_NAMES = ("Service", "Deployment", "StatefulSet", "DaemonSet", "Job", "Pod")
TEXTS = ("labels", "matchLabels", "selector", "annotations", "nodeSelector")


@cache
def named(release: str, name: str) -> Rendered:
    """Renders a set of values as a release of this name, in a namespace whose name YAML would parse as a number."""
    return render(SETS[name], release=release, namespace="2026")


def texts(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every value that must be a string: labels, selectors, annotations and names."""
    if isinstance(node, list):
        for each in node:
            yield from texts(each, path)
    if isinstance(node, Mapping):
        for key, value in node.items():
            where = f"{path}.{key}"
            is_name = key in ("name", "namespace") or key.endswith("Name")
            if key in TEXTS and isinstance(value, Mapping):
                yield from ((f"{where}.{label}", each) for label, each in value.items() if label not in TEXTS)
            elif is_name and not isinstance(value, Mapping | list):
                yield where, value
            yield from texts(value, where)


@pytest.mark.parametrize("release", ODD)
def test_names_labels_and_annotations_are_text(release: str) -> None:
    """No string of Kubernetes is parsed by YAML as a number, a boolean, null or a date."""
    for name in SET_NAMES:
        for each in named(release, name).objects:
            wrong = [(where, value) for where, value in texts(each) if not isinstance(value, str)]
            assert wrong == [], (name, each["kind"])
            labels = [(where, value) for where, value in texts(each) if "abels." in where]
            assert [pair for pair in labels if not LABEL_VALUE.fullmatch(str(pair[1]))] == []
            assert each["metadata"].get("namespace", "2026") in ("2026", _own_namespace(name))
            assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == release


def _own_namespace(name: str) -> str | None:
    sharing: dict[str, Any] = SETS[name].get("gpu", {}).get("sharing", {})
    return sharing.get("own", {}).get("namespace") or sharing.get("devicePlugin", {}).get("namespace")


@pytest.mark.parametrize("release", ODD)
def test_names_are_dns_labels_where_they_become_host_names(release: str) -> None:
    """Services and owners of pods have DNS labels; all other objects have DNS names."""
    for name in SET_NAMES:
        for each in named(release, name).objects:
            title = each["metadata"]["name"]
            assert SUBDOMAIN.fullmatch(title), (each["kind"], title)
            assert len(title) <= 253
            assert each["kind"] not in HOST_NAMES or LABEL.fullmatch(title), (each["kind"], title)
        for each in named(release, name).of_kind("StatefulSet"):  # controller-revision-hash: the name and a hash
            assert len(each["metadata"]["name"]) <= 52


@pytest.mark.parametrize("release", ODD)
def test_selectors_take_the_pods_of_their_workload(release: str) -> None:
    """A workload's selector matches its pods' labels; every Service selects pods and names their ports."""
    for name in SET_NAMES:
        result = named(release, name)
        for pods in (each for each in pods_of(result) if each.owner["kind"] != "Pod"):
            assert selects(pods.owner["spec"]["selector"], pods.labels), pods.name
        for each in result.of_kind("Service"):
            selector = {"matchLabels": each["spec"]["selector"]}
            assert any(selects(selector, pods.labels) for pods in pods_of(result)), each["metadata"]["name"]
        hosts = {each["metadata"]["name"] for each in result.of_kind("Service")}
        for each in result.of_kind("StatefulSet"):
            assert each["spec"]["serviceName"] in hosts
        (gateway,) = result.of_kind("Deployment")
        assert f"service/{gateway['metadata']['name']} 8000" in result.notes


@pytest.mark.parametrize("release", ORDINARY)
def test_ordinary_names_render_as_before(release: str) -> None:
    """Selectors and names of installed objects never change: otherwise upgrades would fail."""
    result = render(SETS["everything"], release=release)
    prefix = ORDINARY[release]
    selector = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": release}
    for each in result.of_kind("Deployment", "StatefulSet"):
        component = each["metadata"]["labels"]["app.kubernetes.io/component"]
        assert each["metadata"]["name"] == f"{prefix}-{component}"
        assert each["spec"]["selector"]["matchLabels"] == {**selector, "app.kubernetes.io/component": component}
    assert {each["metadata"]["name"].removeprefix(prefix) for each in result.of_kind("Service")} >= {
        *("-gateway", "-gateway-headless")
    }


@pytest.mark.parametrize(("release", "prefix"), [("2026", "penstock-2026"), ("my.release", "my-release-penstock")])
def test_names_that_no_service_may_have_are_changed(release: str, prefix: str) -> None:
    """A name that begins with a digit gets the chart's name as prefix; dots become dashes."""
    (gateway,) = named(release, "everything").of_kind("Deployment")
    assert gateway["metadata"]["name"] == f"{prefix}-gateway"


def test_names_of_secrets_and_claims_that_look_like_numbers_stay_text() -> None:
    """Names from the values are strings, too."""
    values: dict[str, Any] = merged(
        SETS["everything"],
        {
            "serviceAccount": {"existing": "2026"},
            "image": {"pullSecrets": ["1e3"]},
            "gateway": {"auth": {"existingSecret": "404"}, "ingress": {"tlsSecret": "1e4", "className": "0"}},
            "video": {"apiKeySecret": "007", "existingSecret": "1e6", "podLabels": {"rev": "12e4"}},
        },
    )
    result = render(values)
    wrong = [pair for each in result.objects for pair in texts(each) if not isinstance(pair[1], str)]
    assert wrong == []
