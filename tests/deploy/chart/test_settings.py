"""What the chart tells the programs is what they take: settings, Triton's arguments, the times of an orderly end."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from penstock.gateway.settings import PREFIX, Settings
from penstock.gateway.settings_sources import read_settings
from penstock.gpu.triton_images import NAME, advise
from penstock_video.settings.loader import Surroundings
from penstock_video.settings.loader import read_settings as read_video_settings
from tests.deploy.chart.objects import Pods, component, pods_of, variables
from tests.deploy.chart.pod_security import Spec
from tests.deploy.chart.rendering import Rendered, render
from tests.deploy.chart.value_sets import NAMES, SETS, merged, rendered

pytestmark = pytest.mark.xdist_group("chart")

CHECKOUT = Path(__file__).resolve().parents[3]
SHM_IS_ASKED_FOR_FROM = (26, 4)
CAPABILITIES = {  # of the presets named after cards
    "p4": (6, 1),
    "v100": (7, 0),
    "t4": (7, 5),
    "a100": (8, 0),
    "l4": (8, 9),
    "h100": (9, 0),
    "b200": (10, 0),
}
WITH_TRITON = [name for name in NAMES if SETS[name].get("topology") in ("sidecar", "separate")]
RELEASE = re.compile(r"(\d\d)\.(\d\d)\Z")


def gateway_settings(name: str) -> Settings:
    """The settings that a gateway of the set would start with. Raises SettingsError as it would."""
    container = component(rendered(name), "gateway").container("gateway")
    environment = {key: value for key, value in variables(container).items() if key.startswith(PREFIX)}
    arguments = [str(each) for each in container.get("args") or []]
    flags = dict(zip(arguments[1::2], arguments[2::2], strict=True)) if arguments else {}
    named = {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}
    return read_settings(named, environ=environment)


@pytest.mark.parametrize("name", NAMES)
def test_gateway_accepts_its_settings(name: str) -> None:
    """Every PENSTOCK_ variable is a setting, and all together are a pair that the gateway starts with."""
    settings = gateway_settings(name)
    drain = SETS[name].get("gateway", {}).get("drain", {"delaySeconds": 5, "graceSeconds": 30})
    assert (settings.drain_delay_s, settings.grace_s) == (drain["delaySeconds"], drain["graceSeconds"])
    assert settings.anonymous is not None, "who listens elsewhere says what all may do"


@pytest.mark.parametrize("name", NAMES)
def test_gateways_engine_is_the_topologys(name: str) -> None:
    """bundled: its own Triton, never embedded; sidecar: on loopback; separate: every replica by its name."""
    settings = gateway_settings(name)
    match SETS[name].get("topology", "bundled"):
        case "bundled":
            assert settings.engine == "triton"
        case "sidecar":
            assert settings.engine_urls == ("http://127.0.0.1:9000",)
        case "external":
            assert settings.engine_urls == tuple(SETS[name]["external"]["urls"])
            assert settings.engine_grpcs == tuple(SETS[name]["external"]["grpc"])
        case "separate":
            triton = component(rendered(name), "triton").owner
            service, count = triton["spec"]["serviceName"], triton["spec"]["replicas"]
            pod = triton["metadata"]["name"]
            assert settings.engine_urls == tuple(f"http://{pod}-{i}.{service}:8000" for i in range(count))


@pytest.mark.parametrize("name", NAMES)
def test_gateway_allows_the_host_names_of_its_services_and_ingress(name: str) -> None:
    """Clients without a key may use these names: in the namespace, in other namespaces, and of the Ingress."""
    allowed = gateway_settings(name).allowed_host
    services = [each["metadata"] for each in rendered(name).of_kind("Service")]
    for service in (each for each in services if "-gateway" in each["name"]):
        short, namespace = service["name"], service["namespace"]
        assert {short, f"{short}.{namespace}", f"{short}.{namespace}.svc"} < set(allowed)
    assert {each["spec"]["rules"][0]["host"] for each in rendered(name).of_kind("Ingress")} <= set(allowed)
    assert set(SETS[name].get("gateway", {}).get("auth", {}).get("allowedHosts", [])) <= set(allowed)


def test_ingress_without_a_host_allows_every_name() -> None:
    """The Ingress itself accepts every name."""
    result = render(merged(SETS["everything"], {"gateway": {"ingress": {"host": "", "tlsSecret": ""}}}))
    container = component(result, "gateway").container("gateway")
    assert "*" in variables(container)["PENSTOCK_ALLOWED_HOST"].split(",")


def test_values_of_everything_reach_the_settings() -> None:
    """Models, batching, limits and the keys' file arrive as the gateway reads them."""
    settings = gateway_settings("everything")
    assert settings.models == ("street", "people")
    assert settings.batching == {"street": {"batch_owner": "gateway", "slo_p99_ms": "50"}}
    assert (settings.workers, settings.max_body_bytes) == (4, 16777216)
    assert (settings.log_format, settings.log_level) == ("json", "debug")
    assert settings.anonymous == ()
    mounts = component(rendered("everything"), "gateway").container("gateway")["volumeMounts"]
    assert settings.access_file is not None
    assert str(settings.access_file.parent) in {mount["mountPath"] for mount in mounts}


