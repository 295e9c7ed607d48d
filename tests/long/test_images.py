"""deploy/docker's images, built by buildah on local bases, and run as user 10001 on a read-only file system.

Builds for five to twenty minutes (8 GB in the tests' temporary folder). PENSTOCK_IMAGE_STORE=FOLDER keeps the images
there and takes those that it finds; STORAGE_DRIVER=overlay is quicker and smaller than vfs where the kernel has it.
"""

import json
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deploy.containers import CHECKOUT, USER, Container, ImageStore, Pod, missing

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
IMAGES = {
    "gateway": "localhost/penstock-gateway",
    "stack": "localhost/penstock",
    "video": "localhost/penstock-video",
    "triton": "localhost/penstock-triton",
    "load": "localhost/penstock-load",
}
OPEN = {"PENSTOCK_ANONYMOUS": "infer,read,admin"}
PICTURE = CHECKOUT / "model_repository" / "people" / "golden.jpg"
GOLDEN = CHECKOUT / "model_repository" / "people" / "golden.json"
IMAGE_URL = "http://127.0.0.1:8000/v2/models/{}/image"
SIDECAR = [
    *("--model-repository=/opt/penstock/model_repository", "--model-repository=/var/lib/penstock/models"),
    *("--model-control-mode=explicit", "--allow-client-shm=true"),
    *("--http-address=127.0.0.1", "--http-port=9000", "--grpc-address=127.0.0.1", "--grpc-port=9001"),
    *("--metrics-address=127.0.0.1", "--metrics-port=9002", "--grpc-http2-max-ping-strikes=0"),
    "--backend-config=python,shm-region-prefix-name=triton-9000-",
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[ImageStore]:
    """All images, built."""
    if reason := missing():
        pytest.skip(reason)
    kept = os.environ.get("PENSTOCK_IMAGE_STORE")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("images")
    store = ImageStore(folder, os.environ.get("STORAGE_DRIVER", "vfs"))
    if kept is None or "penstock-tritonserver" not in store.buildah("images"):
        store.make_bases(triton_environment)
    present = store.buildah("images", "--format", "{{.Name}}").split()
    for target, image in IMAGES.items():
        began = time.monotonic()
        if image not in present:
            store.build(target, image)
        print(f"{image.partition('/')[2]}: {store.size_mb(image):.0f} MB, {time.monotonic() - began:.0f} s")  # noqa: T201
    yield store
    if kept is None:
        store.remove()


@pytest.fixture
def pod(store: ImageStore, tmp_path: Path) -> Iterator[Pod]:
    """A network and a /dev/shm for containers."""
    pod = Pod(tmp_path, store)
    try:
        yield pod
    finally:
        pod.close()


def wait_until(is_so: Callable[[], bool], container: Container, timeout_s: float = 90.0) -> None:
    """Until it is so; fails with the container's log where it ends before, or takes too long."""
    until = time.monotonic() + timeout_s
    while not is_so():
        assert container.process.poll() is None, container.text()[-3000:]
        assert time.monotonic() < until, container.text()[-3000:]
        time.sleep(0.2)


def is_healthy(container: Container, health: Sequence[str]) -> bool:
    """What the image's own health check says, asked as an engine would."""
    return container.enter(*health).returncode == 0


def started(pod: Pod, target: str, **options: Any) -> Container:
    """A container of the image, healthy by its own check."""
    container = pod.start(IMAGES[target], name=target, **options)
    _, *health = pod.store.config(IMAGES[target])["Healthcheck"]["Test"]
    wait_until(lambda: is_healthy(container, health), container)
    return container


def people_seen(pod: Pod) -> list[list[float]]:
    """Boxes of the street picture, as the gateway answers."""
    sent = ("-H", "content-type: image/jpeg", "--data-binary", f"@{PICTURE}", IMAGE_URL.format("people"))
    answer = pod.curl(*sent)
    assert "results" in answer, answer
    return [each["xyxy"] for each in json.loads(answer)["results"][0]["detections"]]


def expected_people() -> list[list[float]]:
    """Those that the repository holds as the model's answer."""
    seen: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["picture"]["seen"]
    return [one["xyxy"] for one in seen]


def assert_drains(pod: Pod, container: Container) -> None:
    """SIGTERM amid requests: who was accepted is answered, the rest is refused, and the exit code is 0."""
    sent = ["-o", "/dev/null", "-w", "%{http_code}", "-H", "content-type: image/jpeg"]
    words = [*sent, "--data-binary", f"@{PICTURE}", IMAGE_URL.format("people")]
    with ThreadPoolExecutor(8) as crowd:
        answers = [crowd.submit(pod.curl, *words) for _ in range(24)]
        wait_until(lambda: any(answer.done() for answer in answers), container)
        assert container.stop() == 0, container.text()[-3000:]
        codes = {answer.result() for answer in answers}
    assert "200" in codes
    assert codes <= {"200", "503", "000"}, codes  # 000: it no longer listens


@pytest.mark.parametrize("target", IMAGES)
def test_image_is_labelled_and_runs_without_a_named_user(store: ImageStore, target: str) -> None:
    """Each image says what it is and of which source, and runs as user 10001 under tini."""
    config = store.config(IMAGES[target])
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items() if "opencontainers" in key}
    assert labels["title"] == IMAGES[target].partition("/")[2]
    assert labels["version"] == tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    assert {"description", "licenses", "revision", "created"} <= set(labels)
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"][:2] == ["tini", "--"]


