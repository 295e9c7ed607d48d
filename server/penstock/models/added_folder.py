"""Writes the folder of an added model: config.pbtxt with its card, labels, MODEL.md, and the tested file."""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime as ort
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import config_from_proto
from penstock.engines.ort_serving.config import OrtLoadError
from penstock.engines.ort_serving.session import ORT_ERRORS, SEVERITY_FATAL, open_session
from penstock.gateway.batching.options import MAX_BATCH_SIZE, MEASURED_ON
from penstock.models.batch_axis import RowsProof, Run, free_batch, is_free, prove_rows, session_run
from penstock.models.catalogue import CatalogueError
from penstock.models.inspect.facts import ModelFacts
from penstock.models.inspect.inspection import Inspection, Recognition
from penstock.models.inspect.metadata import ultralytics_literal
from penstock.models.inspect.proposal import has_wrong_input_shape, proposed_config
from penstock.models.inspect.torch_session import TorchSession
from penstock.models.inspect.trial_session import TrialFailed, relabelled, run_within
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Array
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.decode import DecodedImage
from penstock.vision.image_tasks import size_tensors
from penstock.vision.preprocess import prepare
from penstock.vision.spec import ColorFormat

ONNX_FILE, TORCH_FILE = Path("1") / "model.onnx", Path("1") / "model.pt2"
MAX_ROWS = 8  # max_batch_size of models that passed the batch test
INSTANCES = {"onnxruntime": 2, "torch": 1}  # by backend; each of torch is a process with the weights on the GPU
# Served in the trial's precision: the backend's default on a GPU is FP16. Inputs that are on the GPU stay there.
_TORCH_PARAMETERS = {"precision": "fp32", "FORCE_CPU_ONLY_INPUT_TENSORS": "no"}
_FIXED = "its batch size is fixed: export it with a free first dimension (dynamic_shapes of torch.export.export)"
ADDED_BY = "added_by"  # parameter of config.pbtxt: the command that wrote the folder
TEST_S = 120.0  # of batches and their speed; a loop in the model may never end
SPEED_BUDGET_S = 3.0
LEAST_SLO_MS, SLO_CALLS = 2000, 8  # of the default slo_p99_ms
_ROWS_TRIED, _ROUNDS = (1, 2, 4, 8), 5
_PROOF_SIZE = (480, 640)  # height, width of the generated pictures
_GAIN = 1.1  # a larger batch must be faster by this factor, as measurements vary by a tenth


class CannotAdd(CatalogueError):
    """A model cannot be added; nothing has changed. str() is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Outcome of the batch test. max_rows: 0 if the model takes one picture per call. best_rows: fastest on this CPU.

    rows_per_s: (batch size, rows per second). is_freed: the file had a fixed batch of 1, and was rewritten with
    a dynamic one. error: the engine's message if a batch did not run.
    """

    max_rows: int
    why: str
    is_freed: bool = False
    best_rows: int = 1
    rows_per_s: tuple[tuple[int, float], ...] = ()
    error: str = ""


def fill_folder(folder: Path, source: Path, name: str, inspection: Inspection, *, origin: str) -> Batches:
    """Writes the model's folder. source: its file. origin: where it came from, for MODEL.md. Raises CannotAdd."""
    file = folder / (TORCH_FILE if inspection.facts.file_format.is_torch else ONNX_FILE)
    file.parent.mkdir()
    _copy(source, file, inspection)
    try:
        config = _sized(proposed_config(inspection.facts, inspection.recognition, name), inspection)
        card = card_from_config(config)
    except InvalidRequest as error:
        raise CannotAdd(error.message) from error
    if card is None:
        raise CannotAdd(f"{source} has no card: choose one with --layout")
    if inspection.facts.file_format.is_torch:
        batches = _torch_batches(replace(inspection.facts, path=str(file)), config, card, inspection.recognition)
    else:
        batches = _find_batches(file, config, card, inspection)
        if not batches.max_rows:
            batches = replace(batches, rows_per_s=_single_speed(file, card))
    text = config_text(_with_client_metadata(_with_batches(config, batches), inspection))
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    if inspection.recognition.labels:
        (folder / "labels.txt").write_text("\n".join(inspection.recognition.labels) + "\n", encoding="utf-8")
    (folder / "MODEL.md").write_text(model_page(name, inspection, batches, origin), encoding="utf-8")
    return batches


