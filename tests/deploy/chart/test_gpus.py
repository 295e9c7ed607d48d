"""How a Triton comes to its card: alone, a MIG instance, a share by NVIDIA's plugin or by an MPS daemon of our own."""

from typing import Any

import pytest
import yaml

from tests.deploy.chart.objects import Pods, component, pods_of, variables
from tests.deploy.chart.pod_security import Spec
from tests.deploy.chart.rendering import CHART, NAMESPACE, Document, render
from tests.deploy.chart.value_sets import NAMES, SETS, merged, rendered

pytestmark = pytest.mark.xdist_group("chart")

ON_GPUS = [name for name in NAMES if SETS[name].get("gpu", {}).get("generation", "none") != "none"]
PIPES = "CUDA_MPS_PIPE_DIRECTORY"


def triton_of(name: str) -> tuple[Pods, Spec]:
    """The pods with Tritons in them, and a Triton's container."""
    found = [(pods, each) for pods in pods_of(rendered(name)) for each in pods.containers if each["name"] == "triton"]
    return found[0]


def extended(container: Spec) -> dict[str, Any]:
    """What a container asks for that is neither CPU nor memory."""
    limits = container["resources"]["limits"]
    return {key: value for key, value in limits.items() if key not in ("cpu", "memory")}


def has_own_daemon(name: str) -> bool:
    """Whether the set shares cards by the chart's MPS daemon."""
    sharing = SETS[name]["gpu"].get("sharing", {})
    return sharing.get("mode") == "mps" and sharing.get("provider") == "own"


@pytest.mark.parametrize("name", ON_GPUS)
def test_only_triton_requests_one_card_or_share(name: str) -> None:
    """A card, a MIG instance or a share of the plugin's for each Triton; nothing where our own daemon shares."""
    profile = SETS[name]["gpu"].get("mig", {}).get("profile")
    wanted = {f"nvidia.com/mig-{profile}": 1} if profile else {"nvidia.com/gpu": 1}
    pods, triton = triton_of(name)
    assert extended(triton) == ({} if has_own_daemon(name) else wanted)
    others = [each for any_pods in pods_of(rendered(name)) for each in any_pods.containers if each["name"] != "triton"]
    others = [each for each in others if (name, each["name"]) != ("video-gpu", "video")]
    assert all(extended(each) == {} for each in others if "limits" in each["resources"])
    tolerated = {each["key"] for each in pods.spec["tolerations"]}
    assert "nvidia.com/gpu" in tolerated


def test_video_shard_gets_a_card_with_its_video_engines() -> None:
    """One each, by the plugin, on nodes that may have it; the driver's video part is asked for, too."""
    pods = component(rendered("video-gpu"), "video")
    container = pods.container("video")
    assert extended(container) == {"nvidia.com/gpu": 1}
    assert container["resources"]["limits"]["memory"] == "4Gi"
    assert set(variables(container)["NVIDIA_DRIVER_CAPABILITIES"].split(",")) == {"compute", "utility", "video"}
    assert pods.spec["runtimeClassName"] == "nvidia"
    assert [each["key"] for each in pods.spec["tolerations"]] == ["nvidia.com/gpu", "cameras"]
    assert pods.spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L4"}
    without = component(rendered("video-shards"), "video")
    assert extended(without.container("video")) == {}
    assert not {"runtimeClassName", "tolerations"} & set(without.spec)


def test_video_shard_gets_as_many_cards_as_said() -> None:
    """Its cameras are spread over them."""
    pods = component(render(merged(SETS["video-gpu"], {"video": {"gpu": {"count": 2}}})), "video")
    assert extended(pods.container("video")) == {"nvidia.com/gpu": 2}


def plugin_config(name: str) -> dict[str, Any]:
    """The device plugin's config, and what nodes are labelled with."""
    (found,) = (each for each in rendered(name).of_kind("ConfigMap") if "penstock-shared" in each["data"])
    config: dict[str, Any] = yaml.safe_load(found["data"]["penstock-shared"])
    return config


@pytest.mark.parametrize(("name", "kind", "replicas"), [("time-slicing", "timeSlicing", 2), ("mps-plugin", "mps", 4)])
def test_device_plugins_config_shares_cards_as_said(name: str, kind: str, replicas: int) -> None:
    """The config is the plugin's own format, and Tritons go to the nodes that are labelled to follow it."""
    config = plugin_config(name)
    assert config["version"] == "v1"
    assert list(config["sharing"]) == [kind]
    assert config["sharing"][kind]["resources"] == [{"name": "nvidia.com/gpu", "replicas": replicas}]
    nodes = triton_of(name)[0].spec["nodeSelector"]
    assert nodes["nvidia.com/device-plugin.config"] == "penstock-shared"