@pytest.mark.parametrize("name", NAMES)
def test_pods_get_no_variables_of_services(name: str) -> None:
    """Kubernetes' PENSTOCK_…_SERVICE_HOST would be refused as unknown settings, so no pod has them."""
    for pods in pods_of(rendered(name)):
        assert pods.spec.get("enableServiceLinks") is False, pods.name


@pytest.mark.parametrize("name", NAMES)
def test_slab_fits_into_the_memory_that_is_shared(name: str) -> None:
    """The gateway's slab and as much again for Triton fit into /dev/shm, and both ends mount the same volume."""
    pods = component(rendered(name), "gateway")
    (volume,) = (each for each in pods.spec["volumes"] if (each.get("emptyDir") or {}).get("medium") == "Memory")
    size_mib = {"Mi": 1, "Gi": 1024}[volume["emptyDir"]["sizeLimit"][-2:]] * int(volume["emptyDir"]["sizeLimit"][:-2])
    assert 2 * gateway_settings(name).slab_bytes <= size_mib << 20
    mounted = [
        container["name"]
        for container in pods.containers
        for mount in container.get("volumeMounts") or []
        if mount["mountPath"] == "/dev/shm" and mount["name"] == volume["name"]
    ]
    is_shared = SETS[name].get("topology") == "sidecar" and gateway_settings(name).slab_bytes > 0
    assert set(mounted) == ({"gateway", "triton"} if is_shared else {"gateway"})


def tritons(result: Rendered) -> list[tuple[Pods, Spec]]:
    """Every container that is a Triton, with its pods."""
    return [(pods, each) for pods in pods_of(result) for each in pods.containers if each["name"] == "triton"]


def words_of(container: Spec) -> list[str]:
    """Its command line."""
    return [str(each) for each in [*(container.get("command") or []), *(container.get("args") or [])]]


def release_of(container: Spec) -> tuple[int, int]:
    """NVIDIA's release, by the end of the image's tag."""
    found = RELEASE.search(container["image"])
    assert found, container["image"]
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("name", WITH_TRITON)
def test_triton_gets_the_shared_memory_flag_of_its_release(name: str) -> None:
    """--allow-client-shm from 26.04 on, where it is asked for; never for earlier releases without that flag."""
    for pods, container in tritons(rendered(name)):
        shares = pods.component == "gateway" and gateway_settings(name).slab_bytes > 0
        has_flag = any(word.startswith("--allow-client-shm") for word in words_of(container))
        assert has_flag is (shares and release_of(container) >= SHM_IS_ASKED_FOR_FROM)


@pytest.mark.parametrize("name", WITH_TRITON)
def test_triton_beside_the_gateway_listens_on_loopback_and_elsewhere_on_its_own_ports(name: str) -> None:
    """A pod's Triton is reached by its gateway alone, on 9000–9002; one of its own on 8000–8002 by the policies."""
    for pods, container in tritons(rendered(name)):
        line = " ".join(words_of(container)).replace("=", " ")
        ports = {int(port) for port in re.findall(r"--(?:http|grpc|metrics)-port (\d+)", line)}
        if pods.component == "gateway":
            assert ports == {9000, 9001, 9002}
            assert re.findall(r"--(?:http|grpc)-address (\S+)", line) == ["127.0.0.1"] * 2
        else:
            assert ports <= {8000, 8001, 8002}
            assert set(pods.ports.values()) == {8000, 8001, 8002}


