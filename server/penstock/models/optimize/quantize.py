"""Quantizes a float graph to QDQ: weights per channel, uint8 activations with a zero point by measured ranges."""

import contextlib
import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from pathlib import Path

import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnx import version_converter
from onnxruntime.quantization import CalibrationMethod, QuantType
from onnxruntime.quantization.calibrate import TensorsData, create_calibrator
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry
from onnxruntime.quantization.shape_inference import quant_pre_process

from penstock.engines.ort_serving.session import ORT_ERRORS, ort_error_text
from penstock.models.optimize.source import OptimizeError
from penstock.protocol.inference import Array

LOWEST_OPSET, OPSET = 13, 17  # per-channel scales need 13; 17 is the newest for the oldest supported engine
QUANTIZABLE_OPS = tuple(sorted({*QLinearOpsRegistry, *QDQRegistry}))  # the quantizer's default
WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
PERCENTILE = 99.99

Feed = dict[str, Array]  # a session's input by name


class Ranges(StrEnum):
    """How a tensor's range is derived from its calibration values."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    ENTROPY = "entropy"


_METHODS: dict[Ranges, tuple[CalibrationMethod, dict[str, float]]] = {
    Ranges.MINMAX: (CalibrationMethod.MinMax, {}),
    Ranges.PERCENTILE: (CalibrationMethod.Percentile, {"percentile": PERCENTILE}),
    Ranges.ENTROPY: (CalibrationMethod.Entropy, {}),
}


def prepare_graph(model_file: Path, target: Path) -> None:
    """Writes target: the graph at opset 13 or later, with folded constants and named nodes. Raises OptimizeError."""
    try:
        model = onnx.load(model_file)
        opset = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
        if opset < LOWEST_OPSET:
            model = version_converter.convert_version(model, OPSET)
        _name_nodes(model.graph)
        onnx.save(model, target)
        quant_pre_process(target, target, skip_symbolic_shape=True)
    except (*ORT_ERRORS, onnx.checker.ValidationError, DecodeError, OSError, StopIteration) as error:
        raise OptimizeError(f"{model_file} cannot be prepared for quantisation: {ort_error_text(error)}") from error
    prepared = onnx.load(target)
    _name_nodes(prepared.graph)
    onnx.save(prepared, target)


def measure_ranges(
    prepared: Path, feeds: Iterable[Feed], ranges: Ranges, on_picture: Callable[[], None], *, is_symmetric: bool = False
) -> TensorsData:
    """Ranges of the tensors over the feeds, which are processed one at a time.

    is_symmetric: about zero, of all tensors, as TensorRT needs them; else of those that ONNX Runtime quantizes.
    """
    method, options = _METHODS[ranges]
    options = options | {"symmetric": is_symmetric}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-optimize.") as folder,
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(action="ignore"),  # of numpy, for values that are NaN; they fail below
    ):
        calibrator = create_calibrator(
            prepared,
            None if is_symmetric else list(QUANTIZABLE_OPS),
            augmented_model_path=str(Path(folder) / "augmented.onnx"),
            calibrate_method=method,
            extra_options=options,
        )
        for feed in feeds:
            calibrator.collect_data(_SingleFeed(feed))
            on_picture()
        found: TensorsData = calibrator.compute_data()
    return found


def for_onnxruntime(prepared: Path, ranges: TensorsData, left_float: Collection[str]) -> onnx.ModelProto:
    """Quantized model with uint8 activations. left_float: names of nodes that are not quantized."""
    return _quantize(prepared, ranges, left_float)


def behind_the_last_weights(graph: onnx.GraphProto) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the nodes after the last weighted nodes, and names of those: few nodes with a large effect on errors."""
    producers = {name: node for node in graph.node for name in node.output}
    tail: set[str] = set()
    last: set[str] = set()
    waiting = [output.name for output in graph.output]
    while waiting:
        node = producers.get(waiting.pop())
        if node is None or node.name in tail or node.name in last:
            continue
        if node.op_type in WEIGHTED_OPS:
            last.add(node.name)
        else:
            tail.add(node.name)
            waiting.extend(node.input)
    return frozenset(tail), frozenset(last)


def _quantize(prepared: Path, ranges: TensorsData, left_float: Collection[str]) -> onnx.ModelProto:
    quantizer = QDQQuantizer(
        onnx.load(prepared),
        per_channel=True,
        reduce_range=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=copy.deepcopy(ranges),  # modified by the quantizer
        nodes_to_quantize=[],
        nodes_to_exclude=sorted(left_float),
        op_types_to_quantize=list(QUANTIZABLE_OPS),
        extra_options={},
    )
    with _quiet_logging():
        quantizer.quantize_model()
    result: onnx.ModelProto = quantizer.model.model
    del result.metadata_props[:]
    result.producer_name, result.producer_version = "onnxruntime.quantization", ort.__version__
    return result


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """Silences warnings to the root logger about each corrected bias scale."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def _name_nodes(graph: onnx.GraphProto) -> None:
    taken = {node.name for node in graph.node}
    for number, node in enumerate(graph.node):
        if not node.name:
            node.name = next(
                name for name in (f"{node.op_type}_{number}", f"{node.op_type}_{number}_unnamed") if name not in taken
            )
            taken.add(node.name)


class _SingleFeed:
    def __init__(self, feed: Feed) -> None:
        self._feed: Feed | None = feed

    def get_next(self) -> Feed | None:
        """The feed at the first call, then None."""
        feed, self._feed = self._feed, None
        return feed