def test_mig_instances_are_shared_by_their_own_name() -> None:
    """Slices of MIG instances: the plugin gets the strategy by which these have names of their own."""
    values = merged(SETS["mig"], {"gpu": {"sharing": {"mode": "time-slicing", "replicas": 2}}})
    (found,) = (each for each in render(values).of_kind("ConfigMap") if "penstock-shared" in each["data"])
    config = yaml.safe_load(found["data"]["penstock-shared"])
    assert config["flags"] == {"migStrategy": "mixed"}
    assert config["sharing"]["timeSlicing"]["resources"] == [{"name": "nvidia.com/mig-1g.10gb", "replicas": 2}]


def daemon_of(name: str) -> Pods:
    """The MPS DaemonSet's pods."""
    return component(rendered(name), "mps")


@pytest.mark.parametrize("name", ["mps-own", "everything"])
def test_mps_clients_and_daemon_meet_in_one_folder_of_the_node(name: str) -> None:
    """The claim that clients mount is the folder in which the daemon has its pipes; all of one user, one variable."""
    daemon, (clients, triton) = daemon_of(name), triton_of(name)
    own = daemon.container("mps")
    pipes = variables(own)[PIPES]
    assert variables(triton)[PIPES] == pipes
    (at,) = (each for each in own["volumeMounts"] if each["mountPath"] == pipes)
    (host,) = (each["hostPath"]["path"] for each in daemon.spec["volumes"] if each["name"] == at["name"])
    (mount,) = (each for each in triton["volumeMounts"] if each["mountPath"] == pipes)
    claim = next(each for each in clients.spec["volumes"] if each["name"] == mount["name"])["persistentVolumeClaim"]
    (volume,) = rendered(name).of_kind("PersistentVolume")
    assert volume["spec"]["claimRef"] == {"namespace": NAMESPACE, "name": claim["claimName"]}
    assert volume["spec"]["hostPath"]["path"] == f"{host}/{at['subPath']}"
    (bound,) = rendered(name).of_kind("PersistentVolumeClaim")
    assert (bound["metadata"]["name"], bound["spec"]["volumeName"]) == (claim["claimName"], volume["metadata"]["name"])
    assert bound["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
    users = {each.spec["securityContext"]["runAsUser"] for each in (daemon, clients)}
    assert users == {10001}


@pytest.mark.parametrize("name", ["mps-own", "everything"])
def test_mps_clients_wait_for_the_daemon_on_its_nodes(name: str) -> None:
    """Without a daemon CUDA takes the card alone and says nothing: so Triton starts after one answers, where one is."""
    daemon, (clients, _) = daemon_of(name), triton_of(name)
    first = clients.spec["initContainers"][0]
    assert "healthy.sh" in str(first["command"])
    assert variables(first)[PIPES] == variables(daemon.container("mps"))[PIPES]
    assert daemon.spec["nodeSelector"].items() <= clients.spec["nodeSelector"].items()
    assert daemon.owner["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert "livenessProbe" not in daemon.container("mps"), "ending it would end all of its clients"


def test_mps_limits_are_passed_to_the_daemon() -> None:
    """Threads and memory of a client, as the values say, in the daemon's own variables."""
    environment = variables(daemon_of("mps-own").container("mps"))
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "8G"
    script = (CHART.parents[1] / "mps" / "daemon.sh").read_text()
    assert all(name in script for name in environment if name.startswith("CUDA_MPS_"))


def immutable(each: Document) -> object:
    """What the API server takes no change of."""
    spec = each.get("spec", {})
    names = {
        "StatefulSet": ("selector", "serviceName", "volumeClaimTemplates", "podManagementPolicy"),
        "Deployment": ("selector",),
        "DaemonSet": ("selector",),
        "PersistentVolume": ("hostPath",),
        "PersistentVolumeClaim": ("storageClassName", "volumeName", "accessModes"),
        "Service": ("clusterIP",),
    }
    return {name: spec.get(name) for name in names.get(each["kind"], ())}


@pytest.mark.parametrize("name", ["everything", "separate", "video-shards"])
def test_upgrade_changes_nothing_that_may_not_change(name: str) -> None:
    """Another version, other replicas, labels and settings: an upgrade that the API server takes."""
    other = {
        "image": {"tag": "0.2.0"},
        "gateway": {"replicas": 3, "podLabels": {"more": "labels"}, "settings": {"workers": 2}},
        "video": {"podLabels": {"more": "labels"}, "graceSeconds": 60},
        "triton": {"podLabels": {"more": "labels"}, "args": ["--log-verbose=2"]},
    }

    def fixed(values: dict[str, Any]) -> dict[tuple[str, str], object]:
        return {(each["kind"], each["metadata"]["name"]): immutable(each) for each in render(values).objects}

    assert fixed(merged(SETS[name], other)) == fixed(SETS[name])
