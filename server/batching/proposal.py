"""A config.pbtxt with which Triton would form a model's batches, from what its calls took. Sans-IO."""

from dataclasses import dataclass
from textwrap import wrap

from server.batching.options import BatchOptions
from server.core.batching import Fit, Owner

COLUMNS = 80  # of a comment's line


@dataclass(frozen=True, slots=True)
class Proposal:
    """A fragment of config.pbtxt. preferred_rows: None where nothing is known to prefer. Times in seconds."""

    text: str
    preferred_rows: int | None
    max_queue_delay_s: float


def propose(fit: Fit | None, options: BatchOptions) -> Proposal:
    """Triton's dynamic batching for the model.

    The preferred batch is the largest b with 2·t(b) + guard within the SLO, since a request may come when a batch of
    b rows has just begun and then waits for it; the most rows where there is no SLO. The delay is never more than a
    call's fixed cost, which is all that one more mate can save, nor than what the SLO leaves. What waits longer than
    the SLO allows is refused rather than run late. A model that takes one row a call has nothing to merge: a comment.
    """
    if options.max_batch_size == 1:
        return Proposal("# Nothing to propose: the model takes one row a call (max_batch_size).\n", None, 0.0)
    if fit is None:
        reasons = ["# No fit yet: a fit needs calls of two sizes or more. Triton's defaults are a start."]
        return Proposal(_text(reasons, options, _Choice()), None, 0.0)
    choice = _choose(fit, options)
    return Proposal(_text(_reasons(fit, options, choice), options, choice), choice.rows, choice.delay_s)


@dataclass(frozen=True, slots=True)
class _Choice:
    rows: int | None = None
    delay_s: float = 0.0
    queue_timeout_s: float | None = None


def _choose(fit: Fit, options: BatchOptions) -> _Choice:
    if options.slo_s is None:
        return _Choice(options.max_batch_size, fit.alpha_s)
    rows = next((b for b in range(options.max_batch_size, 0, -1) if _worst_s(fit, b) <= options.slo_s), None)
    left_s = options.slo_s - _worst_s(fit, rows or 1)
    timeout_s = options.slo_s - fit.seconds(rows or 1) - fit.guard_s
    return _Choice(rows, max(0.0, min(fit.alpha_s, left_s)), timeout_s if timeout_s > 0 else None)


def _worst_s(fit: Fit, rows: int) -> float:
    return 2 * fit.seconds(rows) + fit.guard_s


def _reasons(fit: Fit, options: BatchOptions, choice: _Choice) -> list[str]:
    line = f"# t(b) = {fit.alpha_s * 1e3:.3f} + {fit.beta_s * 1e3:.4f} b ms by {fit.samples} calls"
    if options.slo_s is None:
        return [f"{line}; no slo_p99_ms is declared, so the batch is bounded by max_batch_size only."]
    slo = f"{options.slo_s * 1e3:g} ms"
    if choice.rows is None:
        return [
            f"{line}; not even one row keeps 2 t(b) + guard ({_worst_s(fit, 1) * 1e3:.1f} ms) within the SLO of {slo}:",
            "# expect late answers under load, or declare a longer slo_p99_ms.",
        ]
    worst = f"{_worst_s(fit, choice.rows) * 1e3:.1f} ms"
    return [f"{line}; {choice.rows} rows behind another such call take {worst}, within the SLO of {slo}."]


def _text(reasons: list[str], options: BatchOptions, choice: _Choice) -> str:
    is_ours = options.owner is Owner.GATEWAY
    lead = "# For batches formed by Triton" + ("; take batch_owner out of the parameters." if is_ours else ".")
    comments = [line for comment in (lead, *reasons) for line in wrap(comment, COLUMNS, subsequent_indent="# ")]
    lines = [*comments, "dynamic_batching {"]
    if choice.rows is not None and choice.rows > 1:
        lines.append(f"  preferred_batch_size: [ {choice.rows} ]")
    lines.append(f"  max_queue_delay_microseconds: {round(choice.delay_s * 1e6)}")
    lines.append("  default_queue_policy {")
    if choice.queue_timeout_s is not None:
        lines.append("    timeout_action: REJECT")
        lines.append(f"    default_timeout_microseconds: {max(1, round(choice.queue_timeout_s * 1e6))}")
        lines.append("    allow_timeout_override: true")
    lines += [f"    max_queue_size: {options.max_queue_size}", "  }", "}"]
    return "\n".join(lines) + "\n"
