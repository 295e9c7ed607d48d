"""The INT8 model's folder: the float model's config and labels under another name, and a page that says how."""

import re
import shutil
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from server.optimize.agreement import ClassAgreement, DetectionAgreement
from server.optimize.report import RANDOM_WEIGHTS, Judgement, Report
from server.optimize.source import PRECISION, SourceModel

OPTIMIZED_FROM = "optimized-from"


def write_folder(source: SourceModel, report: Report, staged: Path) -> None:
    """config.pbtxt, labels and MODEL.md beside the files that are there already. Raises OSError."""
    (staged / "config.pbtxt").write_text(config_text(source, report.name), encoding="utf-8")
    for labels in source.folder.glob("labels*.txt"):
        shutil.copyfile(labels, staged / labels.name)
    (staged / "MODEL.md").write_text(facts(source, report), encoding="utf-8")


def config_text(source: SourceModel, name: str) -> str:
    """The float model's text with its comments where that can be told to say the same, else Triton's own rendering."""
    wanted = _config(source, name)
    text = (source.folder / "config.pbtxt").read_text(encoding="utf-8")
    text = re.sub(r'(?m)^name\s*:\s*"[^"]*"', f'name: "{name}"', text)
    text = re.sub(r'(?m)^default_model_filename\s*:\s*"[^"]*"', 'default_model_filename: "model.onnx"', text)
    added = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in _said(source).items()
    )
    text = f"{text.rstrip()}\n\n# Quantised from {source.name}: see MODEL.md.\n{added}"
    parsed = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, parsed)
    except text_format.ParseError:
        parsed.Clear()
    return text if parsed == wanted else text_format.MessageToString(wanted)


def _config(source: SourceModel, name: str) -> model_config_pb2.ModelConfig:
    wanted = model_config_pb2.ModelConfig()
    wanted.CopyFrom(source.proto)
    wanted.name = name
    if wanted.default_model_filename:
        wanted.default_model_filename = "model.onnx"
    wanted.ClearField("cc_model_filenames")
    for key, value in _said(source).items():
        wanted.parameters[key].string_value = value
    return wanted


def _said(source: SourceModel) -> dict[str, str]:
    return {PRECISION: "int8", OPTIMIZED_FROM: source.name}


def facts(source: SourceModel, report: Report) -> str:
    """MODEL.md."""
    title = f"# {report.name}" + (": RANDOM WEIGHTS, answers mean nothing" if source.has_random_weights else "")
    return f"""\
{title}

{source.name}, quantised to 8-bit integers. Shapes, preprocessing and labels are those of {source.name}.

| | |
|---|---|
| source | {source.name}, file of SHA-256 `{report.source_sha256}` ({report.source_bytes:,} bytes) |
| licence | that of {source.name}{licence(source.folder)} |
| file | `1/model.onnx`, {report.int8_bytes:,} bytes, SHA-256 `{report.int8_sha256}` |
| made | `penstock models optimize {source.name} --int8`, with {report.calibrating} pictures to calibrate |
| form | QDQ: weights int8 per channel, activations uint8, biases int32; ranges: {report.chosen.ranges} |
| left float | {_left_float(report)} |

## Measured

{_accuracy(report)}

{_speed(report)}
"""


def licence(folder: Path) -> str:
    """What the float model's page says, with a colon before it."""
    try:
        page = (folder / "MODEL.md").read_text(encoding="utf-8")
    except OSError:
        return ""
    row = re.search(r"(?m)^\|\s*licence\s*\|\s*(.*?)\s*\|$", page)
    return f": {row[1]}" if row else ""


def _left_float(report: Report) -> str:
    names = report.chosen.left_float
    return ", ".join(f"`{name}`" for name in names) if names else "nothing that could be quantised"


def _accuracy(report: Report) -> str:
    if report.judgement is None:
        return f"Accuracy: {RANDOM_WEIGHTS}."
    rule = "; a box of the float model is found again by one of its class with IoU >= 0.5"
    is_detector = isinstance(report.judgement.agreement, DetectionAgreement)
    lines = [f"On {report.held_out} pictures that did not calibrate{rule if is_detector else ''}:", ""]
    lines += [f"* {line}" for line in judgement_lines(report.judgement)]
    return "\n".join(lines)


def judgement_lines(judgement: Judgement) -> list[str]:
    """The accuracy as sentences; mAP first where the truth is known."""
    found = judgement.agreement
    lines = []
    if judgement.float_map is not None and judgement.int8_map is not None:
        delta = judgement.int8_map - judgement.float_map
        over = f"over {judgement.with_truth} pictures with truth"
        lines.append(f"mAP@0.5 {judgement.float_map:.4f} float, {judgement.int8_map:.4f} INT8 ({delta:+.4f}), {over}")
    if isinstance(found, DetectionAgreement):
        lines.append(
            f"{found.found_again} of {found.float_boxes} boxes found again, {found.lost} lost, {found.new} new: "
            f"agreement {found.share:.1%}"
        )
    if isinstance(found, ClassAgreement):
        lines.append(f"the same first class in {found.same_top1} of {found.pictures} pictures ({found.share:.1%})")
    return lines


def _speed(report: Report) -> str:
    rows = "\n".join(
        f"| {item.batch_size} | {_median(item.float_ms):.2f} | {_median(item.int8_ms):.2f} | {item.ratio:.2f} | "
        f"{', '.join(f'{ratio:.2f}' for ratio in item.ratios)} |"
        for item in report.comparisons
    )
    return f"""\
The network alone by ONNX Runtime, rounds in turns, threads: {report.threads}; CPU: {report.cpu or "unknown"}, 8-bit \
instructions: {instructions_text(report)}.

| batch | float ms | INT8 ms | times as fast | by round |
|---|---|---|---|---|
{rows}"""


def instructions_text(report: Report) -> str:
    """The CPU's instructions for 8-bit products, in words."""
    if report.int8_instructions is None:
        return "unknown"
    return ", ".join(report.int8_instructions) or "none"


def _median(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]
