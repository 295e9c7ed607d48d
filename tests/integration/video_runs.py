"""`penstock video run` as a user types it, apart from every other stack of this machine, and what it leaves behind."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import av
import numpy as np
import numpy.typing as npt
import onnx
import psutil
import yaml
from onnx import TensorProto, helper

from deploy.models.street.clip import Clip, make_clip
from loadtest.bench.video.detection_settings import cut
from penstock_video.analytics.rules import Rules, section_of
from tests.engines import onnx_models
from tests.support.stack import CHECKOUT, RunningStack, start_stack

Line = dict[str, Any]
RUN_TIMEOUT_S = 90.0
COLOURS = ("red", "green", "blue")
COLOUR_CONFIG = """backend: "onnxruntime"
max_batch_size: 16
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 32, 32 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
parameters { key: "network-type" value { string_value: "1" } }
parameters { key: "net-scale-factor" value { string_value: "0.00392156862745098" } }
parameters { key: "labels" value { string_value: "red;green;blue" } }
parameters { key: "topk" value { string_value: "1" } }
parameters { key: "batch_owner" value { string_value: "gateway" } }
"""
TABLE_CONFIG = """backend: "onnxruntime"
max_batch_size: 0
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 3 ] } ]
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs see no stack but those of the same place. home: of their models. temp: of their run directories."""

    home: Path
    temp: Path

    @property
    def environ(self) -> dict[str, str]:
        """Of every command there."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        return kept | {"TMPDIR": str(self.temp), "PENSTOCK_HOME": str(self.home), "COLUMNS": "200"}

    def engines(self) -> list[str]:
        """The names in shared memory of the engines that run there now."""
        return [path.name.removeprefix("run-") for path in self.temp.glob("penstock-*/run-*")]

    def processes(self) -> list[int]:
        """Of everything that runs there."""
        mark = f"TMPDIR={self.temp}".encode()
        return [pid for pid in psutil.pids() if mark in _environ_of(pid)]

    def shared_memory(self) -> int:
        """Open descriptors of memory that is shared (rings, slabs), of all that runs there."""
        return sum(link.startswith(("/memfd:", "/dev/shm/")) for pid in self.processes() for link in _links_of(pid))

    def traces(self) -> list[str]:
        """Of engines that run or ran there: processes, run directories."""
        found = [f"process {pid}" for pid in self.processes()]
        found += [str(path) for path in self.temp.glob("penstock-*/run-*")]
        return found


@dataclass(slots=True)
class Ended:
    """A run that is over."""

    code: int
    out: str
    err: str


@dataclass
class Running:
    """A run that is not over."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of both streams."""
        return "".join(self.said)

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """The first place that matches in what it said."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if found := re.search(pattern, self.text):
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"it did not say {pattern!r} (exit code {self.process.poll()}):\n{self.text}")

    def api_url(self) -> str:
        """When it runs."""
        return self.wait_for(r"control API (http://[^\s;]+)")[1]


def new_place(folder: Path) -> Place:
    """With the shipped models only."""
    place = Place(folder / "home", folder / "t")
    place.home.mkdir()
    place.temp.mkdir()
    return place


def put_model(place: Place, shared_dir: Path, name: str = "fastestdet") -> None:
    """As a user does who has the file."""
    pull = ["models", "pull", name, "--from", str(shared_dir / "models"), "--url", "http://127.0.0.1:9"]
    subprocess.run(_command(*pull), check=True, env=place.environ, cwd=CHECKOUT, capture_output=True)


def put_small_models(place: Place) -> None:
    """colour: a classifier that says which of red, green and blue a picture has most of; table: no image model."""
    nodes = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[2, 3], keepdims=0)]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
        for name, dims in (("x", ["N", 3, 32, 32]), ("y", ["N", 3]))
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "colour", values[:1], values[1:]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.checker.check_model(model)
    onnx_models.save(model, place.home / "models", "colour", config=COLOUR_CONFIG)
    onnx_models.save(onnx_models.identity(), place.home / "models", "table", config=TABLE_CONFIG)


def start_stack_at(place: Place, *arguments: str, **environ: str) -> RunningStack:
    """A stack that runs of the place join."""
    return start_stack(place.home, *arguments, environ={"TMPDIR": str(place.temp), **environ})


def two_ports() -> tuple[str, str]:
    """Two free ports, the second one above the first."""
    for _ in range(50):
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return str(port), str(port + 1)
    raise AssertionError("no two ports are free")


def video(place: Place, *words: object, timeout_s: float = RUN_TIMEOUT_S, **environ: str) -> Ended:
    """`penstock video WORDS…` to its end."""
    done = subprocess.run(
        _command("video", *map(str, words)), env=place.environ | environ, cwd=CHECKOUT,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def video_unheard(place: Place, *words: object, timeout_s: float = RUN_TIMEOUT_S) -> int:
    """The exit code of `penstock video WORDS…` when its output goes into a pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = _command("video", *map(str, words))
        done = subprocess.run(
            command, env=place.environ, cwd=CHECKOUT, stdout=writer, stderr=writer, timeout=timeout_s, check=False
        )
    finally:
        os.close(writer)
    return done.returncode


