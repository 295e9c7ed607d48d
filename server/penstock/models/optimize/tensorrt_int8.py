"""A model's copy for TensorRT in Triton of NGC: INT8 by a calibration table of ONNX Runtime. Never run there."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import uses_external_data
from onnxruntime.quantization.calibrate import TensorData
from onnxruntime.quantization.quant_utils import write_calibration_table
from tritonclient.grpc import model_config_pb2

from penstock.engines.ort_serving.session import ORT_ERRORS, ort_error_text
from penstock.models.added_folder import proto_text
from penstock.models.optimize.quantize import Feed, Ranges, measure_ranges
from penstock.models.optimize.report import OPTIMIZED_FROM, licence
from penstock.models.optimize.source import (
    ENOUGH_CALIBRATING,
    OptimizeError,
    Progress,
    SourceModel,
    engine_options,
    open_model,
    read_samples,
    split_pictures,
)
from penstock.models.tensorrt_accelerator import CACHE_FOLDER, add_accelerator

TABLE = "calibration.flatbuffers"  # the name that onnxruntime.quantization gives it
NOT_JUDGED = "its accuracy was not measured: only TensorRT on a GPU computes with this table"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured. tensors: with a range. unreadable: one sentence for each such picture.

    must_copy: the table has to be copied to `cache`, where ONNX Runtime looks for it.
    """

    name: str
    optimized_from: str
    calibrating: int
    tensors: int
    cache: str
    unreadable: tuple[str, ...]
    must_copy: bool = False


def calibrate(
    source: SourceModel, pictures: Sequence[Path], staged: Path, *, folder: Path, cache: str, progress: Progress
) -> Calibration:
    """Writes a model to the empty folder `staged`: the float file, the table, and a config with TensorRT.

    folder: where the model will lie; its name is the model's. cache: the folder of the table and of TensorRT's engines,
    as Triton sees it; empty for one in `folder`. Raises OptimizeError, OSError.
    """
    name, own = folder.name, str((folder / CACHE_FOLDER).resolve())
    cache = cache or own
    _check_file(source)
    progress.step("reading pictures", len(pictures))
    split = split_pictures(pictures, source, progress.advance)
    progress.step("measuring ranges", len(split.calibrating))
    feeds = (sample.feed for sample in read_samples(split.calibrating, source))
    try:
        ranges = measure_magnitudes(source.path, feeds, progress.advance)
    except ORT_ERRORS as error:
        raise OptimizeError(f"model {source.name!r} cannot be calibrated: {ort_error_text(error)}") from error
    (staged / "1").mkdir()
    shutil.copyfile(source.path, staged / "1" / "model.onnx")
    _write_table(ranges, staged / CACHE_FOLDER)
    (staged / "config.pbtxt").write_text(proto_text(_config(source, name, cache)), encoding="utf-8")
    for labels in source.folder.glob("labels*.txt"):
        shutil.copyfile(labels, staged / labels.name)
    found = Calibration(name, source.name, len(split.calibrating), len(ranges), cache, split.unreadable, cache != own)
    (staged / "MODEL.md").write_text(_page(source, found, copy_sentence(found, Path(name))), encoding="utf-8")
    return found


def copy_sentence(found: Calibration, folder: Path) -> str:
    """What the user has to copy before Triton loads the model; empty if nothing. folder: of the model."""
    if not found.must_copy:
        return ""
    return (
        f"copy {folder / CACHE_FOLDER / TABLE} to {found.cache} as Triton sees it: ONNX Runtime looks for the table in "
        "trt_engine_cache_path"
    )


def few_sentence(found: Calibration) -> str:
    """A warning about too few pictures; empty if there are enough."""
    if found.calibrating >= ENOUGH_CALIBRATING:
        return ""
    return f"{found.calibrating} pictures give rough ranges: calibrate with {2 * ENOUGH_CALIBRATING} or more"


def _check_file(source: SourceModel) -> None:
    """Raises OptimizeError if ONNX Runtime cannot open the file, or if it is not the whole model."""
    open_model(source.path, engine_options(source))
    graph = onnx.load(source.path, load_external_data=False).graph
    if any(uses_external_data(tensor) for tensor in graph.initializer):
        raise OptimizeError(f"model {source.name!r} has its weights in other files: export it as one file")


def measure_magnitudes(file: Path, feeds: Iterable[Feed], on_picture: Callable[[], None]) -> dict[str, TensorData]:
    """Symmetric ranges by entropy calibration, as TensorRT's own calibration; none for all-zero tensors.

    ONNX Runtime gives a tensor that is never positive a negative upper end, which its table would take as the range.
    """
    ranges = measure_ranges(file, feeds, Ranges.ENTROPY, on_picture, is_symmetric=True)
    found = {}
    for name in ranges.keys():  # noqa: SIM118 - it is no mapping
        ends = ranges[name].to_dict()
        magnitude = np.maximum(np.abs(ends["lowest"]), np.abs(ends["highest"]))
        if magnitude > 0:
            found[name] = TensorData(lowest=np.asarray(-magnitude), highest=np.asarray(magnitude))
    return found


def _write_table(ranges: dict[str, TensorData], folder: Path) -> None:
    """Only the file that ONNX Runtime's TensorRT provider reads."""
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="penstock-optimize.") as written:
        write_calibration_table(ranges, dir=written)
        shutil.copyfile(Path(written) / TABLE, folder / TABLE)


def _config(source: SourceModel, name: str, cache: str) -> model_config_pb2.ModelConfig:
    wanted = model_config_pb2.ModelConfig()
    wanted.CopyFrom(source.proto)
    wanted.name = name
    wanted.default_model_filename = "model.onnx"
    wanted.ClearField("cc_model_filenames")
    wanted.parameters[OPTIMIZED_FROM].string_value = source.name
    add_accelerator(wanted, "INT8", cache, table=TABLE)
    return wanted


def _page(source: SourceModel, found: Calibration, copied: str) -> str:
    before = f"\nBefore Triton loads it, {copied}.\n" if copied else ""
    return f"""\
# {found.name}

{source.name} for TensorRT in Triton of NGC, in 8-bit integers. File, shapes, preprocessing and labels are those of
{source.name}. TensorRT never ran it, and {NOT_JUDGED}.

| | |
|---|---|
| source | {source.name} |
| licence | that of {source.name}{licence(source.folder)} |
| made | `penstock models optimize {source.name} --int8 --accelerator tensorrt`, with {found.calibrating} pictures |
| table | `{CACHE_FOLDER}/{TABLE}`: symmetric ranges of {found.tensors} tensors, by entropy |
{before}"""
