"""`penstock up --video`: cameras are tried, added, edited and saved over the control API, with the stack's keys."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.gateway.auth.api_keys import digest_of
from penstock.gateway.settings import Settings
from penstock.network import bind
from penstock_video.cli.beside import create_config
from tests.deepstream_pipeline.api.asking import JSON, ask
from tests.deepstream_pipeline.clips import write_clip
from tests.deepstream_pipeline.rtsp.cameras import Camera, rtsp_server
from tests.support.stack import RunningStack, start_stack, stop_stack

KEYS = {role: f"key-of-role-{role}-1234567890" for role in ("read", "admin")}
WAIT_S = 60.0
LINES = {"line-crossing": [{"name": "Door", "line": [[10, 50], [150, 50]]}]}


def free_port() -> int:
    with bind("127.0.0.1", 0, flag="--none") as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(home: Path, port: int) -> Iterator[RunningStack]:
    """A stack with keys and a video program, whose cameras may be on loopback."""
    access = home / "access.toml"
    roles = {"read": '["read"]', "admin": '["read", "admin"]'}
    rows = (f'[keys.{role}]\nsha256 = "{digest_of(key)}"\nroles = {roles[role]}\n' for role, key in KEYS.items())
    access.write_text("".join(rows))
    words = ("--engine", "embedded", "--models", "street", "--video", "--video-port", str(port))
    stack = start_stack(home, *words, "--access-file", str(access), environ={"CAMERA_PASSWORD": "secret"})
    try:
        stack.wait_for_log("control API")
        yield stack
    finally:
        assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def until(is_so: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_camera_is_tried_added_edited_and_there_after_a_restart(tmp_path: Path) -> None:
    """FAULTS 95: roles and address rules hold on port 8010; the file and the API agree, and a variable stays one.

    The video program that is killed comes back with its cameras, and the gateway does not notice.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    file = tmp_path / "video.yaml"

    def call(method: str, path: str, body: object = None, role: str = "admin") -> Any:
        return ask(url, method, path, body, {**JSON, "x-api-key": KEYS[role]})

    def stream() -> dict[str, Any] | None:
        try:
            answer = call("GET", "/v1/streams/gate", role="read")
        except OSError:
            return None
        return answer.json if answer.status == 200 and answer.json["state"] == "running" else None

    clip = write_clip(tmp_path / "a.mp4", frames=50, fps=25, gop=12)
    cameras = [Camera("/gate", [clip], user="viewer", password="secret"), Camera("/yard", [clip])]
    with rtsp_server(cameras, tmp_path) as server:
        gate = server.url("/gate")
        file.write_text(
            "primary-gie: {model: street}\napi: {allow-outbound: [127.0.0.1]}\nsource:\n"
            f"- {{uri: '{gate.replace('secret', '${CAMERA_PASSWORD}')}', camera_id: other}}\n"
        )
        with running(tmp_path, port) as stack:
            assert call("POST", "/v1/streams/probe", {"uri": gate}, role="read").status == 403
            assert ask(url, "GET", "/v1/streams").status == 401
            assert call("POST", "/v1/streams/probe", {"uri": "rtsp://127.0.0.2/1"}).status == 403
            tried = call("POST", "/v1/streams/probe", {"uri": gate})
            assert (tried.status, tried.json["width"], tried.json["codec"]) == (200, 160, "h264")
            added = call("POST", "/v1/streams", {"uri": gate, "source_id": "gate"})
            assert (added.status, added.json["saved"]) == (201, "yes")
            until(stream)
            assert call("PUT", "/v1/streams/gate/rules", LINES).headers["x-penstock-saved"] == "yes"
            edited = call("PUT", "/v1/streams/gate", {"uri": server.url("/yard"), "camera_name": "Yard"})
            assert (edited.status, edited.json["saved"]) == (200, "yes")
            assert until(stream)["camera_name"] == "Yard"
            assert call("GET", "/v1/streams/gate/rules").json == LINES
            pid = _video_pid(stack)
            os.kill(pid, signal.SIGKILL)
            assert until(lambda: _video_pid(stack) not in (None, pid) and stream())["camera_name"] == "Yard"
            assert not stack.logged("gateway died")
        assert "${CAMERA_PASSWORD}" in file.read_text()
        with running(tmp_path, port):
            assert until(stream)["uri"] == server.url("/yard")
            assert call("GET", "/v1/streams/gate/rules").json == LINES
            assert call("GET", "/v1/streams/other/options").json["uri"].startswith("rtsp://***@")


