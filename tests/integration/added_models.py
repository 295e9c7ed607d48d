"""Stacks whose models were added by `penstock models add`, and a crowd's requests with their answers when alone."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime as ort
import tritonclient.http
from onnx import TensorProto
from typer.testing import CliRunner

from penstock.cli import models as models_command
from penstock.engines.config_pbtxt import read_config
from penstock.protocol.inference import Array
from tests.integration.pictures import frames, jpeg
from tests.integration.test_batching import multipart
from tests.support import made_networks
from tests.support.http import call
from tests.support.stack import CHECKOUT, RunningStack, start_stack

REAL = CHECKOUT.parent / "shared"
IN_PARTS_OF_1 = ("--scale", str(1 / 255))
Make = Callable[[Path], Path]
MADE: dict[str, tuple[Make, tuple[str, ...]]] = {
    "yolox": (made_networks.yolox, ("--layout", "yolox", "--color", "bgr")),
    "dfine": (made_networks.detector_with_sizes, ()),
    "faces": (made_networks.faces, ()),
    "persons": (made_networks.embedding, ()),
    "classes": (made_networks.classifier, ()),
}
PUBLISHED: dict[str, tuple[str, tuple[str, ...]]] = {
    "yolox": ("yolox_nano_free_batch.onnx", ()),
    "dfine": ("deimv2_atto.onnx", ()),
    "faces": ("ultraface_rfb320.onnx", ()),
    "persons": ("osnet_x0_25_msmt17.onnx", ()),
}
ULTRALYTICS: dict[str, Make] = {
    "safety": made_networks.ultralytics,
    "safety-seg": lambda path: made_networks.ultralytics(path, task="segment"),
    "safety-half": lambda path: made_networks.ultralytics(path, kind=TensorProto.FLOAT16),
}


def add_models(home: Path, folder: Path) -> None:
    """Adds the five models, the published ones where they are, and Ultralytics'."""
    for name, (make, flags) in MADE.items():
        if name in PUBLISHED and REAL.is_dir():
            file, flags = PUBLISHED[name]
            add(home, REAL / "models" / file, name, *flags)
        else:
            add(home, make(folder / f"{name}.onnx"), name, *flags)
    for name, make in ULTRALYTICS.items():
        add(home, make(folder / f"{name}.onnx"), name, *IN_PARTS_OF_1)


def add(home: Path, file: Path, name: str, *flags: str) -> None:
    words = ["add", str(file), "--name", name, "--no-load", "--home", str(home), *flags]
    done = CliRunner().invoke(models_command.app, words)
    assert done.exit_code == 0, done.output


def start_added(home: Path, engine: str, source: Path) -> RunningStack:
    """A stack of that engine, with the models that were added to the home `source`.

    Batches of eight, whatever was the fastest size where they were added, and time for a busy machine.
    """
    shutil.copytree(source / "models", home / "models")
    batching = [word for name in MADE for word in ("--batching", f"{name}=gateway,max_batch_size=8,slo_p99_ms=60000")]
    return start_stack(home, "--engine", engine, "--models", ",".join((*MADE, *ULTRALYTICS)), *batching)


def pictures() -> list[bytes]:
    """Eight JPEGs and PNGs of different sizes: photos where they are, and made ones."""
    made = []
    for seed, (width, height) in enumerate([(640, 480), (97, 61), (300, 200), (480, 640), (33, 200)]):
        coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        made.append(jpeg(np.asarray(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), np.uint8)))
    if not REAL.is_dir():
        return made
    photos = [(REAL / "media" / f"{name}.jpg").read_bytes() for name in ("astronaut", "chelsea", "coffee")]
    return [*made, *photos, *map(jpeg, frames(REAL / "media" / "vtest.avi", 2))]


