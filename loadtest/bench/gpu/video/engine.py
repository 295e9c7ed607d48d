"""How busy the engine was: Triton's own counters, from the stack's metrics page; nothing where another serves."""

import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^nv_inference_(\w+?)(?:\{.*\})? (\S+)$", re.MULTILINE)
_ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """So far, of all models. waited_s, computed_s: each request's own, so that a batch's count once a request."""

    requests: float = 0.0
    rows: float = 0.0
    executions: float = 0.0
    waited_s: float = 0.0
    computed_s: float = 0.0


def ask_engine(url: str) -> EngineCounts:
    """By the metrics page there; nothing where it does not answer: the window counts without it."""
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as answer:
            return counts_of(bytes(answer.read()).decode(errors="replace"))
    except (OSError, ValueError):
        return EngineCounts()


def counts_of(text: str) -> EngineCounts:
    """Of a metrics page."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    computed = sum(sums.get(f"compute_{part}_duration_us", 0.0) for part in ("input", "infer", "output"))
    return EngineCounts(
        requests=sums.get("request_success", 0.0),
        rows=sums.get("count", 0.0),
        executions=sums.get("exec_count", 0.0),
        waited_s=sums.get("queue_duration_us", 0.0) / 1e6,
        computed_s=computed / 1e6,
    )


def busy_between(before: EngineCounts, after: EngineCounts, seconds: float, instances: int) -> dict[str, float]:
    """busy: the share of the time in which an instance works, of all instances. {} where nothing was asked of them."""
    requests, executions = after.requests - before.requests, after.executions - before.executions
    if min(requests, executions, instances) < 1:
        return {}
    an_execution_s = (after.computed_s - before.computed_s) / requests
    return {
        "busy": an_execution_s * executions / seconds / instances,
        "instances": float(instances),
        "rows_an_execution": (after.rows - before.rows) / executions,
        "ms_an_execution": 1000 * an_execution_s,
        "queue_ms": 1000 * (after.waited_s - before.waited_s) / requests,
    }


def engine_in_words(engine: Mapping[str, float]) -> str:
    """Empty where nothing is known."""
    if not engine:
        return ""
    executions = f"{engine['rows_an_execution']:.1f} rows an execution of {engine['ms_an_execution']:.1f} ms"
    return f"Triton: {executions}, after {engine['queue_ms']:.1f} ms in its queue."
