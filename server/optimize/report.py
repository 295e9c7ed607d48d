"""What an optimisation did, as values: for the terminal, for --json, for MODEL.md."""

from dataclasses import asdict, dataclass

from server.optimize.agreement import Agreement, DetectionAgreement
from server.optimize.fusion import Fusion, Operators
from server.optimize.quantise import Ranges
from server.optimize.timing import Comparison

MOST_PRECISION_LOST = 0.01  # of mAP@0.5, in [0, 1]
LEAST_AGREEMENT = 0.95
RANDOM_WEIGHTS = "random weights: accuracy means nothing, not judged"


@dataclass(frozen=True, slots=True)
class Judgement:
    """INT8 against float on the held-out pictures.

    float_map, int8_map: mAP@0.5 over those of them whose truth is known, `with_truth` in number; None without any.
    """

    agreement: Agreement
    with_truth: int = 0
    float_map: float | None = None
    int8_map: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A way to quantise. agreement: with float on the pictures that calibrated; None where it was not measured."""

    ranges: Ranges
    left_float: tuple[str, ...]
    agreement: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """All that was done and measured. judgement: None on random weights. int8_instructions: None where not known."""

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
    judgement: Judgement | None
    comparisons: tuple[Comparison, ...]
    threads: int
    int8_instructions: tuple[str, ...] | None
    cpu: str
    fusion: Fusion

    @property
    def warnings(self) -> tuple[str, ...]:
        """What somebody must know before using the result, a sentence each."""
        slower = [item for item in self.comparisons if item.ratio < 1.0]
        found = [f"INT8 is slower here at batch {item.batch_size}: {item.ratio:.2f} x float" for item in slower]
        if self.judgement is not None:
            found += losses(self.judgement)
        return tuple(found)


def losses(judgement: Judgement) -> list[str]:
    """What somebody must know of the accuracy, a sentence each; none where it is as good as float's."""
    if judgement.float_map is not None and judgement.int8_map is not None:
        lost = judgement.float_map - judgement.int8_map
        limit = f"more than {MOST_PRECISION_LOST:.3f}"
        return [f"INT8 loses {lost:.3f} of mAP@0.5 ({limit})"] if lost > MOST_PRECISION_LOST else []
    share = judgement.agreement.share
    if share >= LEAST_AGREEMENT:
        return []
    return [f"INT8 agrees with float in {share:.1%} only (less than {LEAST_AGREEMENT:.0%}): look at its pictures"]


def as_json(report: Report) -> dict[str, object]:
    """Everything, derived figures too, in plain values."""
    plain = asdict(report)
    plain["warnings"] = list(report.warnings)
    plain["judgement"] = judgement_json(report.judgement)
    plain["accuracy"] = RANDOM_WEIGHTS if report.judgement is None else "judged"
    plain["comparisons"] = [
        asdict(item) | {"ratios": list(item.ratios), "ratio": item.ratio} for item in report.comparisons
    ]
    plain["fusion"] = asdict(report.fusion) | {
        "float_levels": [_operators_json(item) for item in report.fusion.float_levels],
        "int8_levels": [_operators_json(item) for item in report.fusion.int8_levels],
    }
    return plain


def judgement_json(judgement: Judgement | None) -> dict[str, object] | None:
    """With what the agreement is of, its share, and of boxes how many are lost and new."""
    if judgement is None:
        return None
    found = judgement.agreement
    more = {"lost": found.lost, "new": found.new} if isinstance(found, DetectionAgreement) else {}
    kind = "detections" if isinstance(found, DetectionAgreement) else "classes"
    return asdict(judgement) | {"agreement": asdict(found) | more | {"kind": kind, "share": found.share}}


def _operators_json(operators: Operators) -> dict[str, object]:
    return asdict(operators) | {"total": operators.total}
