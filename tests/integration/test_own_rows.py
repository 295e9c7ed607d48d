"""Concurrent clients get their own rows, whatever the model does with rows, from the embedded engine and Triton.

`nms` answers a row for each bright cell, so its rows do not follow the batch; `detector` does so for pictures.
`marked` answers a row for each picture.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml
from onnx import TensorProto, helper
from typer.testing import CliRunner

from penstock.cli import models as models_command
from tests.engines import onnx_models
from tests.integration.embedded_stack import start_embedded
from tests.integration.test_batching import multipart
from tests.integration.video_runs import Place, lines, new_place, run, start_stack_at, two_ports
from tests.support.http import call, post_json
from tests.support.stack import RunningStack, stop_stack

pytestmark = pytest.mark.xdist_group("own-rows")

Frames = list[list[Any]]  # objects and their places in each frame
MOST = 8  # clients at once
FRAMES = 12
CONFIG = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "images" data_type: TYPE_FP32 dims: [ 2, 32, 32 ] } ]
output [ { name: "found" data_type: TYPE_FP32 dims: [ OUTPUT ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
BY_GATEWAY = """parameters { key: "batch_owner" value { string_value: "gateway" } }
parameters { key: "max_queue_delay_us" value { string_value: "2000" } }
"""
BY_TRITON = "dynamic_batching { max_queue_delay_microseconds: 2000 }\n"
COMPLETED = 'backend: "onnxruntime"\ninstance_group [ { kind: KIND_CPU count: 1 } ]\n'
FOLLOWS = 'parameters { key: "rows_follow_batch" value { string_value: "1" } }\n'
DETECTOR = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "images" data_type: TYPE_FP32 dims: [ 3, 32, 32 ] } ]
output [
  { name: "boxes" data_type: TYPE_FP32 dims: [ -1, 4 ] },
  { name: "scores" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "class_ids" data_type: TYPE_INT64 dims: [ -1 ] }
]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "network-type" value { string_value: "0" } }
parameters { key: "net-scale-factor" value { string_value: "0.00392156862745098" } }
parameters { key: "parse-bbox-func-name" value { string_value: "boxes" } }
"""
SEEN = ((2, 0.3), (0, 0.7), (1, 0.5), (3, 0.2), (1, 0.9))  # objects and marks of five pictures
NO_DETECTOR_BATCH = re.compile(r"output '(boxes|scores|class_ids)' has the shape \[1, 16(, 4)?\] for 2 rows of input")
WHY = "output 'found' has the shape [16, 4] for one row of input"


def marked() -> Any:
    """images → found [n, 2]: the means of each picture's two channels."""
    node = helper.make_node("ReduceMean", ["images"], ["found"], axes=[2, 3], keepdims=0)
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 2, 32, 32])
    found = helper.make_tensor_value_info("found", TensorProto.FLOAT, ["n", 2])
    graph = helper.make_graph([node], "marked", [images], [found])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def write_models(repository: Path, *, has_triton: bool) -> None:
    """Writes nms and marked with batches by the gateway and, if there is a Triton, by Triton."""
    configs = {"": BY_GATEWAY, **({"_triton": BY_TRITON} if has_triton else {})}
    for ending, words in configs.items():
        nms, means = CONFIG.replace("OUTPUT", "4") + words, CONFIG.replace("OUTPUT", "2") + words
        onnx_models.save(onnx_models.nms_inside(), repository, f"nms{ending}", config=nms)
        onnx_models.save(marked(), repository, f"marked{ending}", config=means)
        onnx_models.save(onnx_models.nms_detector(), repository, f"detector{ending}", config=DETECTOR + words)
    onnx_models.save(onnx_models.nms_detector(), repository, "detector_unbatched", config=DETECTOR)
    onnx_models.save(onnx_models.nms_inside(), repository, "nms_says", config=nms + FOLLOWS)
    if has_triton:
        onnx_models.save(onnx_models.nms_inside(), repository, "nms_completed", config=COMPLETED)
        in_pairs = CONFIG.replace("OUTPUT", "4") + BY_TRITON.replace("2000", "100000")
        onnx_models.save(onnx_models.nms_inside(), repository, "nms_in_pairs", config=in_pairs)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The run directory of Triton's stack and of video runs that use it."""
    return new_place(tmp_path_factory.mktemp("own-rows"))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("own-rows")
    write_models(folder / "models", has_triton=False)
    stack = start_embedded(folder)
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


