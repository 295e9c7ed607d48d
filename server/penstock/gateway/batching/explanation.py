"""Explains a request's batch to its client, as JSON and as text."""

import json

import msgspec

from penstock.protocol.batch_reports import EXPLAIN_HEADER, FitReport, RequestExplanation
from penstock.protocol.call import A, Call
from penstock.protocol.inference import BatchOwner, BatchTrace, CloseReason, EngineTimeFit

_TRUE_VALUES = frozenset(("1", "true", "on", "yes"))
WHY_CLOSED = {
    CloseReason.SLOT_FREE: "the engine was free and nothing more waited",
    CloseReason.DEADLINE: "more rows would have made one of them late",
    CloseReason.FULL: "it was full",
    CloseReason.DELAY: "max_queue_delay_us had passed",
    CloseReason.INCOMPATIBLE: "the next request could not share it",
}
_WHY_UNBATCHED = {
    BatchOwner.TRITON: "Triton forms this model's batches, not the gateway: see `penstock models explain {model}`",
    BatchOwner.OFF: "batching is off for this model: the request ran alone",
    BatchOwner.GATEWAY: "the request ran alone: the gateway merges no sequences, shared memory or classes",
}


def is_requested(value: str) -> bool:
    """Whether this header or metadata value requests an explanation."""
    return value.strip().lower() in _TRUE_VALUES


def explain_batched(explanation: BatchTrace) -> RequestExplanation:
    """Explains a request whose batch the gateway formed."""
    return RequestExplanation(
        explanation.model_name,
        BatchOwner.GATEWAY,
        _sentence(explanation),
        round(explanation.arrived_unix_s, 6),
        _ms(explanation.queued_s),
        _ms(explanation.engine_s),
        _ms(explanation.expected_s),
        _ms(explanation.slack_s),
        explanation.batch_number,
        explanation.requests,
        explanation.rows,
        explanation.close_reason,
        explanation.ahead,
        explanation.busy,
        explanation.slots,
        fit_report(explanation.fit),
    )


def explain_unbatched(model_name: str, owner: BatchOwner) -> RequestExplanation:
    """Explains a relayed request. owner: what forms the model's batches."""
    return RequestExplanation(model_name, owner, _WHY_UNBATCHED[owner].replace("{model}", model_name))


def explanation_header(explanation: RequestExplanation) -> str:
    """The explanation as ASCII JSON, for a header or metadata."""
    return json.dumps(msgspec.to_builtins(explanation), separators=(",", ":"))


def fit_report(fit: EngineTimeFit | None) -> FitReport | None:
    """The fit in milliseconds, or None."""
    if fit is None:
        return None
    alpha_ms, beta_ms, guard_ms = (round(seconds * 1e3, 4) for seconds in (fit.alpha_s, fit.beta_s, fit.guard_s))
    return FitReport(alpha_ms, beta_ms, guard_ms, fit.samples, round(fit.deliver_s * 1e6, 1))


def _sentence(explanation: BatchTrace) -> str:
    size = f"{_counted(explanation.requests, 'request')} and {_counted(explanation.rows, 'row')}"
    expected = f", {explanation.expected_s * 1e3:.1f} ms were expected" if explanation.expected_s is not None else ""
    return (
        f"waited {explanation.queued_s * 1e3:.1f} ms behind {explanation.ahead} for its batch of {size}, "
        f"closed because {WHY_CLOSED[explanation.close_reason]}; the engine took {explanation.engine_s * 1e3:.1f} ms"
        f"{expected}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def wants_explanation(call: Call[A]) -> bool:
    """Whether the client requested an explanation."""
    value = call.header(EXPLAIN_HEADER)
    return value is not None and is_requested(value)


def add_explanation(answer: A, explanation: RequestExplanation) -> A:
    """The response with the explanation as a header or trailing metadata; unchanged if it has one, or is an error."""
    return answer.with_header(EXPLAIN_HEADER, explanation_header(explanation))
