"""What one object says of another is true: labels, ports, names, probes, targets."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart.objects import Pods, pods_of, selects
from tests.deploy.chart.pod_security import Spec
from tests.deploy.chart.rendering import CHART, NAMESPACE, Document, Rendered, render
from tests.deploy.chart.value_sets import NAMES, SETS, rendered

pytestmark = pytest.mark.xdist_group("chart")

CHECKOUT = CHART.parents[2]


def routes(source: str, pattern: str) -> set[str]:
    """The paths that a table of routes in our sources names."""
    found = set(re.findall(pattern, (CHECKOUT / source).read_text()))
    assert found, source
    return found


GATEWAY_PATHS = routes("server/penstock/gateway/rest/models.py", r'operation\(health, "GET", "(/v2/health/\w+)"')
VIDEO_PATHS = routes("deepstream_pipeline/penstock_video/api/app.py", r'router\.get\("(/[\w/]+)"')
METRICS_PATHS = routes("server/penstock/gateway/rest/metrics_app.py", r'Route\("(/[\w/]+)"') & VIDEO_PATHS
CONSOLE_PATHS = routes("server/penstock/console/app.py", r'path == "(/health/\w+)"')
PATHS = {
    "gateway": GATEWAY_PATHS,
    "console": CONSOLE_PATHS,
    "triton": GATEWAY_PATHS,
    "video": VIDEO_PATHS,
    "mps": set(),
}
IN_THE_IMAGE = {"/opt/penstock/deploy/mps/healthy.sh": CHECKOUT / "deploy" / "mps" / "healthy.sh"}
LABELS = {
    *("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"),
    *("app.kubernetes.io/version", "app.kubernetes.io/managed-by", "app.kubernetes.io/part-of", "helm.sh/chart"),
}


def selected(result: Rendered, labels: Mapping[str, str]) -> list[Pods]:
    """The pods that a plain selector takes."""
    return [pods for pods in pods_of(result) if selects({"matchLabels": labels}, pods.labels)]


@pytest.mark.parametrize("name", NAMES)
def test_objects_carry_the_labels_and_the_namespace(name: str) -> None:
    """Kubernetes' recommended labels on everything, also on pods; the release's namespace wherever one is said."""
    for each in rendered(name).objects:
        labels = each["metadata"].get("labels") or {}
        assert LABELS - labels.keys() <= {"helm.sh/chart", "app.kubernetes.io/component"}, each["metadata"]["name"]
        assert labels["app.kubernetes.io/part-of"] == "penstock"
        is_daemon = labels.get("app.kubernetes.io/component") == "mps"
        assert each["metadata"].get("namespace", "ml") in ({"ml", "gpu-system"} if is_daemon else {"ml"})
    for pods in pods_of(rendered(name)):
        assert {"app.kubernetes.io/name", "app.kubernetes.io/instance"} <= pods.labels.keys()


@pytest.mark.parametrize("name", NAMES)
def test_workloads_select_their_own_pods_and_no_others(name: str) -> None:
    """A workload's selector takes its pods; no two workloads claim the same ones; extra labels change no selector."""
    for pods in pods_of(rendered(name)):
        selector = pods.owner["spec"].get("selector") if pods.owner["kind"] != "Pod" else None
        if selector is None:
            continue
        taken = [each.name for each in pods_of(rendered(name)) if selects(selector, each.labels)]
        assert taken == [pods.name]
        assert "team" not in selector["matchLabels"]
        assert "app.kubernetes.io/version" not in selector["matchLabels"], "a selector never changes"