def _copy(source: Path, file: Path, inspection: Inspection) -> None:
    """The file and its external data, which must lie beside it or below. A wrong declared input shape is corrected."""
    is_onnx = not inspection.facts.file_format.is_torch
    if is_onnx and has_wrong_input_shape(inspection.facts, inspection.recognition):
        recognition = inspection.recognition
        file.write_bytes(relabelled(source, recognition.input_name, recognition.input_shape))
    else:
        shutil.copyfile(source, file)
    for location in inspection.facts.external_data:
        there = (source.parent / location).resolve()
        if not there.is_relative_to(source.parent.resolve()) or not there.is_file():
            raise CannotAdd(f"the external data {location!r} of {source} is not below its folder: put it there")
        target = file.parent / location
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(there, target)


def _sized(config: ModelConfig, inspection: Inspection) -> ModelConfig:
    """The config with the chosen size in place of the image input's dynamic sides."""
    recognition = inspection.recognition
    if recognition.input_size is None:
        return config
    is_nhwc = recognition.parameters.get("network-input-order", "0").lower() in ("1", "nhwc")
    sides = slice(1, 3) if is_nhwc else slice(2, 4)

    def sized(spec: TensorSpec) -> TensorSpec:
        if spec.name != recognition.input_name or len(spec.shape) != 4:
            return spec
        shape = list(spec.shape)
        shape[sides] = [
            given if side == -1 else side
            for side, given in zip(shape[sides], recognition.input_size or (), strict=True)
        ]
        return replace(spec, shape=tuple(shape))

    return replace(config, inputs=tuple(sized(spec) for spec in config.inputs))


def _with_client_metadata(config: ModelConfig, inspection: Inspection) -> ModelConfig:
    recognition = inspection.recognition
    value = ultralytics_literal(inspection.facts.metadata, recognition.labels, recognition.input_size)
    return replace(config, parameters={**config.parameters, "metadata": value}) if value else config


def _find_batches(file: Path, config: ModelConfig, card: VisionCard, inspection: Inspection) -> Batches:
    if not inspection.recognition.rows_follow_batch:
        return Batches(0, "its outputs have no batch axis, so each picture is one call")
    if inspection.facts.external_data:
        return Batches(0, "its weights are in other files, which are not rewritten")
    single = next((spec.name for spec in config.inputs if not _has_batch_axis(spec)), None)
    if single is not None:
        return Batches(0, f"its input {single!r} has no batch axis, so each picture is one call")
    freed = file.with_name("freed.onnx")
    try:
        is_freed = not _has_free_batch(config)
        if is_freed:
            why = free_batch(file, freed)
            if why:
                return Batches(0, f"its batch size is fixed to 1: {why}")
        session, rows = _open(freed if is_freed else file), proof_rows(card)
        is_quantised = inspection.facts.is_quantised

        def tested(options: ort.RunOptions) -> tuple[RowsProof, tuple[tuple[int, float], ...]]:
            run = session_run(session, options)
            proof = _proven(run, rows, is_quantised=is_quantised)
            return proof, _speeds(run, rows[0]) if proof.is_proven else ()

        proof, speeds = run_within(TEST_S, tested)
        if not proof.is_proven:
            return Batches(0, proof.why, error=proof.error)
        if is_freed:
            freed.replace(file)
    except (OrtLoadError, TrialFailed, *ORT_ERRORS) as error:
        return Batches(0, f"its batch size cannot be made dynamic: {str(error).splitlines()[0][:200]}")
    finally:
        freed.unlink(missing_ok=True)
    return Batches(MAX_ROWS, proof.why, is_freed, _best(speeds), speeds)


def _has_batch_axis(spec: TensorSpec) -> bool:
    """Whether dims of a whole shape begin with the batch: [B, …] of four axes for a picture, [B, 2] for its size."""
    return len(spec.shape) in (2, 4)


def _has_free_batch(config: ModelConfig) -> bool:
    return is_free({spec.name: ["b" if spec.shape[0] == -1 else 1] for spec in config.inputs if spec.shape})


def _torch_batches(facts: ModelFacts, config: ModelConfig, card: VisionCard, recognition: Recognition) -> Batches:
    """As _find_batches, for a PyTorch program. The preferred size is the largest: batches are fastest so on a GPU."""
    try:
        session = TorchSession(facts)
        try:
            rows = proof_rows(card, has_batch_axis=len(card.input_shape) == 4)
            follows = recognition.rows_follow_batch and all(map(_has_batch_axis, config.inputs))
            if not follows or not _has_free_batch(config):
                why = _FIXED if follows else "its inputs or outputs have no batch axis, so each picture is one call"
                return Batches(0, why, rows_per_s=_speeds(session.run, rows[0], rows_tried=(1,)))
            proof = _proven(session.run, rows, is_quantised=facts.is_quantised)
            if not proof.is_proven:
                speeds = _speeds(session.run, rows[0], rows_tried=(1,))
                return Batches(0, proof.why, rows_per_s=speeds, error=proof.error)
            return Batches(MAX_ROWS, proof.why, best_rows=MAX_ROWS, rows_per_s=_speeds(session.run, rows[0]))
        finally:
            session.close()
    except TrialFailed as error:
        raise CannotAdd(f"the program was not tested: {error}") from error