def run(place: Place, *words: object, timeout_s: float = RUN_TIMEOUT_S, **environ: str) -> Ended:
    """`penstock video run WORDS…` to its end, without the control API."""
    return video(place, "run", *words, "--no-api", timeout_s=timeout_s, **environ)


@contextlib.contextmanager
def begun(place: Place, *words: object, **environ: str) -> Iterator[Running]:
    """`penstock video run WORDS…` while the block runs, its control API on any port; killed then if it is not over."""
    process = subprocess.Popen(
        _command("video", "run", *map(str, words), "--api-port", "0"), env=place.environ | environ, cwd=CHECKOUT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    running = Running(process)
    assert process.stdout is not None
    reader = threading.Thread(target=_collect, args=(process.stdout, running.said), daemon=True)
    reader.start()
    try:
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        reader.join(10)


def one_sentence(ended: Ended) -> bool:
    """Whether the last thing that it said is one line of this command, and no traceback is anywhere."""
    lines = [line for line in ended.err.splitlines() if line.startswith("penstock: ")]
    return len(lines) == 1 and ended.err.splitlines()[-1] == lines[0] and "Traceback" not in ended.err + ended.out


def lines(path: Path) -> list[Line]:
    """Of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_counts(path: Path, source_id: str) -> dict[str, int]:
    """Of the source's last frame."""
    return [dict(line["counts"]) for line in lines(path) if line["source_id"] == source_id][-1]


def first_frames(path: Path, source: Path, count: int) -> Path:
    """The path, at which the first frames of the clip lie as they are: packets copied, nothing encoded again."""
    cut(source, path, count)
    return path


def shown_by(path: Path) -> Iterator[npt.NDArray[np.uint8]]:
    """Every frame, (H, W, 3) RGB, one after the other."""
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


def pictures_of(path: Path) -> list[npt.NDArray[np.uint8]]:
    """All of them at once, a megabyte each."""
    return list(shown_by(path))


def times_of(path: Path) -> list[float]:
    """Of every frame, in seconds."""
    with av.open(str(path)) as container:
        return [float(frame.time) for frame in container.decode(video=0)]


def write_rules(path: Path, rules: Rules) -> Path:
    """The path, at which the rules stand as `--rules` takes them."""
    path.write_text(yaml.safe_dump(section_of(rules)))
    return path


def write_street(path: Path, seed: int, seconds: float, fps: float, *, strongest: str = "") -> Clip:
    """A rendered street with known truth, encoded once. strongest: one of COLOURS, of which it then has most."""
    share = np.array([1.0 if strongest in ("", name) else 0.75 for name in reversed(COLOURS)])
    clip = make_clip(seed, seconds, fps)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=round(fps), options={"crf": "16", "preset": "veryfast"})
        for number, (picture, _) in enumerate(clip.frames()):
            if not number:
                stream.height, stream.width = picture.shape[:2]
                stream.pix_fmt = "yuv420p"
            tinted = np.ascontiguousarray((picture * share).astype(np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(tinted, format="bgr24")))
        container.mux(stream.encode(None))
    return clip


def true_crossings(clip: Clip) -> Counter[tuple[str, str]]:
    """(label, direction) of everybody who crosses the clip's line."""
    return Counter((crossing.label, crossing.direction) for crossing in clip.crossings())


def tracked(line: Line) -> list[Line]:
    """The objects of a line of objects.jsonl that have a track."""
    return [row for row in line["objects"] if row["track_id"] is not None]


def counted_crossings(counts: dict[str, int], ways: Sequence[str] = ("right", "left")) -> Counter[tuple[str, str]]:
    """The same of a frame's counts."""
    keys = (key.split("/") for key in counts if key.startswith("line-crossing/") and key.count("/") == 2)
    return Counter({(label, way): counts[f"{kind}/{way}/{label}"] for kind, way, label in keys if way in ways})


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *words]


def _collect(stream: IO[str], said: list[str]) -> None:
    with stream:
        said.extend(iter(stream.readline, ""))


def _links_of(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


def _environ_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
