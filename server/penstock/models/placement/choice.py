"""Chooses device and precision of a model from its trials: a pure function."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import msgspec

from penstock.engines.ort_serving.placement import Precision

LEAST_GAIN = 1.1  # by which a device, a precision or a larger batch must be faster: measurements vary by a tenth


class Device(StrEnum):
    """Where a model runs."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """A device, and the type of the network's floats while it runs. Inputs and outputs keep their types."""

    device: Device
    precision: Precision = Precision.FP32

    def __str__(self) -> str:
        return f"the {self.device.upper()} in {self.precision.name}"


ON_CPU = ModelPlacement(Device.CPU)
PRECISIONS = (Precision.FP32, Precision.TF32, Precision.FP16)  # that a float model can run in on a GPU


class CannotPlace(Exception):
    """The wished placement is not possible. str() is the reason."""


@dataclass(frozen=True, slots=True)
class PlacementWish:
    """What the user demands. None: the best."""

    device: Device | None = None
    precision: Precision | None = None

    def allows(self, placement: ModelPlacement) -> bool:
        """Whether the placement is as demanded."""
        return self.device in (None, placement.device) and self.precision in (None, placement.precision)


class PlacementTrial(msgspec.Struct, frozen=True, kw_only=True):
    """What one placement did in the trial. problem: why it did not run; then nothing else is known.

    rows_per_s: pictures a second by pictures a call; on the CPU with all cores. agreement: with the CPU in FP32, in a
    few words. disagreement: why it is not good enough; empty if it is, and for the CPU. is_compared: there were results
    to compare. graphs: batch sizes with a CUDA graph. is_checked: the engine also compared the outputs.
    """

    device: Device
    precision: Precision
    rows_per_s: tuple[tuple[int, float], ...] = ()
    agreement: str = ""
    disagreement: str = ""
    is_compared: bool = False
    graphs: tuple[int, ...] = ()
    is_checked: bool = True
    problem: str = ""

    @property
    def placement(self) -> ModelPlacement:
        """Where it ran."""
        return ModelPlacement(self.device, self.precision)

    @property
    def best_rows(self) -> int:
        """The fastest batch size; a larger one must be faster by LEAST_GAIN."""
        best = self.rows_per_s[0][0] if self.rows_per_s else 1
        for (_, slower), (rows, faster) in pairwise(self.rows_per_s):
            if faster < slower * LEAST_GAIN:
                break
            best = rows
        return best

    @property
    def rate(self) -> float:
        """Pictures a second with best_rows; 0 if it did not run."""
        return dict(self.rows_per_s).get(self.best_rows, 0.0)

    @property
    def why_not(self) -> str:
        """Why it cannot be chosen automatically; empty if it can."""
        if self.problem or self.disagreement:
            return self.problem or self.disagreement
        is_exact = self.is_compared or self.precision is Precision.FP32  # the engine checks the outputs when it loads
        return "" if is_exact else "the trial pictures gave no result to compare"


class PlacementChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model will run. why: a sentence without its subject. best_rows: pictures a call.

    is_checked: the engine compares the outputs with the CPU's when it loads the model.
    """

    device: Device
    precision: Precision
    why: str
    best_rows: int = 1
    is_checked: bool = True
    trials: tuple[PlacementTrial, ...] = ()

    @property
    def placement(self) -> ModelPlacement:
        """Device and precision."""
        return ModelPlacement(self.device, self.precision)


def choose(trials: Sequence[PlacementTrial], wish: PlacementWish = PlacementWish()) -> PlacementChoice:
    """The fastest placement whose answers agree with the CPU's in FP32; what the user demands takes precedence.

    trials: the CPU's first. FP32 is kept unless another precision is faster by LEAST_GAIN, and so is the CPU. Raises
    CannotPlace if what is demanded did not run.
    """
    cpu = trials[0]
    allowed = [one for one in trials if wish.allows(one.placement)]
    if not allowed:
        raise CannotPlace(f"{demanded(wish)} was not tried: {'; '.join(one.problem for one in trials if one.problem)}")
    running = [one for one in allowed if not one.problem]
    if not running:
        raise CannotPlace("; ".join(f"{one.placement} does not run it: {one.problem}" for one in allowed))
    agreeing = [one for one in running if one.placement == ON_CPU or not one.why_not]
    best = (agreeing or running)[0]
    for one in agreeing:
        if one.rate > best.rate * LEAST_GAIN:
            best = one
    return PlacementChoice(
        device=best.device, precision=best.precision, why=_why(best, cpu, trials), best_rows=best.best_rows,
        is_checked=best.is_checked, trials=tuple(trials),
    )  # fmt: skip


def placements_to_try(wish: PlacementWish) -> tuple[ModelPlacement, ...]:
    """Besides the CPU in FP32: those that can be chosen automatically, or the demanded one."""
    if wish.device is Device.CPU:
        return ()
    wanted = (Precision.FP32, Precision.FP16) if wish.precision is None else (wish.precision,)
    return tuple(ModelPlacement(Device.GPU, precision) for precision in wanted)


def unfulfillable(wish: PlacementWish) -> str:
    """Why no machine can do what is demanded; empty if one can."""
    if wish.precision not in (None, *PRECISIONS):
        return f"--precision {wish.precision.value} is not for float models: penstock models optimize makes INT8 ones"
    if wish.device is Device.CPU and wish.precision not in (None, Precision.FP32):
        return f"the CPU computes in fp32: --precision {wish.precision.value} needs --on gpu"
    return ""


def demanded(wish: PlacementWish) -> str:
    """The flags of the wish; empty without one."""
    device = [f"--on {wish.device}"] if wish.device else []
    return " ".join([*device, *([f"--precision {wish.precision.value}"] if wish.precision else [])])


def _why(best: PlacementTrial, cpu: PlacementTrial, trials: Sequence[PlacementTrial]) -> str:
    rest = [one for one in trials if one not in (best, cpu)]
    if best is cpu:
        reasons = {f"{one.placement}: {_speed(one, cpu)}" if not one.why_not else one.why_not for one in rest}
        return f"runs on the CPU: {'; '.join(sorted(reasons))}" if reasons else "runs on the CPU"
    parts = [f"runs on {best.placement}: {_speed(best, cpu)}", *filter(None, (best.agreement,))]
    if best.disagreement:
        parts.append(f"as demanded, although {best.disagreement}")
    parts += [f"not in {one.precision.name}, because {one.why_not}" for one in rest if one.why_not]
    return "; ".join(parts)


def _speed(one: PlacementTrial, cpu: PlacementTrial) -> str:
    if not cpu.rate:
        return f"{one.rate:.0f} pictures/s"
    return f"{one.rate / cpu.rate:.1f} times the CPU's rate"
