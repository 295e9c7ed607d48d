"""The report of an optimization: values, JSON, and MODEL.md of the new model folder."""

import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import read_proto
from penstock.models.added_folder import ADDED_BY
from penstock.models.optimize.agreement import (
    Agreement,
    ClassAgreement,
    DetectionAgreement,
    EmbeddingAgreement,
    SegmentationAgreement,
)
from penstock.models.optimize.profile import Fusion, Operators, SpeedComparison
from penstock.models.optimize.quantize import Ranges
from penstock.models.optimize.source import PRECISION, SourceModel
from penstock.protocol.errors import InvalidRequest

MOST_PRECISION_LOST = 0.01  # of mAP@0.5, in [0, 1]
LEAST_AGREEMENT = 0.95
FEWEST_BOXES = 50  # of the float model; fewer do not show a loss of some percent
NOT_JUDGED = "random weights: accuracy means nothing, not judged"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """INT8 compared with float on the held-out pictures."""

    agreement: Agreement
    with_truth: int = 0  # number of pictures with ground truth
    float_map: float | None = None  # mAP@0.5; None without ground truth
    int8_map: float | None = None
    map_by_float: float | None = None  # mAP@0.5 of INT8 if the float model's boxes are the truth; None for others


@dataclass(frozen=True, slots=True)
class Trial:
    """A quantization variant. agreement: with float on the calibration pictures; None if not measured."""

    ranges: Ranges
    left_float: tuple[str, ...]
    agreement: float | None


@dataclass(frozen=True, slots=True)
class OptimizationReport:
    """Steps and measurements. judgement: None for random weights. int8_instructions: None if unknown."""

    name: str
    optimized_from: str
    source_sha256: str
    int8_sha256: str
    source_bytes: int
    int8_bytes: int
    calibrating: int
    held_out: int
    unreadable: tuple[str, ...]
    chosen: Trial
    trials: tuple[Trial, ...]
    judgement: Evaluation | None
    comparisons: tuple[SpeedComparison, ...]
    threads: int
    int8_instructions: tuple[str, ...] | None
    cpu: str
    fusion: Fusion

    @property
    def warnings(self) -> tuple[str, ...]:
        """Speed and accuracy losses, one sentence each."""
        slower = [item for item in self.comparisons if item.ratio < 1.0]
        found = [f"INT8 is slower here at batch {item.batch_size}: {item.ratio:.2f} x float" for item in slower]
        if self.judgement is not None:
            found += losses(self.judgement)
        return tuple(found)


def losses(judgement: Evaluation) -> list[str]:
    """Accuracy losses, one sentence each."""
    if judgement.float_map is not None and judgement.int8_map is not None:
        lost = judgement.float_map - judgement.int8_map
        limit = f"more than {MOST_PRECISION_LOST:.3f}"
        return [f"INT8 loses {lost:.3f} of mAP@0.5 ({limit})"] if lost > MOST_PRECISION_LOST else []
    found, few = judgement.agreement, list[str]()
    if isinstance(found, DetectionAgreement) and found.float_boxes < FEWEST_BOXES:
        few.append(f"the float model finds only {found.float_boxes} boxes in {found.pictures} pictures: use others")
    if found.share >= LEAST_AGREEMENT:
        return few
    return [
        *few,
        f"INT8 agrees with float in {found.share:.1%} only (less than {LEAST_AGREEMENT:.0%}): look at its pictures",
    ]


def as_json(report: OptimizationReport) -> dict[str, object]:
    """All values as plain JSON types, with derived figures."""
    plain = asdict(report)
    plain["warnings"] = list(report.warnings)
    plain["judgement"] = evaluation_json(report.judgement)
    plain["accuracy"] = NOT_JUDGED if report.judgement is None else "judged"
    plain["comparisons"] = [
        asdict(item) | {"ratios": list(item.ratios), "ratio": item.ratio} for item in report.comparisons
    ]
    plain["fusion"] = asdict(report.fusion) | {
        "float_levels": [_operators_json(item) for item in report.fusion.float_levels],
        "int8_levels": [_operators_json(item) for item in report.fusion.int8_levels],
    }
    return plain


def evaluation_json(judgement: Evaluation | None) -> dict[str, object] | None:
    """As JSON, with derived figures of the agreement."""
    if judgement is None:
        return None
    found = judgement.agreement
    more = {"lost": found.lost, "new": found.new} if isinstance(found, DetectionAgreement) else {}
    return asdict(judgement) | {"agreement": asdict(found) | more | {"kind": _KINDS[type(found)], "share": found.share}}


_KINDS: dict[type[Agreement], str] = {
    DetectionAgreement: "detections",
    ClassAgreement: "classes",
    EmbeddingAgreement: "embeddings",
    SegmentationAgreement: "segmentation",
}