@pytest.mark.parametrize("name", NAMES)
def test_services_lead_to_pods_that_listen(name: str) -> None:
    """Every Service selects one kind of pod, and each of its ports is one that these pods name."""
    services = rendered(name).of_kind("Service")
    assert services
    for service in services:
        (pods,) = selected(rendered(name), service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            assert target in (pods.ports if isinstance(target, str) else pods.ports.values()), service["metadata"]
            assert pods.ports.get(target, target) == port["port"], "a client finds Triton's usual port"


@pytest.mark.parametrize("name", NAMES)
def test_disruption_budgets_and_spreads_select_pods(name: str) -> None:
    """A budget or a spread over nodes that selects nothing would promise nothing."""
    for budget in rendered(name).of_kind("PodDisruptionBudget"):
        assert any(selects(budget["spec"]["selector"], pods.labels) for pods in pods_of(rendered(name)))
        assert ("maxUnavailable" in budget["spec"]) != ("minAvailable" in budget["spec"])
    for pods in pods_of(rendered(name)):
        for spread in pods.spec.get("topologySpreadConstraints") or []:
            assert selects(spread["labelSelector"], pods.labels)


def target_of(each: Document) -> dict[str, Any]:
    """What an autoscaler scales."""
    target: dict[str, Any] = each["spec"]["scaleTargetRef"]
    return target


@pytest.mark.parametrize("name", NAMES)
def test_autoscalers_scale_a_workload_that_starts_with_the_fewest(name: str) -> None:
    """The target exists and says a number: left out, the upgrade that turns autoscaling on would leave one replica."""
    scalers = rendered(name).of_kind("HorizontalPodAutoscaler", "ScaledObject")
    workloads = {(each["kind"], each["metadata"]["name"]): each for each in rendered(name).of_kind("Deployment")}
    for each in scalers:
        target = workloads[target_of(each).get("kind", "Deployment"), target_of(each)["name"]]
        fewest = each["spec"].get("minReplicas") or each["spec"]["minReplicaCount"]
        assert target["spec"]["replicas"] == fewest
    assert len(scalers) == (SETS[name].get("autoscaling", {}).get("mode", "none") != "none")
    assert all("replicas" in each["spec"] for each in workloads.values())


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_upgrade_under_an_autoscaler_keeps_the_present_number(name: str, tmp_path: Path) -> None:
    """What the cluster would answer to the template's lookup is what is sent again; the engine has no cluster here."""
    chart = tmp_path / "penstock"
    shutil.copytree(CHART, chart)
    template = chart / "templates" / "autoscaling" / "_autoscaling.tpl"
    asked = 'lookup "apps/v1" "Deployment" .Release.Namespace $name'
    text = template.read_text()
    assert asked in text
    template.write_text(text.replace(asked, '(dict "spec" (dict "replicas" 5))'))
    (gateways,) = render(SETS[name], chart=chart).of_kind("Deployment")
    assert gateways["spec"]["replicas"] == 5


def handlers(container: Spec) -> dict[str, dict[str, Any]]:
    """Its probes by kind."""
    kinds = ("startupProbe", "livenessProbe", "readinessProbe")
    return {kind: container[kind] for kind in kinds if kind in container}


@pytest.mark.parametrize("name", NAMES)
def test_probes_ask_what_is_served(name: str) -> None:
    """Each port is one of the container's, each path a route of the program's, each script one of ours."""
    for pods in pods_of(rendered(name)):
        for container in pods.containers:
            own = {each["name"]: each["containerPort"] for each in container.get("ports") or []}
            which = "triton" if container["name"] == "triton" else pods.component
            for probe in handlers(container).values():
                if "httpGet" in probe:
                    assert probe["httpGet"]["path"] in PATHS[which]
                    assert probe["httpGet"]["port"] in {*own, *own.values()}
                    continue
                command = " ".join(probe["exec"]["command"])
                scripts = [path for path in IN_THE_IMAGE if path in command]
                assert scripts or any(path in command for path in PATHS[which]), command
                assert all(IN_THE_IMAGE[path].is_file() for path in scripts)


@pytest.mark.parametrize("name", NAMES)
def test_servers_have_probes_that_mean_different_things(name: str) -> None:
    """Start, life and readiness differ: life never asks for readiness, and starting may take its time."""
    for pods in pods_of(rendered(name)):
        for container in pods.containers:
            if container["name"] not in ("gateway", "triton", "video"):
                continue
            probes = handlers(container)
            is_beside = container.get("restartPolicy") == "Always"  # its gateway says whether it is ready
            assert set(probes) == {"startupProbe", "livenessProbe"} | (set() if is_beside else {"readinessProbe"})
            assert "live" in str(probes["livenessProbe"])
            # A Triton beside its gateway is also asked what that one found: see penstock.triton.isWell.
            assert is_beside or "ready" not in str(probes["livenessProbe"])
            # A Triton with one broken model is never ready, and serves the others.
            assert ("ready" in str(probes.get("readinessProbe"))) is (container["name"] != "triton")
            start = probes["startupProbe"]
            section = SETS[name].get(container["name"], {})
            usual_s = {"gateway": 120, "triton": 600, "video": 120}[container["name"]]
            assert start["failureThreshold"] * start.get("periodSeconds", 10) >= section.get("startupSeconds", usual_s)


@pytest.mark.parametrize("name", NAMES)
def test_named_objects_are_there_or_the_users_own(name: str) -> None:
    """ConfigMaps, claims and ServiceAccounts that pods name are rendered, or named in the values; so are Secrets."""
    result = rendered(name)
    made = {(each["kind"], each["metadata"]["name"]) for each in result.objects}
    said = str(SETS[name])
    for pods in pods_of(result):
        account = ("ServiceAccount", pods.spec["serviceAccountName"])
        is_elsewhere = pods.namespace != NAMESPACE  # there is always a `default` one, whose token it does not take
        names = [] if is_elsewhere and account[1] == "default" else [account]
        for volume in pods.spec.get("volumes") or []:
            names += [("ConfigMap", volume["configMap"]["name"])] if "configMap" in volume else []
            names += [("Secret", volume["secret"]["secretName"])] if "secret" in volume else []
            if "persistentVolumeClaim" in volume:
                names.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for container in pods.containers:
            text = str(container.get("env", "")) + str(container.get("envFrom", ""))
            names += [
                ("Secret", found) for found in re.findall(r"'secret(?:KeyRef|Ref)': \{[^}]*'name': '([^']+)'", text)
            ]
        for each in names:
            assert each in made or f"'{each[1]}'" in said, (pods.name, each)


@pytest.mark.parametrize("name", NAMES)
def test_ingress_leads_to_the_gateways_http(name: str) -> None:
    """The host that is said, with its certificate, to a port that the Service has."""
    services = {each["metadata"]["name"]: each for each in rendered(name).of_kind("Service")}
    wanted = SETS[name].get("gateway", {}).get("ingress", {})
    found = rendered(name).of_kind("Ingress")
    assert len(found) == bool(wanted.get("enabled"))
    for each in found:
        (rule,) = each["spec"]["rules"]
        backend = rule["http"]["paths"][0]["backend"]["service"]
        ports = {port["name"]: port["port"] for port in services[backend["name"]]["spec"]["ports"]}
        port = backend["port"].get("number") or ports[backend["port"]["name"]]
        assert (rule["host"], port) == (wanted["host"], 8000)
        assert each["spec"]["tls"] == [{"hosts": [wanted["host"]], "secretName": wanted["tlsSecret"]}]
