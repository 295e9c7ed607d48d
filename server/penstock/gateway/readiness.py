"""The gateway's readiness, its corrections of the engine's answers about models, and metrics of both."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.engines.model_health import EngineView, KnownModel
from penstock.engines.watch import EngineWatch
from penstock.metric_table import Readings
from penstock.protocol.call import A, Call
from penstock.protocol.codec import codec_of
from penstock.protocol.engine import ModelState
from penstock.protocol.identity import Verb

ALL_MODELS = ("*",)  # a value of --required-models


@dataclass(frozen=True, slots=True)
class Readiness:
    """reason: why it is not ready; empty if it is. details: what it lacks though it is ready, one sentence each."""

    is_ready: bool
    reason: str
    details: tuple[str, ...] = ()


def readiness_of(engine: EngineView, required_models: tuple[str, ...] | None) -> Readiness:
    """The gateway's readiness. required_models: must all serve; ALL_MODELS for every loaded one; None for any one."""
    if not engine.is_up:
        return Readiness(False, engine.reason)
    details = tuple(engine.left_out.values())
    if required_models is None and any(known.is_ready for known in engine.models.values()):
        return Readiness(True, "", details)
    names = required_models
    if names is None or names == ALL_MODELS:
        names = tuple(known.name for known in engine.models.values() if known.unavailable is not None)
    reasons = [reason for name in names if (reason := _reason_not_ready(engine, name))]
    return Readiness(not reasons, "; ".join(reasons), details)


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


def as_served(
    verb: Verb, model_name: str, call: Call[A], answer: A, models: Mapping[str, KnownModel], unmerged: str
) -> A:
    """The engine's answer about its models, corrected by what the gateway does not serve or merge.

    unmerged: why the gateway does not merge the model's requests.
    """
    codec, known = codec_of(call), models.get(model_name)
    if not answer.succeeded:
        return codec.without_traceback(answer) if verb is Verb.LOAD else answer
    if verb is Verb.INDEX and any(each.is_withheld for each in models.values()):
        is_ready_only = codec.wants_ready_only(call)
        return codec.with_index(answer, lambda rows: list(_served_rows(rows, models, is_ready_only=is_ready_only)))
    if verb is Verb.READY and known is not None and known.error is not None:
        return codec.not_ready(known.error)
    return codec.with_unmerged(answer, unmerged) if verb is Verb.CONFIG and unmerged else answer


def _served_rows(
    rows: list[ModelState], models: Mapping[str, KnownModel], *, is_ready_only: bool
) -> Iterator[ModelState]:
    for row in rows:
        known = models.get(row.name)
        if known is None or not known.is_withheld:
            yield row
        elif not is_ready_only:
            yield replace(row, state="UNAVAILABLE", reason=known.reason) if row.state == "READY" else row
