"""What `--tensorrt` did, as values: for the terminal, for --json, for MODEL.md."""

import statistics
from dataclasses import asdict, dataclass

from server.optimize.report import RANDOM_WEIGHTS, Judgement, Trial, judgement_json, losses
from server.optimize.tensorrt.closeness import Closeness
from server.optimize.tensorrt.layers import EngineLayers
from server.optimize.tensorrt.plans import PlanKey
from server.optimize.tensorrt.shapes import BatchProfile

LEAST_COSINE = {"fp16": 0.999, "int8": 0.95}
NEVER_RUN = (
    "Penstock's TensorRT code was never run by the project itself: no TensorRT was at hand. "
    "What stands here was made and measured on the machine that is named"
)


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Milliseconds of one run of the engine, copies left out: the median of each round."""

    batch_size: int
    round_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.round_ms)

    @property
    def pictures_a_second(self) -> float:
        return self.batch_size * 1000 / self.median_ms


@dataclass(frozen=True, slots=True)
class EngineReport:
    """All that was done and measured. judgement: None on random weights. quantised: how, of INT8.

    network_sha256 in key: of what TensorRT read. build_s: of the plan, whenever that was.
    noted: the builder's warnings.
    """

    name: str
    optimized_from: str
    source_sha256: str
    source_bytes: int
    plan_sha256: str
    plan_bytes: int
    key: PlanKey
    is_cached: bool
    build_s: float
    profile: BatchProfile
    calibrating: int
    held_out: int
    unreadable: tuple[str, ...]
    quantised: Trial | None
    judgement: Judgement | None
    closeness: tuple[Closeness, ...]
    timings: tuple[EngineTiming, ...]
    layers: EngineLayers
    noted: tuple[str, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What somebody must know before using the result, a sentence each."""
        least = LEAST_COSINE[self.key.precision]
        kind = self.key.precision.upper()
        found = [
            f"output {item.output} is infinite or NaN in {item.not_numbers} pictures: {kind} overflows in this network"
            for item in self.closeness
            if item.not_numbers
        ]
        found += [
            f"output {item.output} is far from the float model's: cosine {item.cosine:.4f} (less than {least})"
            for item in self.closeness
            if item.cosine < least and not item.not_numbers
        ]
        if self.judgement is not None:
            found += losses(self.judgement, "the engine")
        return tuple(found)


def as_json(report: EngineReport) -> dict[str, object]:
    """Everything, derived figures too, in plain values."""
    plain = asdict(report)
    plain["key"] = {name: getattr(report.key, name) for name in report.key.__struct_fields__}
    plain["warnings"] = list(report.warnings)
    plain["judgement"] = _renamed(judgement_json(report.judgement))
    plain["accuracy"] = RANDOM_WEIGHTS if report.judgement is None else "judged"
    plain["timings"] = [
        asdict(item) | {"median_ms": item.median_ms, "pictures_a_second": item.pictures_a_second}
        for item in report.timings
    ]
    return plain


def _renamed(judgement: object) -> object:
    """What the other twin's JSON calls int8_… is the engine's here."""
    if not isinstance(judgement, dict):
        return judgement
    return {str(name).replace("int8_", "engine_"): _renamed(value) for name, value in judgement.items()}
