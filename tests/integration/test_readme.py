"""Each command of README.md and of docs/ runs, as it stands there, against the real stack (on the tests' own ports).

tests/docs checks the arguments of all commands, also of those that are in ELSEWHERE.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deploy.models.street.render import write_scenes
from deploy.models.street.scene import SCENARIOS
from penstock_video.sinks.schemas import Schema, objects_line
from penstock_video.types import Detections, Frame, FrameResult, Tracks
from tests.deepstream_pipeline.clips import write_clip
from tests.integration.pictures import frames, jpeg
from tests.support.http import post_json
from tests.support.stack import CHECKOUT, RunningStack

pytestmark = pytest.mark.xdist_group("stack")
GUIDES = (
    "quickstart install coming-from troubleshooting models card-parameters video batching gpu deploy metrics security"
)
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in GUIDES.split()))
PENSTOCK = ".venv/bin/penstock"
PROGRAMS = ("make", "curl", ".venv/bin/", "docker", "helm")
# What starts like this is not run here, and why.
ELSEWHERE = {
    "make check": "continuous integration runs it: .ci/run",
    "make test": "runs this",
    "make up": "a person runs it, and .ci/run makes the same environment",
    "make gpu": "downloads gigabytes",
    "make tensorrt": "downloads 240 MB: tests/deploy/test_make.py",
    "docker": "never run: no Docker; tests/deploy checks the files",
    "helm": "never run: no cluster; tests/deploy/chart renders the chart",
    "make serve": "a person runs it; what it runs: tests/integration/test_serve.py",
    f"{PENSTOCK} serve": "runs until Ctrl-C: tests/integration/test_serve.py",
    f"{PENSTOCK} up": "the stack of the tests; its flags: tests/integration/test_access.py, test_tls.py, test_audit.py",
    f"{PENSTOCK} models add best.pt2": "needs PyTorch: tests/models/inspect/test_torch_files.py",
    f"{PENSTOCK} models optimize yolox-nano --torch": "needs PyTorch: tests/models/optimize/test_torch_twin.py",
    f"{PENSTOCK} setup": "downloads 410 MB; what it does: tests/engines/test_triton_environment.py",
    f"{PENSTOCK} mps": "needs a GPU: tests/gpu/test_mps_gpu.py",
    f"{PENSTOCK} video run deepstream_pipeline": "needs cameras: tests/integration/test_video_run.py",
    f"{PENSTOCK} video run cameras.yaml": "needs cameras: tests/integration/test_video_run.py",
}


LONG = (  # run by make test-long; a run with a real detector: test_video_truth
    *(f"{PENSTOCK} models optimize", f"{PENSTOCK} load run", f"{PENSTOCK} load knee"),
    f"{PENSTOCK} video run --source video.mp4 --model",
)
FILES_OF_A_PAGE = {"ini": "config_infer_primary.txt", "yaml": "cameras.yaml"}  # docs/coming-from.md shows them
PASSWORDS = {"DOOR_PASSWORD": "a", "MQTT_PASSWORD": "b"}  # of the example cameras.yaml
NO_GATEWAY = ["--url", "http://127.0.0.1:9"]
OPTIONS: dict[str, Callable[[RunningStack, Path], list[str]]] = {
    "list": lambda stack, _: ["--url", stack.http_url],
    "explain": lambda stack, _: ["--url", stack.http_url],
    "check": lambda stack, _: ["--url", stack.http_url],
    "inspect": lambda _, __: [],
    "add": lambda _, __: NO_GATEWAY,
    "remove": lambda _, __: NO_GATEWAY,
    "pull": lambda _, shared_dir: ["--from", str(shared_dir / "models"), *NO_GATEWAY],
    "load": lambda stack, _: ["--url", stack.http_url],
    "optimize": lambda _, __: NO_GATEWAY,
    "build": lambda _, __: [],
}
NO_HURRY = ["--slo-p99-ms", "8000"]  # how fast it is here, is not the question
LOAD_OPTIONS: dict[str, Callable[[RunningStack], list[str]]] = {
    "run": lambda stack: [*where(stack), *NO_HURRY, "--duration", "2", "--rate", "20"],  # without: long/test_load
    "knee": lambda stack: [*where(stack), *NO_HURRY, "--seconds", "1", "--highest", "8", "--start", "4"],
}


def where(stack: RunningStack) -> list[str]:
    """The tests' own ports, as flags."""
    return ["--target", stack.http_url, "--grpc", stack.grpc_address]


def frame_with_a_person() -> FrameResult:
    """A frame in which one person stands."""
    person = Detections(np.float32([[10, 10, 40, 90]]), np.float32([0.9]), np.int64([0]))
    tracks = Tracks(person, np.int64([1]), np.int64([5]))
    return FrameResult(Frame("video", 0, 0.0, 0.0, 768, 576), tracks, labels=("person",))


def commands(page: str) -> list[str]:
    """The indented lines of a page that start with a program, without their comments."""
    lines = re.findall(r"^    (\S.*)$", (CHECKOUT / page).read_text(), re.MULTILINE)
    lines = [re.sub(r"^penstock ", f"{PENSTOCK} ", line) for line in lines]
    return [re.split(r"\s{2,}#", line)[0].strip() for line in lines if line.startswith(PROGRAMS)]


ALL_COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands(page)))