@dataclass
class CrowdModel:
    """An added model, its engine-free twin, and the answers to single requests. rows: raw inputs of one row each."""

    name: str
    stack: RunningStack
    rows: list[dict[str, Array]]
    session: ort.InferenceSession
    alone: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.stack.http_url.removeprefix("http://")

    @property
    def outputs(self) -> list[str]:
        return [output.name for output in self.session.get_outputs()]

    def ask_alone(self, images: Sequence[bytes]) -> None:
        """Answers by kind of request, each to one picture or row and nothing else under way."""
        self.alone = {
            "image": [self.image([image])[0][0] for image in images],
            "bytes": [self.encoded([image]) for image in images],
            "raw": [self.raw([row]) for row in self.rows],
        }

    def image(self, images: Sequence[bytes]) -> tuple[list[Any], int]:
        """Results of /image, and how many of its engine calls it shared with other requests."""
        body, kind = multipart(*images)
        url = f"{self.stack.http_url}/v2/models/{self.name}/image"
        answer = call("POST", url, body, {"content-type": kind, "x-penstock-explain": "1"})
        assert answer.status == 200, answer.body
        traces = answer.json["explain"]
        own = Counter(one["batch"] for one in traces)
        shared = {one["batch"] for one in traces if one["batch_requests"] > own[one["batch"]]}
        return answer.json["results"], len(shared)

    def encoded(self, images: Sequence[bytes]) -> dict[str, Array]:
        array = np.empty(len(images), np.object_)
        array[:] = images
        return self._infer({self.session.get_inputs()[0].name: array})

    def raw(self, rows: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        return self._infer({name: np.concatenate([row[name] for row in rows]) for name in rows[0]})

    def _infer(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        with tritonclient.http.InferenceServerClient(self.address) as client:
            inputs = []
            for name, array in feed.items():
                datatype = {"object": "BYTES", "float32": "FP32", "int64": "INT64"}[array.dtype.name]
                inputs.append(tritonclient.http.InferInput(name, list(array.shape), datatype))
                inputs[-1].set_data_from_numpy(array)
            answer = client.infer(self.name, inputs)
            return {name: answer.as_numpy(name) for name in self.outputs}


def crowd_models(stack: RunningStack) -> list[CrowdModel]:
    """The five models, with eight raw rows each."""
    found = []
    for number, name in enumerate(MADE):
        folder = stack.home / "models" / name
        options = ort.SessionOptions()
        options.log_severity_level = 4
        session = ort.InferenceSession(str(folder / "1" / "model.onnx"), options, providers=["CPUExecutionProvider"])
        shapes = {spec.name: spec.shape for spec in read_config(folder / "config.pbtxt").inputs}
        random_numbers = np.random.default_rng(number)
        rows = []
        for _ in range(8):
            row = {}
            for tensor in session.get_inputs():
                shape = (1, *shapes[tensor.name])
                is_size = tensor.type == "tensor(int64)"
                row[tensor.name] = (
                    random_numbers.integers(100, 900, shape) if is_size else random_numbers.random(shape, np.float32)
                )
            rows.append(row)
        found.append(CrowdModel(name, stack, rows, session))
    return found


def one_client(models: Sequence[CrowdModel], images: Sequence[bytes], seed: int, count: int) -> int:
    """`count` random requests, each answer compared. Returns how many engine calls were shared with other requests.

    Most requests go to one model for all clients, the models in turn, so that batches form.
    """
    chance = random.Random(seed)
    shared = 0
    for number in range(count):
        hot = models[number * len(models) // count]
        model = chance.choice((chance.choice(models), hot, hot, hot))
        kind = chance.choice(("image", "image", "bytes", "raw"))
        size = chance.randint(1, 8 if kind == "raw" else 4)
        picked = [chance.randrange(len(model.alone[kind])) for _ in range(size)]
        wanted = [model.alone[kind][index] for index in picked]
        if kind == "image":
            results, count_shared = model.image([images[index] for index in picked])
            shared += count_shared
            assert len(results) == size
            for got, one in zip(results, wanted, strict=True):
                assert_same_result(got, one)
            continue
        got = (
            model.encoded([images[i] for i in picked])
            if kind == "bytes"
            else model.raw([model.rows[i] for i in picked])
        )
        for row, one in enumerate(wanted):
            assert_same_rows({name: array[row] for name, array in got.items()}, one)
    return shared


def assert_same_result(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Scores and embeddings within 1e-4, boxes within 0.05 pixels, classes and their order equal."""
    assert got.keys() == wanted.keys()
    if "embedding" in wanted:
        np.testing.assert_allclose(got["embedding"], wanted["embedding"], atol=1e-4, rtol=1e-4)
        return
    (kind,) = wanted
    columns = [[json.dumps([one["class_id"], one.get("label")]) for one in found[kind]] for found in (got, wanted)]
    assert columns[0] == columns[1]
    scores = [[one["score"] for one in found[kind]] for found in (got, wanted)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)
    if kind == "detections":
        boxes = [np.reshape([one["xyxy"] for one in found[kind]], (-1, 4)) for found in (got, wanted)]
        np.testing.assert_allclose(boxes[0], boxes[1], atol=0.05)


def assert_same_rows(got: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    """One row of each output. Of a network that sorts its own boxes, those that are surely over the others."""
    if wanted.keys() == {"labels", "boxes", "scores"}:
        scores = wanted["scores"][0]
        apart = -np.diff(scores, prepend=np.inf, append=-np.inf) > 1e-3
        is_certain = apart[:-1] & apart[1:]  # neither neighbour is so near that both could change places
        np.testing.assert_allclose(got["scores"], scores, atol=1e-4)
        np.testing.assert_array_equal(got["labels"][is_certain], wanted["labels"][0][is_certain])
        np.testing.assert_allclose(got["boxes"][is_certain], wanted["boxes"][0][is_certain], atol=0.05)
        return
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array[0], atol=1e-4, rtol=1e-4, err_msg=name)
