"""Recording golden.json: what a model answers today, for later checks to compare with."""

import hashlib
from pathlib import Path

from server.backends.onnx_reference import RECORDED_WITH, run_reference
from server.catalogue.golden import (
    GOLDEN_FILE,
    PICTURE_FILE,
    Golden,
    GoldenError,
    OutputRecord,
    PictureRecord,
    TensorRecord,
    write_golden,
)
from server.catalogue.golden_compare import is_steady, record_of_tensor, tolerance_for
from server.catalogue.golden_files import ModelFiles, read_model_files
from server.catalogue.golden_pattern import ShapeUnknown, made_input
from server.catalogue.golden_picture import record_of_seen
from server.catalogue.installed import InstalledModel
from server.commands.check_question import Surroundings, answer_to, patterns_for, way_to
from server.commands.check_ways import Way
from server.core.tensor import Tensor


class Unsteady(GoldenError):
    """A model answers the same question in ways that differ, as 8-bit networks do."""


async def record_golden(model: InstalledModel, around: Surroundings) -> Path:
    """The golden.json that was written: of an ONNX model by plain ONNX Runtime, of others by the engine that serves
    them, asked twice; and what is seen in golden.jpg where that lies in the folder.

    Raises GoldenError where there is one already, and whatever asking the model raises.
    """
    files = read_model_files(model)
    if files.golden is not None:
        raise GoldenError(f"{files.folder / GOLDEN_FILE} is there already: remove it to record it anew")
    if files.card is None and files.picture() is not None:
        raise GoldenError(f"{files.folder / PICTURE_FILE} is there, but {model.name} does not say how it sees images")
    async with way_to(files, around, []) as way:
        recorders = [] if files.is_onnx else [await way.engine_name()]
        picture = await _picture(way, files)
        try:
            tensors = await _tensors(way, files, around)
        except (ShapeUnknown, Unsteady) as error:
            if picture is None:
                raise GoldenError(f"{error}{_picture_hint(files)}") from error
            tensors = None
        if picture is not None and files.is_onnx:
            recorders.append(f"{PICTURE_FILE} by {await way.engine_name()}")
    if files.is_onnx and tensors is not None:
        recorders.insert(0, RECORDED_WITH)
    return write_golden(files.folder, Golden("; ".join(recorders), files.file_name, files.sha256, tensors, picture))


async def _tensors(way: Way, files: ModelFiles, around: Surroundings) -> TensorRecord:
    metadata = await way.model_metadata(files.folder.name)
    patterns = patterns_for(metadata, files, around.shapes)
    inputs = tuple(made_input(pattern) for pattern in patterns)
    once, again = await _two_answers(way, files, inputs)
    served = {spec.name for spec in metadata.outputs}
    return TensorRecord(patterns, tuple(_output(one, again) for one in once if one.name in served))


async def _two_answers(
    way: Way, files: ModelFiles, inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    if files.is_onnx:
        reference = run_reference(files.file, files.config_json, inputs)
        return reference.plain, reference.optimised
    return await answer_to(way, files, inputs), await answer_to(way, files, inputs)


def _output(one: Tensor, again: tuple[Tensor, ...]) -> OutputRecord:
    """Raises Unsteady where the two answers are so far apart that no tolerance tells right from wrong."""
    other = next((tensor for tensor in again if tensor.name == one.name), None)
    if other is not None and not is_steady(one, other):
        raise Unsteady(f"two ways on this machine to output {one.name!r} are too far apart to judge others by")
    return record_of_tensor(one, tolerance_for(one, other))


async def _picture(way: Way, files: ModelFiles) -> PictureRecord | None:
    picture = files.picture()
    if picture is None or files.card is None:
        return None
    return record_of_seen(
        await way.see(files.folder.name, picture),
        sha256=hashlib.sha256(picture).hexdigest(),
        threshold=files.card.parser_options.pre_cluster_threshold,
    )


def _picture_hint(files: ModelFiles) -> str:
    return f"; a {PICTURE_FILE} in {files.folder} would do as well" if files.card is not None else ""