def is_part_of_another(command: str) -> bool:
    """Whether a page has the same command with more flags, which then runs in its place."""
    not_run = (*ELSEWHERE, *LONG)
    return any(other.startswith(f"{command} --") and not other.startswith(not_run) for other in ALL_COMMANDS)


def here(command: str, stack: RunningStack) -> list[str]:
    """The command with the tests' ports, and with the short run of what would run long."""
    command = command.replace("127.0.0.1:8000", stack.http_url.removeprefix("http://"))
    command = command.replace("127.0.0.1:8002/metrics", stack.metrics_url)
    ours = (".venv/bin/", "deepstream_pipeline/")
    words = [str(CHECKOUT / word) if word.startswith(ours) else word for word in shlex.split(command)]
    if words[0].endswith("penstock") and words[1] in ("infer", "status"):
        words += ["--url", stack.http_url]
    if words[1:2] == ["plan"]:  # the whole race: long/test_replay_race
        words += ["--policy", "penstock", "--count", "1000", "--seeds", "2", "--overload", "1.5"]
    if words[1:3] == ["video", "run"]:  # an engine of its own: another test's stack may be going just now
        words += ["--engine", "embedded", "--api-port", "0"]
    if "--scenes" in words:
        words += ["--scenes", "3"]
    if words[1:2] == ["load"]:
        words += LOAD_OPTIONS.get(words[2], lambda _: [])(stack)
    return words


def write_my_detector(repository: Path) -> None:
    """The model of docs/card-parameters.md: the page's config.pbtxt, and FastestDet's file."""
    page = (CHECKOUT / "docs" / "card-parameters.md").read_text()
    lines = re.findall(r"^    ((?:input|output|parameters) .*)$", page, re.MULTILINE)
    folder = repository / "my-detector"
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text("\n".join(lines))
    shutil.copy(repository / "fastestdet" / "1" / "model.onnx", folder / "1")


def write_files_of_the_pages(folder: Path, shared_dir: Path, photo: bytes) -> None:
    """The photo, model, film and settings that commands name."""
    (folder / "photo.jpg").write_bytes(photo)
    (folder / "best.onnx").symlink_to(shared_dir / "models" / "yolox_nano.onnx")
    write_clip(folder / "video.mp4", frames=20)
    for kind, name in FILES_OF_A_PAGE.items():
        block = re.search(rf"(?ms)^```{kind}\n(.*?)^```", (CHECKOUT / "docs" / "coming-from.md").read_text())
        assert block, kind
        (folder / name).write_text(block[1])


def test_pages_name_commands() -> None:
    """The commands are found, make's targets exist, and no reason for not running is left over."""
    assert all(len(commands(page)) >= 1 for page in PAGES)
    for command in ALL_COMMANDS:
        if command.startswith("make"):
            target = command.split()[1]
            assert re.search(rf"^{target}:", (CHECKOUT / "Makefile").read_text(), re.MULTILINE), command
    assert all(any(command.startswith(prefix) for command in ALL_COMMANDS) for prefix in ELSEWHERE)


@pytest.fixture(scope="module")
def photo(shared_dir: Path) -> bytes:
    """A JPEG in which people walk."""
    return jpeg(frames(shared_dir / "media" / "vtest.avi")[1])


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.long] if command.startswith(LONG) else [])
        for command in ALL_COMMANDS
        if not command.startswith(tuple(ELSEWHERE)) and not is_part_of_another(command)
    ],
)
def test_command_of_a_page_runs(
    command: str, stack: RunningStack, shared_dir: Path, photo: bytes, tmp_path: Path
) -> None:
    """Exit code 0, and the picture that was asked for is written."""
    write_files_of_the_pages(tmp_path, shared_dir, photo)
    if "replay" in command:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "objects.jsonl").write_bytes(objects_line(frame_with_a_person(), Schema.FULL) + b"\n")
    words = here(command, stack)
    environ = os.environ | {"PENSTOCK_HOME": str(tmp_path / "home"), "PYTHONPATH": str(CHECKOUT)} | PASSWORDS
    if words[1:2] == ["models"]:
        words += OPTIONS[words[2]](stack, shared_dir)
    if "remove" in words or words[2:4] in (["optimize", "best"], ["build", "best"]):
        add = [*words[:2], "add", "best.onnx", *NO_GATEWAY]
        subprocess.run(add, cwd=tmp_path, env=environ, capture_output=True, timeout=90, check=True)
    if words[1] in ("infer", "video"):
        words = ["yolox-nano" if word == "best" else word for word in words]
    if "my-detector" in words:
        write_my_detector(stack.home / "models")
        loaded = post_json(f"{stack.http_url}/v2/repository/models/my-detector/load", {})
        assert loaded.status == 200, loaded.body
    if (
        words[2:4] == ["build", "yolox-nano"]
        or words[2:3] == ["check"]
        or (words[1:2] == ["video"] and "yolox-nano" in words)
    ):
        environ["PENSTOCK_HOME"] = str(stack.home)
    if "--calibrate" in words:
        write_scenes(tmp_path / words[words.index("--calibrate") + 1], 24, 1, size=(640, 360), scenarios=SCENARIOS)
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout or done.stderr
    if words[1:3] == ["video", "run"]:
        results = {path.name for path in (tmp_path / "out").iterdir()}
        assert results == {"annotated.mp4", "poster.jpg", "objects.jsonl", "events.jsonl", "events"}
    if "--draw" in words:
        assert (tmp_path / words[words.index("--draw") + 1]).stat().st_size > 1000
