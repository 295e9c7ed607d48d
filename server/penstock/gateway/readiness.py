"""The gateway's readiness, and metrics of the engine and its models."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engines.model_health import EngineView
from penstock.engines.watch import EngineWatch
from penstock.metric_table import Readings

ALL_MODELS = ("*",)  # a value of --required-models


@dataclass(frozen=True, slots=True)
class Readiness:
    """reason: why it is not ready; empty if it is."""

    is_ready: bool
    reason: str


def readiness_of(engine: EngineView, required_models: tuple[str, ...] | None) -> Readiness:
    """The gateway's readiness. required_models: must all serve; ALL_MODELS for every loaded one; None for any one."""
    if not engine.is_up:
        return Readiness(False, engine.reason)
    if required_models is None and any(known.is_ready for known in engine.models.values()):
        return Readiness(True, "")
    names = required_models
    if names is None or names == ALL_MODELS:
        names = tuple(known.name for known in engine.models.values() if known.unavailable is not None)
    reasons = [reason for name in names if (reason := _reason_not_ready(engine, name))]
    return Readiness(not reasons, "; ".join(reasons))


def _reason_not_ready(engine: EngineView, model_name: str) -> str:
    """Empty if the model serves."""
    known = engine.models.get(model_name)
    if known is not None and known.is_ready:
        return ""
    return f"model {model_name!r} does not serve: {known.reason if known is not None else 'there is no such model'}"


def watch_readers(watch: EngineWatch) -> dict[str, Callable[[], float | Readings]]:
    """Readers by metric: the state of the engine and its models."""
    return {
        "engine_up": lambda: int(watch.is_up),
        "engine_stalls_total": lambda: watch.openings,
        "model_ready": lambda: {
            (model.name,): int(model.is_ready) for model in watch.models.values() if not watch.is_left_out(model)
        },
        "model_unavailable": watch.unavailable,
        "model_hangs_total": watch.hangs,
    }
