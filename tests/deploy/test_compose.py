"""Compose files, alone and over each other, as `docker compose -f … -f …` has them. `make check` has their schemas."""

import os
import re
import subprocess
import sys
from copy import deepcopy
from functools import cache
from hashlib import sha256
from typing import Any

import pytest
from ruamel.yaml import YAML

from penstock.gateway.settings_sources import read_settings
from penstock.gateway.stack.startup import check_access
from penstock.gpu.triton_images import NAME, advise
from tests.deploy.test_container import CHECKOUT, inherited, stages

CPU, GPU, MPS = "compose.yaml", "compose.gpu.yaml", "compose.mps.yaml"
STACKS = {"cpu": (CPU,), "gpu": (CPU, GPU), "mps": (CPU, GPU, MPS)}
OURS = {"penstock": "stack", "penstock-gateway": "gateway", "penstock-video": "video", "penstock-load": "load"}
OURS["penstock-triton"] = "triton"
BROKERS = {"mosquitto", "redis", "kafka"}
ENDS_BY_ITSELF = {"load"}
MPS_CLIENTS = {"triton", "triton-2"}
Service = dict[str, Any]


@cache
def document(name: str) -> dict[str, Any]:
    """The file, as written."""
    read: dict[str, Any] = YAML(typ="safe").load((CHECKOUT / name).read_text())
    return read


def merged(below: Any, above: Any, key: str = "") -> Any:
    """As Compose puts one file over another: mappings by key, lists one after the other, but command, entrypoint and a
    health check's test, which are taken whole."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {name: merged(below.get(name), above.get(name, below.get(name)), name) for name in {**below, **above}}
    if isinstance(below, list) and isinstance(above, list) and key not in ("command", "entrypoint", "test"):
        return below + [item for item in above if item not in below]
    return deepcopy(above)


@cache
def services(stack: str) -> dict[str, Service]:
    """Of the files of that stack, put together."""
    whole: dict[str, Any] = {}
    for name in STACKS[stack]:
        whole = merged(whole, {key: value for key, value in document(name).items() if not key.startswith("x-")})
    found: dict[str, Service] = whole["services"]
    return found


def filled(text: str, **variables: str) -> str:
    """With ${NAME:-default} filled in, the inner ones first."""
    pattern = re.compile(r"\$\{(\w+)(?::-([^${}]*))?\}")
    while pattern.search(text):
        text = pattern.sub(lambda found: variables.get(found[1]) or found[2] or "", text)
    return text


def target_of(service: Service) -> str | None:
    """The Dockerfile's target of the image that it runs; None for an image of another project."""
    return OURS.get(filled(service["image"]).partition(":")[0])


def every_service() -> list[tuple[str, str]]:
    """(stack, service) of each."""
    return [(stack, name) for stack in STACKS for name in services(stack)]


@pytest.mark.parametrize(("stack", "name"), every_service())
def test_service_is_confined(stack: str, name: str) -> None:
    """Read-only, without capabilities and the way to get any, no host namespaces but the MPS daemon's of processes, and
    its user is not root."""
    service = services(stack)[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "userns_mode"} & set(service)
    assert service.get("pid") == ("host" if name == "mps" else None)
    assert "host" not in (service.get("network_mode"), service.get("ipc"))
    target = target_of(service)
    user = service.get("user") or (inherited(target, "USER")[-1] if target else "")
    assert user.split(":")[0] not in ("", "0", "root")