@pytest.fixture(scope="module")
def triton(place: Place, triton_environment: Path) -> Iterator[RunningStack]:
    models = place.home.parent / "models"
    write_models(models, has_triton=True)
    http_port, grpc_port = two_ports()
    ports = ("--http-port", http_port, "--grpc-port", grpc_port)
    stack = start_stack_at(place, "--model-repository", str(models), *ports)
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def picture(objects: int, mark: float) -> Any:
    """A picture with this many bright cells, and the client's mark in the second channel."""
    tensor = np.zeros((1, 2, 32, 32), np.float32)
    for cell in range(objects):
        tensor[0, 0, cell // 4 * 8 : cell // 4 * 8 + 8, cell % 4 * 8 : cell % 4 * 8 + 8] = 0.9
    tensor[0, 1] = mark
    return tensor


def image(objects: int, mark: float, side: int = 32) -> Any:
    """The same picture as RGB, (side, side, 3)."""
    red, green = (picture(objects, mark)[0] * 255).round().astype(np.uint8)
    small = np.stack([red, green, np.zeros_like(red)], axis=2)
    return cv2.resize(small, (side, side), interpolation=cv2.INTER_NEAREST)


def see(stack: RunningStack, model: str, *images: Any) -> list[Any]:
    """The detections in each picture of one request."""
    pngs = [cv2.imencode(".png", one[..., ::-1])[1].tobytes() for one in images]
    body, media_type = multipart(*pngs)
    answer = call("POST", f"{stack.http_url}/v2/models/{model}/image", body, {"content-type": media_type})
    assert answer.status == 200, answer.body
    return [one["detections"] for one in answer.json["results"]]


def write_clip(path: Path, objects: int, mark: float) -> Path:
    """Writes a clip of FRAMES frames with this many objects to the path, and returns it."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"crf": "5"})
        stream.height = stream.width = 128
        stream.pix_fmt = "yuv420p"
        for _ in range(FRAMES):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image(objects, mark, 128), format="rgb24")))
        container.mux(stream.encode(None))
    return path


def infer(stack: RunningStack, model: str, tensor: Any) -> Any:
    data = {"name": "images", "shape": list(tensor.shape), "datatype": "FP32", "data": tensor.ravel().tolist()}
    answer = post_json(f"{stack.http_url}/v2/models/{model}/infer", {"inputs": [data]})
    assert answer.status == 200, answer.body
    (output,) = answer.json["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def explained(stack: RunningStack, model: str) -> dict[str, Any]:
    page: dict[str, Any] = call("GET", f"{stack.http_url}/v2/models/{model}/explain").json
    return page


def assert_own(model: str, objects: int, mark: float, found: Any) -> None:
    if model.startswith("marked"):
        np.testing.assert_allclose(found, [[0.9 * objects / 16, mark]], atol=1e-3)
    else:
        assert found.shape == (objects, 4)
        np.testing.assert_allclose(found[:, 3], mark, atol=1e-3)


def ask_crowds(stack: RunningStack, models: tuple[str, ...], cases: int) -> None:
    """Sends random concurrent requests to one model at a time; every client must get its own answer."""
    random = np.random.default_rng(20261127)
    with ThreadPoolExecutor(MOST) as pool:
        for _ in range(cases):
            model, crowd = str(random.choice(models)), random.integers(0, 5, random.integers(2, MOST + 1))
            marks = random.permutation(MOST)[: len(crowd)] / 10 + 0.1
            asked: list[Callable[[], Any]] = [
                pool.submit(infer, stack, model, picture(int(objects), float(mark))).result
                for objects, mark in zip(crowd, marks, strict=True)
            ]
            for objects, mark, answer in zip(crowd, marks, asked, strict=True):
                assert_own(model, int(objects), float(mark), answer())


def test_crowds_at_the_embedded_engine_get_their_own_rows(embedded: RunningStack) -> None:
    """In 30 rounds, the model whose rows follow is merged, the other never."""
    ask_crowds(embedded, ("nms", "nms_says", "marked"), 30)
    assert max(row["rows"] for row in explained(embedded, "marked")["batches"]) > 1
    for model in ("nms", "nms_says"):
        assert {row["rows"] for row in explained(embedded, model)["batches"]} == {1}


def test_crowds_at_triton_get_their_own_rows(triton: RunningStack) -> None:
    """This holds in 40 rounds, for batches by the gateway, by Triton and with an auto-completed config."""
    ask_crowds(triton, ("nms", "nms_triton", "nms_completed", "nms_says", "marked", "marked_triton"), 40)
    assert max(row["rows"] for row in explained(triton, "marked")["batches"]) > 1
    assert max(row["rows"] for row in explained(triton, "marked_triton")["batches"]) > 1
    assert {row["rows"] for row in explained(triton, "nms")["batches"]} == {1}


def test_rows_that_add_up_by_chance_are_not_mixed_up(triton: RunningStack) -> None:
    """Two objects for one client and none for the other are two rows, as if each client had one."""
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            asked = [pool.submit(infer, triton, "nms_in_pairs", picture(*one)) for one in ((2, 0.3), (0, 0.7))]
            for (objects, mark), answer in zip(((2, 0.3), (0, 0.7)), asked, strict=True):
                assert_own("nms", objects, mark, answer.result())


@pytest.mark.parametrize("model", ["nms", "nms_says", "nms_triton", "nms_completed", "marked", "marked_triton"])
def test_model_that_is_not_merged_says_why(triton: RunningStack, model: str) -> None:
    """`explain` over HTTP and both commands report it for such a model only; nothing fails."""
    why = WHY if model.startswith("nms") else ""
    assert explained(triton, model).get("unmerged", "") == why
    shown = CliRunner().invoke(models_command.app, ["explain", model, "--url", triton.http_url])
    listed = CliRunner().invoke(models_command.app, ["list", "--url", triton.http_url])
    assert (shown.exit_code, listed.exit_code) == (0, 0)
    alone = f"each request and picture goes to the engine alone: {WHY}"
    assert (f"no, {alone}" in shown.output) == bool(why)
    assert (f"{model}: {alone}" in listed.output) == bool(why)


def test_requests_of_many_rows_to_a_model_that_is_not_merged_are_answered(triton: RunningStack) -> None:
    """One client's rows are one execution, and the answer equals the model's."""
    pictures = np.concatenate([picture(2, 0.5), picture(1, 0.5)])
    for model in ("nms_says", "nms_triton", "nms_completed"):
        assert infer(triton, model, pictures).shape == (3, 4)


@pytest.mark.parametrize("engine", ["embedded", "triton"])
@pytest.mark.parametrize("model", ["detector", "detector_unbatched", "detector_triton"])
def test_pictures_of_one_request_are_answered_as_each_alone(
    request: pytest.FixtureRequest, engine: str, model: str
) -> None:
    """Five different pictures are answered so with batches by the gateway, by Triton and without, with the reason."""
    if engine == "embedded" and model == "detector_triton":
        pytest.skip("the embedded engine forms no batches")
    stack: RunningStack = request.getfixturevalue(engine)
    images = [image(*one) for one in SEEN]
    alone = [found for one in images for found in see(stack, model, one)]
    assert [len(found) for found in alone] == [objects for objects, _ in SEEN]
    assert see(stack, model, *images) == alone
    assert NO_DETECTOR_BATCH.fullmatch(explained(stack, model)["unmerged"])


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("clips")
    return [write_clip(folder / f"{name}.mp4", *SEEN[number]) for name, number in (("a", 0), ("b", 3))]


def see_clips(place: Place, out: Path, *clips: Path, batch_size: int) -> tuple[dict[str, Frames], str]:
    """The objects in each clip from one run, whose batches wait for so many frames, and the run's log."""
    settings = {
        "source": [{"uri": str(clip), "camera_id": clip.stem} for clip in clips],
        "streammux": {"batch-size": batch_size, "batched-push-timeout": 1_000_000},
        "primary-gie": {"model": "detector_unbatched"},
    }
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings))
    ended = run(place, file, "--sink", "jsonl", "--out", out)
    assert ended.code == 0, ended.err
    found: dict[str, Frames] = {clip.stem: [] for clip in clips}
    for line in lines(out / "objects.jsonl"):
        found[line["source_id"]].append(sorted([one["class_id"], *one["xyxy"]] for one in line["objects"]))
    return found, ended.err


