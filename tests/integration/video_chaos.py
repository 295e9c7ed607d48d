"""What the fault tests of `penstock video run` share: a tiny network, clips, a program and what it says of itself."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import psutil
import yaml
from onnx import TensorProto, helper, numpy_helper

from tests.deepstream_pipeline.clips import Picture, write_clip
from tests.engines import onnx_models
from tests.integration.video_runs import Place, new_place, start_stack_at
from tests.support.http import Answer, call, post_json
from tests.support.stack import CHECKOUT, stop_stack
from tests.support.waiting import wait_for

Row = dict[str, Any]
FPS = 10.0
SIZE = (320, 192)
FRAMES = 40  # of a clip: the square goes there and back, and the clip begins where it ended
START_S, STOP_S = 60.0, 40.0
SPOT_CONFIG = """backend: "onnxruntime"
max_batch_size: 16
input [ { name: "images" data_type: TYPE_FP32 dims: [ 3, 96, 160 ] } ]
output [
  { name: "heatmap" data_type: TYPE_FP32 dims: [ 1, 12, 20 ] },
  { name: "distances" data_type: TYPE_FP32 dims: [ 4, 12, 20 ] }
]
instance_group [ { count: 1 } ]
parameters { key: "batch_owner" value { string_value: "gateway" } }
parameters { key: "network-type" value { string_value: "0" } }
parameters { key: "net-scale-factor" value { string_value: "0.00392156862745098" } }
parameters { key: "parse-bbox-func-name" value { string_value: "center-heatmap" } }
parameters { key: "pre-cluster-threshold" value { string_value: "0.5" } }
parameters { key: "nms-iou-threshold" value { string_value: "0.2" } }
parameters { key: "labels" value { string_value: "spot" } }
"""
LINE = {"line-crossing": [{"name": "Middle", "line": [[160, 0], [160, 192]], "mode": "loose"}]}


def spot() -> onnx.ModelProto:
    """A detector of a bright square: means of windows of 24 pixels, each 8; next to nothing to compute."""
    constants: dict[str, np.ndarray[Any, Any]] = {
        "limit": np.array([-0.6], np.float32),
        "slope": np.array([40.0], np.float32),
        "zero": np.array([0.0], np.float32),
        "reach": np.full((1, 4, 1, 1), np.log(1.5), np.float32),
    }
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["grey"], axes=[1], keepdims=1),
        helper.make_node("AveragePool", ["grey"], ["mean"], kernel_shape=[24, 24], strides=[8, 8], pads=[8, 8, 8, 8]),
        helper.make_node("Add", ["mean", "limit"], ["above"]),
        helper.make_node("Mul", ["above", "slope"], ["heatmap"]),
        helper.make_node("Mul", ["above", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "reach"], ["distances"]),
    ]
    shapes = {"images": (3, 96, 160), "heatmap": (1, 12, 20), "distances": (4, 12, 20)}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *dims]) for name, dims in shapes.items()]
    kept = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "spot", values[:1], values[1:], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def square(number: int, width: int, height: int) -> Picture:
    """A white square of 48 pixels on grey, that crosses the middle there and back every FRAMES pictures."""
    picture = np.full((height, width, 3), 70, np.uint8)
    step = number % FRAMES
    way = min(step, FRAMES - step) / (FRAMES / 2)
    left = int((width - 48) * way)
    picture[height // 2 - 24 : height // 2 + 24, left : left + 48] = 255
    return picture


def spot_clip(path: Path, *, size: tuple[int, int] = SIZE) -> Path:
    """Four seconds of the square, a key frame every second."""
    return write_clip(path, frames=FRAMES, fps=FPS, gop=10, size=size, picture=square)


@contextlib.contextmanager
def engine_at(folder: Path) -> Iterator[Place]:
    """A place with a running stack that serves spot; programs there join it."""
    place = new_place(folder)
    onnx_models.save(spot(), place.home / "models", "spot", config=SPOT_CONFIG)
    stack = start_stack_at(place, "--engine", "embedded", "--models", "spot")
    try:
        yield place
    finally:
        code = stop_stack(stack)
    assert code == 0, "".join(stack.log[-30:])
    left = place.traces()
    assert not left, left


@dataclass
class Program:
    """A running `penstock video run`."""

    process: subprocess.Popen[str]
    place: Place
    out: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def text(self) -> str:
        """Everything that it said on both streams."""
        return "".join([*self.out, *self.log])

    def ask(self, method: str, path: str, payload: object = None) -> Answer:
        """A call of the control API."""
        if payload is not None:
            return post_json(f"{self.url}{path}", payload)
        return call(method, f"{self.url}{path}")

    def streams(self) -> dict[str, Row]:
        """Every source's statistics, by its id."""
        return {row["source_id"]: row for row in self.ask("GET", "/v1/streams").json["streams"]}

    def stream(self, source_id: str) -> Row:
        """One source's statistics."""
        row: Row = self.ask("GET", f"/v1/streams/{source_id}").json
        return row

    def states(self) -> dict[str, str]:
        """By source."""
        return {name: row["state"] for name, row in self.streams().items()}

    def metrics(self) -> str:
        """Prometheus' page."""
        return self.ask("GET", "/metrics").body.decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of that name, without its prefix, which have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = re.findall(rf"^penstock_video_{name}(?:{{(.*)}})? (\S+)$", self.metrics(), re.MULTILINE)
        return sum(float(value) for labels_text, value in lines if all(one in labels_text for one in wanted))

    def wait_for_states(self, wanted: Mapping[str, str], timeout_s: float = 40.0) -> float:
        """Seconds until each of those sources was in its state, all at one moment."""
        return wait_for(
            lambda: wanted.items() <= self.states().items(), timeout_s, lambda: f"{wanted}, but {self.reasons()}"
        )

    def reasons(self) -> dict[str, tuple[str, str]]:
        """State and reason, by source."""
        return {name: (row["state"], row["reason"]) for name, row in self.streams().items()}

    def family(self) -> list[psutil.Process]:
        """Its processes, the program first."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """The exit code of an orderly end; nothing of it is left then."""
        everyone = self.family()
        self.process.send_signal(how)
        code = self.process.wait(STOP_S)
        _, left = psutil.wait_procs(everyone[1:], timeout=5.0)
        assert not left, [each.cmdline() for each in left]
        return code


@contextlib.contextmanager
def program_at(place: Place, folder: Path, settings: Mapping[str, Any]) -> Iterator[Program]:
    """`penstock video run` of these settings until the block ends; whatever is left then is killed."""
    folder.mkdir(exist_ok=True)
    path = folder / "video.yaml"
    path.write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    words = ("video", "run", str(path), "--api-port", "0", "--allow-outbound", "127.0.0.1", "--json")
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", *words], env=place.environ, cwd=CHECKOUT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    program = Program(process, place)
    pairs = ((process.stdout, program.out), (process.stderr, program.log))
    readers = [threading.Thread(target=_collect, args=pair, daemon=True) for pair in pairs]
    for reader in readers:
        reader.start()
    try:
        program.url = _api_url(program)
        yield program
    finally:
        _end(process)
        for reader in readers:
            reader.join(10.0)


def source(uri: str, name: str, **more: object) -> Row:
    """A source of the settings that is quick to notice and to come back."""
    quick = {"rtsp-reconnect-interval": 2, "open-timeout": 4}
    return {"uri": uri, "camera_id": name, **quick, **{key.replace("_", "-"): value for key, value in more.items()}}


def settings_of(sources: Sequence[Row], *, model: str = "spot", **sections: object) -> Row:
    """Of a program with these sources."""
    return {"source": list(sources), "primary-gie": {"model": model}, **sections}


@dataclass(frozen=True)
class Count:
    """What a source had given at a moment."""

    at: float
    frames: int


def counts_of(program: Program, names: Sequence[str]) -> dict[str, Count]:
    """How many frames of each of them the network has answered by now."""
    began = time.monotonic()
    rows = program.streams()
    at = (began + time.monotonic()) / 2
    return {name: Count(at, rows[name]["inferred"]) for name in names}


def rates(before: Mapping[str, Count], after: Mapping[str, Count]) -> dict[str, float]:
    """Answered frames a second between two counts."""
    return {name: (after[name].frames - row.frames) / (after[name].at - row.at) for name, row in before.items()}


def lines_of(path: Path) -> list[Row]:
    """Of a JSONL file that may still be written."""
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _api_url(program: Program) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if found := re.search(r'"api_url":"(http://[^"]+)"', program.text):
            return found[1]
        if program.process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"it did not start (exit code {program.process.poll()}):\n{program.text}")


def _end(process: subprocess.Popen[str]) -> None:
    """It is gone, and what it started with it."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        everyone = psutil.Process(process.pid).children(recursive=True)
        for each in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(each.pid, signal.SIGKILL)
    process.kill()
    process.wait(30.0)


def _collect(stream: IO[str], lines: list[str]) -> None:
    with stream:
        lines.extend(iter(stream.readline, ""))