def _open(file: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = SEVERITY_FATAL
    return open_session(file, options, ["CPUExecutionProvider"])


def _proven(run: Run, rows: Sequence[Mapping[str, Array]], *, is_quantised: bool) -> RowsProof:
    """Tests a batch of two rows, then of all: some kernels treat 2 and 3 differently."""
    proof = prove_rows(run, rows[:2], is_quantised=is_quantised)
    return prove_rows(run, rows, is_quantised=is_quantised) if proof.is_proven else proof


def proof_rows(card: VisionCard, *, has_batch_axis: bool = True) -> list[dict[str, Array]]:
    """Inputs of three different generated pictures, by input name: (1, …) if the picture's has a batch axis."""
    rows = []
    for seed in range(3):
        coarse = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
        pixels = coarse.repeat(_PROOF_SIZE[0] // 12, axis=0).repeat(_PROOF_SIZE[1] // 16, axis=1)
        if card.prepare_spec.color is ColorFormat.GRAY:
            pixels = np.ascontiguousarray(pixels[..., 0])
        array, geometry = prepare(DecodedImage(pixels, _PROOF_SIZE[1], _PROOF_SIZE[0]), card.prepare_spec)
        sizes = size_tensors(card, [geometry], has_batch_axis=has_batch_axis)
        picture = array[np.newaxis] if has_batch_axis else array
        rows.append({card.input_name: picture, **{size.name: size.to_numpy() for size in sizes}})
    return rows


def _speeds(
    run: Run, row: Mapping[str, Array], rows_tried: Sequence[int] = _ROWS_TRIED
) -> tuple[tuple[int, float], ...]:
    """(batch size, rows per second) on one core: the fastest of several rounds within SPEED_BUDGET_S.

    Sizes that cannot run, for example for lack of memory, are left out. Raises TrialFailed if the smallest cannot run.
    """
    feeds = {rows: {name: np.repeat(array, rows, axis=0) for name, array in row.items()} for rows in rows_tried}
    fastest: dict[int, float] = {}
    until = time.monotonic() + SPEED_BUDGET_S
    for _ in range(_ROUNDS):  # interleaved, so that a busy moment does not count against one size
        for rows, feed in list(feeds.items()):
            started = time.perf_counter()
            try:
                run(feed)
            except TrialFailed:
                if rows == rows_tried[0]:
                    raise
                feeds = {size: one for size, one in feeds.items() if size < rows}
                break
            took_s = time.perf_counter() - started
            fastest[rows] = min(took_s, fastest.get(rows, took_s))
            if time.monotonic() > until:
                return tuple((size, size / seconds) for size, seconds in sorted(fastest.items()))
    return tuple((size, size / seconds) for size, seconds in sorted(fastest.items()))


def _single_speed(file: Path, card: VisionCard) -> tuple[tuple[int, float], ...]:
    """As _speeds, of a model that takes one picture a call. Empty if it does not run so."""
    try:
        row = proof_rows(card, has_batch_axis=len(card.input_shape) == 4)[0]
        session = _open(file)
        return run_within(TEST_S, lambda options: _speeds(session_run(session, options), row, rows_tried=(1,)))
    except (OrtLoadError, TrialFailed, *ORT_ERRORS):
        return ()


def _best(speeds: Sequence[tuple[int, float]]) -> int:
    """The fastest batch size; a larger one must be faster by _GAIN. 1 if nothing was measured."""
    best = 1
    for (_, slower), (rows, faster) in pairwise(speeds):
        if faster < slower * _GAIN:
            break
        best = rows
    return best


def _with_batches(config: ModelConfig, batches: Batches) -> ModelConfig:
    usual = dict(_TORCH_PARAMETERS) if config.backend == "torch" else {"intra_op_thread_count": "1"}
    if batches.rows_per_s:
        usual["slo_p99_ms"] = str(default_slo_ms(batches.rows_per_s, batches.max_rows or 1))
    if batches.rows_per_s and batches.max_rows:
        usual |= {"batch_owner": "gateway", MAX_BATCH_SIZE: str(batches.best_rows)}
        if config.backend == "onnxruntime" and MAX_BATCH_SIZE not in config.parameters:
            usual[MEASURED_ON] = "cpu"
    parameters = {**usual, **config.parameters, ADDED_BY: "penstock models add"}
    if not batches.max_rows:
        one = tuple(
            replace(spec, shape=(1, *spec.shape[1:])) if _has_batch_axis(spec) else spec for spec in config.inputs
        )
        return replace(config, inputs=one, parameters=parameters)
    return replace(
        config,
        max_batch_size=batches.max_rows,
        inputs=tuple(replace(spec, shape=spec.shape[1:]) for spec in config.inputs),
        outputs=tuple(replace(spec, shape=spec.shape[1:]) for spec in config.outputs),
        parameters=parameters,
    )


def default_slo_ms(rows_per_s: Sequence[tuple[int, float]], max_rows: int) -> int:
    """Deadline of requests that have none: 2 s, or the time of eight of the largest calls on one core if it is longer.

    Without one, a queue of up to 1,024 requests delays all answers by many seconds under overload. rows_per_s: by rows.
    """
    largest_s = max_rows / rows_per_s[-1][1]
    return max(LEAST_SLO_MS, 100 * math.ceil(10 * SLO_CALLS * largest_s))


def config_text(config: ModelConfig) -> str:
    """A config.pbtxt of the whole model. Reading it gives the config again."""
    proto = model_config_pb2.ModelConfig()
    text_format.Parse(proto_text(config), proto)
    proto.default_model_filename = (TORCH_FILE if config.backend == "torch" else ONNX_FILE).name
    proto.instance_group.add(count=INSTANCES[config.backend])
    text = proto_text(proto)
    read = config_from_proto(text_format.Parse(text, model_config_pb2.ModelConfig()))
    if read.parameters != config.parameters or read.inputs != config.inputs:
        raise CannotAdd(f"the config of {config.name} cannot be written so that it reads the same")
    return text


def proto_text(config: ModelConfig | model_config_pb2.ModelConfig) -> str:
    """The config as text, one parameter a line."""
    proto = model_config_pb2.ModelConfig()
    if isinstance(config, ModelConfig):
        proto.name, proto.backend, proto.max_batch_size = config.name, config.backend, config.max_batch_size
        for spec in config.inputs:
            proto.input.add(name=spec.name, data_type=_data_type(spec), dims=spec.shape)
        for spec in config.outputs:
            proto.output.add(name=spec.name, data_type=_data_type(spec), dims=spec.shape)
        parameters = dict(config.parameters)
    else:
        proto.CopyFrom(config)
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        proto.parameters.clear()
    lines = text_format.MessageToString(proto, use_short_repeated_primitives=True, as_utf8=True).splitlines()
    for key, value in parameters.items():
        one = model_config_pb2.ModelConfig()
        one.parameters[key].string_value = value
        lines.append(text_format.MessageToString(one, as_one_line=True, as_utf8=True).strip())
    return "\n".join(lines) + "\n"


def _data_type(spec: TensorSpec) -> int:
    name = "STRING" if spec.datatype == "BYTES" else str(spec.datatype)
    return int(model_config_pb2.DataType.Value(f"TYPE_{name}"))


def model_page(name: str, inspection: Inspection, batches: Batches, origin: str) -> str:
    """The text of MODEL.md: origin, hash, layout, batches, evidence and warnings."""
    facts, recognition = inspection.facts, inspection.recognition
    rows = [
        ("origin", origin),
        ("added", f"{datetime.now(UTC):%Y-%m-%d} by `penstock models add`"),
        ("original file", f"{facts.size_bytes:,} bytes, SHA-256 `{facts.sha256}`"),
        ("made by", facts.producer or "unknown"),
        ("layout", f"`{recognition.layout}`"),
        ("batches", batches.why + (" (the file was rewritten with a dynamic batch)" if batches.is_freed else "")),
    ]
    if batches.rows_per_s:
        speeds = ", ".join(f"{rate:.0f}/s with {rows_of} per call" for rows_of, rate in batches.rows_per_s)
        rows.append(("rows per second on one core", speeds))
    why = "\n".join(f"* {sentence}" for sentence in (*recognition.evidence, *inspection.trial.evidence))
    table = "\n".join(f"| {key} | {value.replace('|', chr(0x2758))} |" for key, value in rows)
    assumed = [f"assumed: {sentence}" for sentence in recognition.assumptions]
    warnings = "\n".join(f"* {sentence}" for sentence in (*assumed, *recognition.warnings, *inspection.trial.warnings))
    return f"# {name}\n\n| | |\n|---|---|\n{table}\n\n## How its card was found\n\n{why}\n" + (
        f"\n## Warnings\n\n{warnings}\n" if warnings else ""
    )
