"""The plan's folder: the float model's config for Triton's TensorRT backend, its labels, and a page that says how."""

import re
import shutil
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from server.optimize.folder import OPTIMIZED_FROM, judgement_lines, licence
from server.optimize.report import RANDOM_WEIGHTS
from server.optimize.source import PRECISION, SourceModel
from server.optimize.tensorrt.report import NEVER_RUN, EngineReport

PLAN_FILE = "model.plan"
_OF_ONNXRUNTIME = re.compile(
    r"(intra|inter)_op_thread_count|execution_mode|enable_mem_(arena|pattern)|(session|memory)\..*"
)
_KINDS = model_config_pb2.ModelInstanceGroup


def write_folder(source: SourceModel, report: EngineReport, plan: bytes, staged: Path) -> None:
    """The whole folder. Raises OSError."""
    (staged / "1").mkdir()
    (staged / "1" / PLAN_FILE).write_bytes(plan)
    (staged / "config.pbtxt").write_text(config_text(source, report), encoding="utf-8")
    for labels in source.folder.glob("labels*.txt"):
        shutil.copyfile(labels, staged / labels.name)
    (staged / "MODEL.md").write_text(facts(source, report), encoding="utf-8")


def config_text(source: SourceModel, report: EngineReport) -> str:
    """What the float model says of pictures and batches; platform, file, instances and precision are the plan's."""
    wanted = model_config_pb2.ModelConfig()
    wanted.CopyFrom(source.proto)
    wanted.name, wanted.platform = report.name, "tensorrt_plan"
    wanted.default_model_filename = PLAN_FILE
    for field in ("backend", "cc_model_filenames", "optimization", "model_operations"):
        wanted.ClearField(field)
    _set_instances(wanted)
    for key in [key for key in wanted.parameters if _OF_ONNXRUNTIME.fullmatch(key)]:
        del wanted.parameters[key]
    wanted.parameters[PRECISION].string_value = report.key.precision
    wanted.parameters[OPTIMIZED_FROM].string_value = source.name
    said = f"# A TensorRT {report.key.tensorrt} plan of {source.name} for {report.key.card}: see MODEL.md."
    return f"{said}\n{text_format.MessageToString(wanted)}"


def _set_instances(wanted: model_config_pb2.ModelConfig) -> None:
    """As many on the GPU as the float model wanted there, or where nothing was said; those of the CPU are dropped."""
    groups = [_KINDS.FromString(group.SerializeToString()) for group in wanted.instance_group]
    wanted.ClearField("instance_group")
    kept = [group for group in groups if group.kind in (_KINDS.KIND_AUTO, _KINDS.KIND_GPU)]
    for group in kept or [_KINDS(count=1)]:
        group.kind = _KINDS.KIND_GPU
        wanted.instance_group.append(group)


def facts(source: SourceModel, report: EngineReport) -> str:
    """MODEL.md."""
    title = f"# {report.name}" + (": RANDOM WEIGHTS, answers mean nothing" if source.has_random_weights else "")
    key = report.key
    option = " --int8" if report.quantised else ""
    return f"""\
{title}

{source.name} as a TensorRT plan. Shapes, preprocessing and labels are those of {source.name}.
{NEVER_RUN}.

| | |
|---|---|
| source | {source.name}, file of SHA-256 `{report.source_sha256}` ({report.source_bytes:,} bytes) |
| licence | that of {source.name}{licence(source.folder)} |
| file | `1/{PLAN_FILE}`, {report.plan_bytes:,} bytes, SHA-256 `{report.plan_sha256}` |
| made | `penstock models optimize {source.name} --tensorrt{option}`, built in {report.build_s:.0f} s |
| fits only | {key.card} (compute capability {key.capability}) and TensorRT {key.tensorrt}; driver then: {key.driver} |
| precision | {key.precision.upper()}{_how_quantised(report)}; inputs and outputs as {source.name} has them |
| shapes | {report.profile}: least, best, most |

A plan of another card or another TensorRT does not load, or runs slower: build it anew there.

## Measured

{_accuracy(report)}

{_closeness(report)}

{_speed(report)}

{_layers(report)}
"""


def _how_quantised(report: EngineReport) -> str:
    if report.quantised is None:
        return ""
    kept = len(report.quantised.left_float)
    left = f", {kept} nodes left float" if kept else ""
    return f", {report.calibrating} pictures to calibrate, ranges: {report.quantised.ranges}{left}"


def _accuracy(report: EngineReport) -> str:
    if report.judgement is None:
        return f"Accuracy: {RANDOM_WEIGHTS}."
    lines = [f"The engine against the float model by ONNX Runtime, on {report.held_out} pictures:", ""]
    return "\n".join(lines + [f"* {line}" for line in judgement_lines(report.judgement, "the engine")])


def _closeness(report: EngineReport) -> str:
    told = ", ".join(f"`{item.output}` {item.cosine:.5f}" for item in report.closeness)
    return f"Lowest cosine of an output with the float model's, picture by picture: {told}."


def _speed(report: EngineReport) -> str:
    rows = "\n".join(
        f"| {item.batch_size} | {item.median_ms:.3f} | {item.pictures_a_second:,.0f} | "
        f"{', '.join(f'{value:.3f}' for value in item.round_ms)} |"
        for item in report.timings
    )
    return f"""\
The engine alone on {report.key.card}, copies left out, one run at a time:

| batch | ms | pictures/s | ms by round |
|---|---|---|---|
{rows}"""


def _layers(report: EngineReport) -> str:
    layers = report.layers
    precisions = ", ".join(f"{count} write {name}" for name, count in layers.precisions.items()) or "none"
    return (
        f"{layers.network_nodes} nodes became {layers.total} layers: {layers.fused} hold several nodes, "
        f"{layers.copies} only move or cast. Of those that compute: {precisions}."
    )