@pytest.mark.parametrize(("stack", "name"), every_service())
def test_service_publishes_on_loopback_alone(stack: str, name: str) -> None:
    """Nothing is reachable from outside the host unless its user says so; who shares a network publishes nothing."""
    service = services(stack)[name]
    ports = [filled(port) for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert all(port.split(":")[1] == port.split(":")[2] for port in ports), "the same number outside as in the image"
    assert not (ports and service.get("network_mode"))
    if target := target_of(service):
        exposed = " ".join(inherited(target, "EXPOSE")).split()
        assert [port.rsplit(":", 1)[1] for port in ports] in ([], exposed)


def test_ports_of_the_host_are_the_users_to_choose() -> None:
    """The address and each number have a variable, which the file's first lines name; the program's ports stay."""
    chosen = {"ADDRESS": "192.0.2.1", "HTTP": "1", "GRPC": "2", "METRICS": "3", "CONSOLE": "4", "VIDEO": "5"}
    variables = {f"PUBLISH_{name}": value for name, value in chosen.items()}
    ports = [filled(port, **variables) for name in ("penstock", "video") for port in services("cpu")[name]["ports"]]
    assert ports == [f"192.0.2.1:{port}" for port in ("1:8000", "2:8001", "3:8002", "4:8003", "5:8010")]
    head = (CHECKOUT / CPU).read_text().partition("\nname:")[0]
    assert all(name in head for name in variables)


@pytest.mark.parametrize("stack", STACKS)
def test_clients_of_the_gateway_get_the_key(stack: str) -> None:
    """Load, video, and the service in which `docker compose exec penstock penstock models pull` runs; the gateway the
    keys that it takes."""
    found = services(stack)
    for name in ("penstock", "load", "video"):
        assert found[name]["environment"]["PENSTOCK_API_KEY"] == "${PENSTOCK_API_KEY:-}"
    gateway = found["gateway" if "gateway" in found else "penstock"]["environment"]
    assert gateway["PENSTOCK_API_KEYS"] == "${PENSTOCK_API_KEYS:-}"


@pytest.mark.parametrize("stack", STACKS)
def test_gateway_allows_the_host_name_that_the_other_services_use(stack: str) -> None:
    """load, video and Prometheus use the name penstock without a key; the operator can add names."""
    found = services(stack)
    allowed = found["gateway" if "gateway" in found else "penstock"]["environment"]["PENSTOCK_ALLOWED_HOST"]
    assert read_settings({}, environ={"PENSTOCK_ALLOWED_HOST": filled(allowed)}).allowed_host == ("penstock",)
    assert filled(allowed, PENSTOCK_ALLOWED_HOST="penstock,192.0.2.7") == "penstock,192.0.2.7"
    assert "http://penstock:8000" in found["load"]["command"]


def test_block_with_keys_in_the_readme_makes_keys_that_the_gateway_takes() -> None:
    """As it stands there: a shell's exports, whose key has every role that load, video and `models pull` want."""
    text = (CHECKOUT / "deploy" / "docker" / "README.md").read_text()
    (block,) = re.findall(r"^    (export KEY=.*\n(?:    export .*\n)+)", text, re.MULTILINE)
    shell = ["sh", "-c", f"{block}\nenv"]
    shown = subprocess.run(shell, capture_output=True, text=True, timeout=10, check=True).stdout
    environ = dict(line.partition("=")[::2] for line in shown.splitlines() if line.startswith("PENSTOCK_"))
    chosen = read_settings({"host": "0.0.0.0"}, environ=environ)
    check_access(chosen)
    (key,) = chosen.api_keys
    assert key.split(":")[1:] == ["infer+read+admin", sha256(environ["PENSTOCK_API_KEY"].encode()).hexdigest()]
    assert chosen.anonymous_roles == frozenset()


@pytest.mark.parametrize(("stack", "name"), every_service())
def test_service_has_a_health_check_or_ends_by_itself(stack: str, name: str) -> None:
    """Of its own, or its image's; a broker's is said here, since we know no image of others."""
    service = services(stack)[name]
    if name in ENDS_BY_ITSELF:
        assert inherited(target_of(service) or "", "HEALTHCHECK") == ["NONE"]
        return
    target = target_of(service)
    assert "healthcheck" in service or (target and inherited(target, "HEALTHCHECK")[-1] != "NONE")


@pytest.mark.parametrize(("stack", "name"), every_service())
def test_service_has_longer_to_stop_than_it_drains(stack: str, name: str) -> None:
    """The engine of containers kills only what has had its grace: the gateway's and Triton's 30 s, the daemon's 10."""
    service = services(stack)[name]
    if name in BROKERS | ENDS_BY_ITSELF:
        return
    gateway = read_settings({}, environ={})
    needed = 15 if name == "mps" else gateway.drain_delay_s + gateway.grace_s
    assert int(service["stop_grace_period"].removesuffix("s")) > needed


@pytest.mark.parametrize(("stack", "name"), every_service())
def test_service_names_stages_models_and_settings_that_exist(stack: str, name: str) -> None:
    """Build targets are the Dockerfile's, and every PENSTOCK_ variable is one that `penstock up` takes."""
    service = services(stack)[name]
    if target := target_of(service):
        assert target in stages()
        assert service.get("build", {"target": target})["target"] == target
    variables = {key: filled(str(value)) for key, value in service.get("environment", {}).items()}
    settings = read_settings({}, environ={key: value for key, value in variables.items() if value})
    assert set(settings.models or ()) <= {path.name for path in (CHECKOUT / "model_repository").iterdir()}


@pytest.mark.parametrize(("stack", "name"), every_service())
def test_service_waits_for_services_that_are_there(stack: str, name: str) -> None:
    """Whom it depends on, and whose network or memory it shares, is in the same files, and starts with it."""
    service, others = services(stack)[name], services(stack)
    assert set(service.get("depends_on", {})) <= set(others)
    for place in ("network_mode", "ipc"):
        kind, _, other = service.get(place, "").partition(":")
        assert kind in ("", "none", "shareable") or (kind == "service" and other in others)
        if other:
            assert other in service["depends_on"]
            assert "profiles" not in others[other]


@pytest.mark.parametrize("stack", ["gpu", "mps"])
def test_gateway_shares_network_and_memory_with_triton(stack: str) -> None:
    """On one loopback and one /dev/shm, whose owner is big enough: so the gateway's slab is Triton's, too."""
    found = services(stack)
    owner = "service:penstock"
    for name in {"gateway", "triton", *(MPS_CLIENTS if stack == "mps" else ())}:
        assert (found[name]["network_mode"], found[name]["ipc"]) == (owner, owner)
    assert (found["penstock"]["ipc"], found["penstock"]["shm_size"]) == ("shareable", "1gb")
    assert target_of(found["penstock"]) == "gateway"


@pytest.mark.parametrize("stack", ["gpu", "mps"])
def test_gateway_names_the_address_of_each_triton(stack: str) -> None:
    """The ports differ, gRPC and metrics are the next two, and every health check uses its own."""
    found = services(stack)
    tritons = {name: service for name, service in found.items() if target_of(service) == "triton"}
    ports = {}
    for name, service in tritons.items():
        flags = dict(word.removeprefix("--").split("=", 1) for word in service["command"])
        port = int(flags["http-port"])
        assert "--model-repository=/var/lib/penstock/models" in service["command"]
        assert "home:/var/lib/penstock:ro" in service["volumes"], "the gateway's, where models are pulled to"
        assert flags["backend-config"] == f"python,shm-region-prefix-name=triton-{port}-", "none removes another's"
        assert [int(flags[key]) for key in ("grpc-port", "metrics-port")] == [port + 1, port + 2]
        assert {flags[key] for key in ("http-address", "grpc-address", "metrics-address")} == {"127.0.0.1"}
        assert f"http://127.0.0.1:{port}/v2/health/live" in service["healthcheck"]["test"]
        ports[name] = port
    expected = ",".join(f"http://127.0.0.1:{port}" for port in ports.values())
    assert found["gateway"]["environment"]["PENSTOCK_ENGINE"] == expected
    assert set(tritons) == (MPS_CLIENTS if stack == "mps" else {"triton"})
    assert set(tritons) <= set(found["gateway"]["depends_on"])


def test_mps_daemon_and_its_clients_are_one_user_with_one_directory() -> None:
    """MPS serves one user at a time, and clients find the daemon by its directory and /dev/shm."""
    found = services("mps")
    all_of_them = {name: found[name] for name in {"mps", *MPS_CLIENTS}}
    for service in all_of_them.values():
        assert service["user"] == "10001:10001"
        assert service["environment"]["CUDA_MPS_PIPE_DIRECTORY"] == "/run/penstock/mps"
        assert "mps:/run/penstock/mps" in service["volumes"]
        assert service["ipc"] == "service:penstock"
        assert service["environment"]["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    for name in MPS_CLIENTS:
        assert found[name]["depends_on"]["mps"] == {"condition": "service_healthy"}


@pytest.mark.parametrize("stack", ["gpu", "mps"])
def test_video_has_the_card_with_its_video_engines(stack: str) -> None:
    """What decodes there is built in, and the driver's video part comes along; on CPUs alone neither is asked for."""
    video = services(stack)["video"]
    assert video["build"]["args"]["VIDEO_GPU"] == "1"
    assert video["build"]["args"]["BASE"] == services("cpu")["video"]["build"]["args"]["BASE"]
    assert set(video["environment"]["NVIDIA_DRIVER_CAPABILITIES"].split(",")) == {"compute", "utility", "video"}
    assert video["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert video["profiles"] == ["video"]
    if stack == "mps":
        assert video["environment"]["CUDA_MPS_PIPE_DIRECTORY"] == "/run/penstock/mps"
        assert "mps:/run/penstock/mps" in video["volumes"]
        assert video["depends_on"]["mps"] == {"condition": "service_healthy"}
    assert "deploy" not in services("cpu")["video"]


@pytest.mark.parametrize(("release", "capability"), [("26.07", (8, 0)), ("24.10", (7, 0)), ("24.04", (6, 1))])
def test_triton_release_is_the_one_that_doctor_advises(release: str, capability: tuple[int, int]) -> None:
    """The table in compose.gpu.yaml has each, and the variable leads to its image and its tag."""
    triton = services("gpu")["triton"]
    image = filled(triton["build"]["args"]["TRITON_BASE"], TRITON_RELEASE=release)
    assert image == advise(capability, None).image == f"{NAME}:{release}-py3"
    assert filled(triton["image"], TRITON_RELEASE=release) == f"penstock-triton:{release}"
    assert f"#   {release} " in (CHECKOUT / GPU).read_text()


def test_video_file_is_understood_and_its_brokers_are_services() -> None:
    """`penstock video check` takes it, as it is and with every sink that its comments offer."""
    text = (CHECKOUT / "deploy" / "docker" / "video.yaml").read_text()
    whole = re.sub(r"^  # - ", "  - ", text, flags=re.MULTILINE)
    command = [sys.executable, "-m", "penstock.cli.main", "video", "check", "/dev/stdin"]
    environ = {**os.environ, "PENSTOCK_VIDEO_API_KEY": "x" * 20}
    checked = subprocess.run(
        command, input=whole, cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stderr
    for name in BROKERS:
        assert re.search(rf"{name}(:|\b)", whole), name
        assert services("cpu")[name]["profiles"] == ["mqtt" if name == "mosquitto" else name]


def test_broker_service_has_a_foreign_image_by_a_tag() -> None:
    """Each broker is an image of another project with a version; what is ours is built here."""
    for stack in STACKS:
        for name, service in services(stack).items():
            image = filled(service["image"])
            assert (target_of(service) is None) == (name in BROKERS), name
            assert not image.endswith(":latest") or target_of(service), name


def test_images_of_ours_are_built_or_another_service_builds_them() -> None:
    """Nothing of ours is asked for in a registry: none of it is published."""
    for stack in STACKS:
        built = {service["image"] for service in services(stack).values() if "build" in service}
        for name, service in services(stack).items():
            if target_of(service) and "build" not in service:
                assert (service["pull_policy"], service["image"] in built) == ("never", True), name


def test_files_say_how_they_go_together() -> None:
    """Each file's head has the command that uses it."""
    for files in STACKS.values():
        words = "docker compose " + " ".join(f"-f {name}" for name in files) + " up --build --wait"
        assert (words if len(files) > 1 else "docker compose up --build --wait") in (CHECKOUT / files[-1]).read_text()