@pytest.fixture(scope="module")
def known_flags(triton_environment: Path) -> set[str]:
    """What the bundled Triton 2.51 takes, by its own --help."""
    (program,) = triton_environment.glob("lib/python3*/site-packages/pytriton/tritonserver/bin/tritonserver")
    libraries = program.parents[3] / "nvidia_pytriton.libs"
    loader = Path("/lib64/ld-linux-x86-64.so.2")  # the wheel's file has no x bit
    command = [str(loader), "--library-path", str(libraries), str(program), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return set(re.findall(r"--[a-z][a-z0-9-]+", text.stdout + text.stderr))


@pytest.mark.parametrize("name", WITH_TRITON)
def test_tritons_arguments_are_flags_that_it_knows(name: str, known_flags: set[str]) -> None:
    """Every flag stands in the --help of the bundled Triton, but the one that came in 26.04."""
    assert "--model-control-mode" in known_flags
    assert tritons(rendered(name))
    for _, container in tritons(rendered(name)):
        flags = {word.partition("=")[0] for word in words_of(container) if word.startswith("--")} - {"--"}
        assert flags - known_flags <= {"--allow-client-shm"}


@pytest.mark.parametrize("card", CAPABILITIES)
def test_release_that_is_not_said_goes_by_the_cards_generation(card: str) -> None:
    """Without triton.release the chart takes what server/penstock/gpu/triton_images.py names for such cards."""
    done = render(merged(SETS[card], {"triton": {"release": ""}}))
    ((_, container),) = tritons(done)
    year, month = release_of(container)
    assert advise(CAPABILITIES[card], None).image == f"{NAME}:{year}.{month:02}-py3"


@pytest.mark.parametrize("name", NAMES)
def test_gateway_ends_in_the_order_of_the_drain(name: str) -> None:
    """Endpoint out and still ready, then not ready and serving, then what was accepted; Kubernetes waits longer."""
    pods, settings = component(rendered(name), "gateway"), gateway_settings(name)
    pre_stop = (pods.container("gateway").get("lifecycle") or {}).get("preStop")
    sleeps_s = int(pre_stop["exec"]["command"][-1]) if pre_stop else 0
    assert not pre_stop or pre_stop["exec"]["command"][0] == "sleep", "preStop.sleep is younger than Kubernetes 1.29"
    wanted_s = SETS[name].get("gateway", {}).get("drain", {}).get("preStopSeconds", 5)
    assert sleeps_s == wanted_s
    assert pods.spec["terminationGracePeriodSeconds"] >= sleeps_s + settings.drain_delay_s + settings.grace_s + 10


@pytest.mark.parametrize("name", WITH_TRITON)
def test_triton_outlives_the_requests_that_it_runs(name: str) -> None:
    """In the gateway's pod it starts before and ends after it; alone it gets the configured time."""
    for pods, container in tritons(rendered(name)):
        if pods.component == "gateway":
            assert container.get("restartPolicy") == "Always"
            assert container in pods.spec["initContainers"]
            assert "startupProbe" in container, "the gateway starts once Triton has"
            continue
        (exit_s,) = (int(word.partition("=")[2]) for word in words_of(container) if "--exit-timeout-secs" in word)
        assert pods.spec["terminationGracePeriodSeconds"] > exit_s


VIDEO_SECRETS = {"CAMERA_USER": "viewer", "CAMERA_PASSWORD": "p", "PENSTOCK_VIDEO_API_KEY": "k" * 32}


@pytest.mark.parametrize("name", [name for name in NAMES if SETS[name].get("video", {}).get("enabled")])
def test_video_accepts_its_settings_and_every_source_has_one_reader(name: str, tmp_path: Path) -> None:
    """The ConfigMap is a file that `penstock video run` takes; each source is read by exactly one shard."""
    pods = component(rendered(name), "video")
    container = pods.container("video")
    maps = {each["metadata"]["name"]: each["data"] for each in rendered(name).of_kind("ConfigMap")}
    named = {each["configMap"]["name"] for each in pods.spec["volumes"] if "configMap" in each}
    ((file, text),) = (item for each in named for item in maps[each].items())
    path = tmp_path / file
    path.write_text(text)
    assert any(file in word for word in words_of(container))
    shards = SETS[name]["video"].get("shards", 1)
    assert pods.owner["spec"]["replicas"] == shards
    environ = {**VIDEO_SECRETS, **variables(container)}
    read = [
        read_video_settings(path, surroundings=Surroundings(environ, f"{pods.owner['metadata']['name']}-{index}"))
        for index in range(shards)
    ]
    taken = [source.config.source_id for each in read for source in each.sources]
    wanted = [each["camera_id"] for each in yaml.safe_load(text)["source"]]
    assert sorted(taken) == sorted(wanted)
    assert {each.engine.gateway for each in read} != {""}


def test_video_reaches_the_hosts_that_the_chart_allows(tmp_path: Path) -> None:
    """video.allowOutbound becomes api.allow-outbound in its settings file."""
    done = render(merged(SETS["video-shards"], {"video": {"allowOutbound": ["10.0.0.0/8", "cam.local"]}}))
    (text,) = (each["data"]["video.yaml"] for each in done.of_kind("ConfigMap") if "video.yaml" in each["data"])
    path = tmp_path / "video.yaml"
    path.write_text(text)
    settings = read_video_settings(path, surroundings=Surroundings(VIDEO_SECRETS, "penstock-video-0"))
    assert settings.api.allowed_outbound == ("10.0.0.0/8", "cam.local")
