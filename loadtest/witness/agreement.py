"""Where client and server do not tell the same of a phase, as sentences. Pure.

A client's service time (from the request's first byte to its answer) and the server's own (from the request's head to
its answer) differ by the network, the accept queue and a busy generator. Up to 20 % and 2 ms of that are agreement.
"""

from loadtest.results import Percentiles, RequestSummary
from loadtest.witness.counted import Counted
from loadtest.witness.page import quantile_bounds

TOLERANCE_SHARE = 0.2
TOLERANCE_MS = 2.0
COMPARED = (0.5, 0.99)


def disagreements(client: RequestSummary, counted: Counted, *, seconds: float) -> tuple[str, ...]:
    """One sentence for each thing on which they disagree: how many requests there were, their median, their p99.

    seconds: how long both counted. Failures and timeouts may be among the server's answers or not.
    """
    sentences = (_on_the_count(client, counted, seconds), *_on_the_quantiles(client, counted))
    return tuple(sentence for sentence in sentences if sentence)


def answers_expected(client: RequestSummary) -> tuple[int, int]:
    """The least and the most that a server which answered this client alone has counted."""
    least = client.ok + client.refused
    return least, least + client.failed + client.timeouts


def _on_the_count(client: RequestSummary, counted: Counted, seconds: float) -> str:
    least, most = answers_expected(client)
    said = f"client got {least} answers, server counted {counted.answered}"
    if counted.answered < least:
        return f"{said}: {least - counted.answered} were answered by somebody else, or this is another server's count"
    if counted.answered > most + counted.probes_per_s * seconds:
        return f"{said}: {counted.answered - most} are not this client's; it was not alone, or answers were lost"
    return ""


def _on_the_quantiles(client: RequestSummary, counted: Counted) -> list[str]:
    if counted.latency is None or not counted.answered or not client.service.count:
        return []
    strangers = min(1.0, (abs(counted.answered - client.ok) + client.timeouts) / counted.answered)
    found = []
    for q in COMPARED:
        # Strangers among the server's requests (refusals, other clients) may all be faster, or all be slower.
        low_s, _ = quantile_bounds(counted.latency.buckets, max(0.0, q - strangers))
        _, high_s = quantile_bounds(counted.latency.buckets, min(1.0, q + strangers))
        found.append(_outside(f"p{q * 100:g}", _percentile(client.service, q), low_s * 1e3, high_s * 1e3))
    return found


def _outside(name: str, client_ms: float, low_ms: float, high_ms: float) -> str:
    said = f"client {name} {client_ms:.3g} ms, server says {low_ms:.3g} to {high_ms:.3g} ms"
    if client_ms > high_ms * (1 + TOLERANCE_SHARE) + TOLERANCE_MS:
        return (
            f"{said}: {client_ms - high_ms:.3g} ms or more pass outside the server's measure (network, accept queue, "
            "or a busy generator)"
        )
    if client_ms < low_ms * (1 - TOLERANCE_SHARE) - TOLERANCE_MS:
        return f"{said}: the server counted requests slower than this client's by {low_ms - client_ms:.3g} ms or more"
    return ""


def _percentile(percentiles: Percentiles, q: float) -> float:
    return {0.5: percentiles.p50, 0.99: percentiles.p99}[q]