def _video_pid(stack: RunningStack) -> int | None:
    """The process ID of the stack's video program."""
    for folder in Path(f"/proc/{stack.process.pid}/task").iterdir():
        for child in (folder / "children").read_text().split():
            if b"beside" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return int(child)
    return None


def test_first_start_makes_a_settings_file_with_an_available_model(tmp_path: Path) -> None:
    """Without a file the program waits for the first camera; a video that ends does not end it."""
    port = free_port()
    words = ("--engine", "embedded", "--models", "street", "--video", "--video-port", str(port))
    clip = write_clip(tmp_path / "a.mp4", frames=10, fps=25)
    stack = start_stack(tmp_path, *words)
    try:
        stack.wait_for_log("control API")
        first = yaml.safe_load((tmp_path / "video.yaml").read_text())
        assert first["primary-gie"] == {"model": "street"}
        assert (tmp_path / "video" / "recordings").is_dir()
        url = f"http://127.0.0.1:{port}"
        assert ask(url, "POST", "/v1/streams", {"uri": str(clip), "source_id": "v"}).json["saved"] == "yes"
        until(lambda: ask(url, "GET", "/v1/streams/v").json["state"] == "ended")
        assert ask(url, "GET", "/health/ready").status == 200
        assert not stack.logged("video program ended")
    finally:
        assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def test_settings_file_as_it_was_created_gets_a_detector_that_was_pulled(tmp_path: Path) -> None:
    """The catalogue's `yolox-nano` by its own name; a file that a user changed stays as it is."""
    file = tmp_path / "video.yaml"
    stack = Settings(home=tmp_path, engine="embedded")
    create_config(file, stack)
    assert yaml.safe_load(file.read_text())["primary-gie"] == {"model": "street"}
    (tmp_path / "models" / "yolox-nano" / "1").mkdir(parents=True)
    (tmp_path / "models" / "yolox-nano" / "config.pbtxt").write_text('backend: "onnxruntime"')
    create_config(file, stack)
    assert yaml.safe_load(file.read_text())["primary-gie"] == {"model": "yolox-nano"}
    file.write_text("primary-gie: {model: street}\n")
    create_config(file, stack)
    assert file.read_text() == "primary-gie: {model: street}\n"


def test_wrong_settings_file_is_reported_until_it_is_corrected(tmp_path: Path) -> None:
    """By the stack, with file and key, while the video program is tried again."""
    port = free_port()
    file = tmp_path / "video.yaml"
    file.write_text("primary-gie: {model: street, intervall: 2}\n")
    words = ("--engine", "embedded", "--models", "street", "--video", "--video-port", str(port))
    stack = start_stack(tmp_path, *words)

    def fault() -> str:
        return str(ask(stack.http_url, "GET", "/v1/system").json["video_fault"])

    try:
        text = until(fault)
        assert text.startswith(f"{file}:1:")
        assert "primary-gie.intervall" in text
        file.write_text("primary-gie: {model: street, interval: 2}\n")
        stack.wait_for_log("control API")
        until(lambda: not fault())
    finally:
        assert stop_stack(stack) == 0, "".join(stack.log[-30:])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--video-config", "video.yaml"), "give --video"),
        (("--video", "--video-config", "/no/such.yaml"), "no such file"),
    ],
)
def test_video_program_that_cannot_run_is_refused_at_the_start(
    tmp_path: Path, words: tuple[str, ...], text: str
) -> None:
    """In one sentence with the fix."""
    stack = start_stack(tmp_path, "--engine", "embedded", *words, "--video-port", "0", wait=False)
    assert stack.process.wait(WAIT_S) == 2
    assert stack.wait_for_log(text, timeout_s=5.0)