def test_stack_from_its_image_finds_people_and_drains(pod: Pod) -> None:
    """The CPU stack: a picture is answered as on the machine that it was recorded on; SIGTERM leaves no process."""
    stack = started(pod, "stack", environ=OPEN)
    assert people_seen(pod) == expected_people()
    inside = list(psutil.Process(stack.process.pid).children(recursive=True))
    assert {process.uids().real for process in inside} == {10001}
    assert stack.enter("touch", "/opt/penstock/x").stderr.endswith("Read-only file system\n")
    assert_drains(pod, stack)
    assert not any(process.is_running() for process in inside)
    assert not any(pod.shm.iterdir())


def test_gateway_and_triton_from_their_images_share_memory(pod: Pod, shared_dir: Path) -> None:
    """Side by side in one network with one /dev/shm: pictures are answered, Triton reads the gateway's slab, and serves
    what is pulled into the volume of both."""
    left = pod.shm / "triton-9000-of-one-that-was-killed"
    left.touch()
    os.chown(left, USER, USER)
    triton = pod.start(IMAGES["triton"], name="triton", command=SIDECAR, volume="gateway")
    wait_until(lambda: "200" in pod.curl("-w", "%{http_code}", "http://127.0.0.1:9000/v2/health/live"), triton)
    environ = {**OPEN, "PENSTOCK_ENGINE": "http://127.0.0.1:9000", "PENSTOCK_MODELS": "identity_fp32,people,street"}
    gateway = started(pod, "gateway", environ=environ)
    assert people_seen(pod) == expected_people()
    server = next(each for each in triton.first.children(recursive=True) if each.name() == "tritonserver")
    wait_until(lambda: "_slab" in Path(f"/proc/{server.pid}/maps").read_text(), gateway)
    assert "penstock_slab_leased_bytes 0" in pod.curl("http://127.0.0.1:8002/metrics")
    assert not left.exists()
    shutil.copy(shared_dir / "models" / "FastestDet.onnx", gateway.home)
    pulled = gateway.enter("penstock", "models", "pull", "fastestdet", "--from", "/var/lib/penstock/FastestDet.onnx")
    assert pulled.returncode == 0, pulled.stderr
    picture = ("-H", "content-type: image/jpeg", "--data-binary", f"@{PICTURE}")
    assert '"label":"person"' in pod.curl(*picture, IMAGE_URL.format("fastestdet")).replace(": ", ":")
    assert "--allow-client-shm=true" not in server.cmdline(), "2.51 does not know it"
    assert gateway.enter("test", "-e", "/opt/penstock/.venv-triton").returncode != 0
    assert_drains(pod, gateway)
    assert triton.stop() == 0, triton.text()[-3000:]


def test_video_from_its_image_follows_people_through_a_clip(pod: Pod, shared_dir: Path) -> None:
    """The video program infers at the gateway, writes what it found into its volume, and is healthy meanwhile."""
    started(pod, "stack", environ=OPEN)
    shutil.copy(shared_dir / "media" / "vtest.avi", pod.home("video"))
    words = ["--url", "http://127.0.0.1:8000", "--model", "street", "--interval", "4", "--json"]
    words += ["--source", "/var/lib/penstock/vtest.avi", "--out", "/var/lib/penstock/out"]
    video = started(pod, "video", command=words)
    assert video.process.wait(300) == 0, video.text()[-3000:]
    lines = (video.home / "out" / "objects.jsonl").read_text().splitlines()
    assert len(lines) == 795
    assert (video.home / "out" / "annotated.mp4").stat().st_size > 100_000


def test_video_from_its_image_finishes_when_it_is_asked_to_end(pod: Pod, shared_dir: Path) -> None:
    """SIGTERM: what was decoded is written whole; the exit code is a shell's for SIGTERM."""
    started(pod, "stack", environ=OPEN)
    shutil.copy(shared_dir / "media" / "vtest.avi", pod.home("video"))
    words = ["--url", "http://127.0.0.1:8000", "--model", "street", "--loop", "--realtime"]
    words += ["--source", "/var/lib/penstock/vtest.avi", "--out", "/var/lib/penstock/out"]
    video = started(pod, "video", command=words)
    objects = video.home / "out" / "objects.jsonl"
    wait_until(lambda: objects.exists() and objects.stat().st_size > 2000, video)
    assert video.stop() == 143, video.text()[-3000:]
    written = [json.loads(line) for line in objects.read_text().splitlines()]
    assert written[0]["frame_num"] == 0


def test_load_from_its_image_asks_without_a_failure(pod: Pod) -> None:
    """The load generator against the stack beside it."""
    started(pod, "stack", environ=OPEN)
    words = ["--headless", "-u", "2", "-t", "5s", "--host", "http://127.0.0.1:8000", "--model", "street", "ImageUser"]
    load = pod.start(IMAGES["load"], name="load", command=words)
    assert load.process.wait(60) == 0, load.text()[-3000:]
    scenario = ["--headless", "--host", "http://127.0.0.1:8000", "--scenario", "image-steady", "--capacity", "4"]
    judged = pod.start(IMAGES["load"], name="judged", command=scenario)
    assert judged.process.wait(180) in (0, 1), judged.text()[-3000:]
    assert "verdict" in judged.text(), judged.text()[-3000:]
