"""ResNet-50 with random weights as a classifier whose answers differ by picture: its last layer is scaled."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from deploy.models import graph_folder, resnet50
from loadtest.bench.gpu.reference import ModelReference
from loadtest.bench.gpu.scenes import Scenes
from penstock.engines.config_pbtxt import read_proto
from penstock.models.added_folder import proto_text
from penstock.models.placement.choice import ON_CPU
from penstock.models.placement.placed_model import PlacedModel
from penstock.protocol.inference import FloatArray

NAME = resnet50.NAME
SCALE_ON = 200  # pictures whose scores set the scale
LOGIT_SPREAD = 3.0  # standard deviation of its scores: the best class then has a share of some tenths, as when trained
LOGIT_STATISTICS = ("logit_mean", "logit_deviation")
STATISTICS_FILE = "logits.npz"  # in its folder


def random_classifier(
    home: Path, scenes: Scenes, pool: ThreadPoolExecutor, *, rows: int, known: ModelReference | None = None
) -> Path:
    """ResNet-50 with random weights. Its last layer gives each class mean 0 and LOGIT_SPREAD over some scenes.

    rows: its max_batch_size. known: of an earlier run, whose mean and deviation of the logits are used.
    """
    folder = graph_folder.write(resnet50.MODEL, home, 0)
    config = read_proto(folder / "config.pbtxt")
    config.max_batch_size = rows
    (folder / "config.pbtxt").write_text(proto_text(config), encoding="utf-8")
    if known is not None and {*LOGIT_STATISTICS} <= {*known.extra}:
        statistics = [known.extra[name] for name in LOGIT_STATISTICS]
    else:
        statistics = logit_statistics(folder, scenes, pool)
    np.savez(folder / STATISTICS_FILE, **dict(zip(LOGIT_STATISTICS, statistics, strict=True)))
    rescale_last_layer(folder / "1" / "model.onnx", *statistics)
    return folder


def logit_statistics(folder: Path, scenes: Scenes, pool: ThreadPoolExecutor) -> list[FloatArray]:
    """Mean and standard deviation of each class's logit over some scenes."""
    file = folder / "1" / "model.onnx"
    numbers = range(0, len(scenes), max(1, len(scenes) // SCALE_ON))
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    with PlacedModel(folder, ON_CPU, threads=1) as model:
        color, name = model.card.prepare_spec.color, model.card.input_name

        def logits(number: int) -> object:
            array = model.prepare(scenes.decoded(number, color)).array
            return session.run(None, {name: array[np.newaxis]})[0]

        values = np.concatenate(list(pool.map(logits, numbers))).astype(np.float64)
    return [values.mean(axis=0), values.std(axis=0)]


def rescale_last_layer(file: Path, mean: FloatArray, deviation: FloatArray) -> None:
    """mean, deviation: (classes,) of the file's logits. Its Gemm then gives mean 0 and LOGIT_SPREAD a class."""
    proto = onnx.load(file)
    gemm = next(node for node in proto.graph.node if node.op_type == "Gemm")
    weight, bias = (next(one for one in proto.graph.initializer if one.name == name) for name in gemm.input[1:3])
    factor = LOGIT_SPREAD / np.maximum(deviation, 1e-6)
    new_weight = numpy_helper.to_array(weight) * factor[:, np.newaxis]
    new_bias = (numpy_helper.to_array(bias) - mean) * factor
    weight.CopyFrom(numpy_helper.from_array(new_weight.astype(np.float32), weight.name))
    bias.CopyFrom(numpy_helper.from_array(new_bias.astype(np.float32), bias.name))
    file.write_bytes(proto.SerializeToString(deterministic=True))