def test_frames_of_two_cameras_are_answered_as_of_each_alone(
    triton: RunningStack, place: Place, clips: list[Path], tmp_path: Path
) -> None:
    """Every frame has its own camera's objects; the log says why frames do not share calls."""
    found, logged = see_clips(place, tmp_path / "out", *clips, batch_size=2)
    tracked = {name: [len(frame) for frame in frames[2:]] for name, frames in found.items()}  # by the third frame
    assert tracked == {"a": [SEEN[0][0]] * (FRAMES - 2), "b": [SEEN[3][0]] * (FRAMES - 2)}
    assert NO_DETECTOR_BATCH.search(logged)


def test_config_says_why_rows_are_not_merged(triton: RunningStack) -> None:
    """It does so over both protocols, as Triton's clients read it; requests with many rows are accepted as before."""
    with tritonclient.grpc.InferenceServerClient(triton.grpc_address) as by_grpc:
        config = by_grpc.get_model_config("detector_unbatched").config
    with tritonclient.http.InferenceServerClient(triton.http_url.removeprefix("http://")) as by_http:
        also = by_http.get_model_config("detector_unbatched")
    assert (config.max_batch_size, also["max_batch_size"]) == (8, 8)
    assert NO_DETECTOR_BATCH.fullmatch(config.parameters["unmerged"].string_value)
    assert also["parameters"]["unmerged"] == {"string_value": config.parameters["unmerged"].string_value}