def _operators_json(operators: Operators) -> dict[str, object]:
    return asdict(operators) | {"total": operators.total}


OPTIMIZED_FROM = "optimized-from"
OPTIMIZED_BY = "penstock models optimize"  # begins the parameter added_by of others


def was_optimized(folder: Path) -> bool:
    """Whether `models optimize` made the model of this folder."""
    try:
        parameters = read_proto(folder / "config.pbtxt").parameters
    except (InvalidRequest, OSError):
        return False
    return OPTIMIZED_FROM in parameters or parameters[ADDED_BY].string_value.startswith(OPTIMIZED_BY)


def write_folder(source: SourceModel, report: OptimizationReport, staged: Path) -> None:
    """Writes config.pbtxt, labels and MODEL.md beside the existing files. Raises OSError."""
    (staged / "config.pbtxt").write_text(config_text(source, report.name), encoding="utf-8")
    for labels in source.folder.glob("labels*.txt"):
        shutil.copyfile(labels, staged / labels.name)
    (staged / "MODEL.md").write_text(facts(source, report), encoding="utf-8")


def config_text(source: SourceModel, name: str) -> str:
    """The float model's config.pbtxt, edited; or the config as protobuf text if the edit does not give it."""
    wanted = _config(source, name)
    text = (source.folder / "config.pbtxt").read_text(encoding="utf-8")
    text = re.sub(r'(?m)^name\s*:\s*"[^"]*"', f'name: "{name}"', text)
    text = re.sub(r'(?m)^default_model_filename\s*:\s*"[^"]*"', 'default_model_filename: "model.onnx"', text)
    added = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in _parameter(source).items()
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
    for key, value in _parameter(source).items():
        wanted.parameters[key].string_value = value
    return wanted


def _parameter(source: SourceModel) -> dict[str, str]:
    return {PRECISION: "int8", OPTIMIZED_FROM: source.name}


def facts(source: SourceModel, report: OptimizationReport) -> str:
    """The text of MODEL.md."""
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
    """The licence row of the float model's MODEL.md, after a colon; else empty."""
    try:
        page = (folder / "MODEL.md").read_text(encoding="utf-8")
    except OSError:
        return ""
    row = re.search(r"(?m)^\|\s*licence\s*\|\s*(.*?)\s*\|$", page)
    return f": {row[1]}" if row else ""


def _left_float(report: OptimizationReport) -> str:
    names = report.chosen.left_float
    return ", ".join(f"`{name}`" for name in names) if names else "nothing that could be quantised"


def _accuracy(report: OptimizationReport) -> str:
    if report.judgement is None:
        return f"Accuracy: {NOT_JUDGED}."
    rule = "; a box of the float model is found again by one of its class with IoU >= 0.5"
    is_detector = isinstance(report.judgement.agreement, DetectionAgreement)
    lines = [f"On {report.held_out} pictures that did not calibrate{rule if is_detector else ''}:", ""]
    lines += [f"* {line}" for line in evaluation_lines(report.judgement)]
    return "\n".join(lines)


def evaluation_lines(judgement: Evaluation) -> list[str]:
    """The accuracy as sentences; mAP first if known."""
    found = judgement.agreement
    lines = []
    if judgement.float_map is not None and judgement.int8_map is not None:
        delta = judgement.int8_map - judgement.float_map
        over = f"over {judgement.with_truth} pictures with truth"
        lines.append(f"mAP@0.5 {judgement.float_map:.4f} float, {judgement.int8_map:.4f} INT8 ({delta:+.4f}), {over}")
    elif judgement.map_by_float is not None:
        lines.append(f"mAP@0.5 {judgement.map_by_float:.4f} of INT8 if the float model's boxes are the truth")
    if isinstance(found, DetectionAgreement):
        lines.append(
            f"{found.found_again} of {found.float_boxes} boxes found again, {found.lost} lost, {found.new} new: "
            f"agreement {found.share:.1%}"
        )
    if isinstance(found, ClassAgreement):
        lines.append(f"the same first class in {found.same_top1} of {found.pictures} pictures ({found.share:.1%})")
    if isinstance(found, EmbeddingAgreement):
        lines.append(
            f"cosine with the float model's vectors: {found.mean_cosine:.4f}, at least {found.least_cosine:.4f}"
        )
    if isinstance(found, SegmentationAgreement):
        ious = [iou for _, iou in found.by_class]
        least = f", the least {min(ious):.3f}" if ious else ""
        lines.append(f"IoU with the float model's maps: mean of {len(ious)} classes {found.mean_iou:.3f}{least}")
    return lines


def _speed(report: OptimizationReport) -> str:
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


def instructions_text(report: OptimizationReport) -> str:
    """The CPU's 8-bit instruction sets as text."""
    if report.int8_instructions is None:
        return "unknown"
    return ", ".join(report.int8_instructions) or "none"


def _median(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]
