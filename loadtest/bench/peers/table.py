"""What the rounds say: median (lowest-highest) a contender, and ours against each within the same round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.bench.peers.measuring import Measured
from loadtest.bench.report import Spread, format_table, spread

HEAD = ("server", "rate/s", "p50 ms", "p99 ms", "CPU ms", "client ms", "RSS MiB", "PSS MiB", "processes")
RATIO_HEAD = ("ours / peer", "rate", "p50", "p99", "CPU ms", "PSS")


@dataclass(frozen=True, slots=True)
class Row:
    """One contender over the rounds. rate: answers a second; CPU: milliseconds an answer.

    The ratios are ours / this one's within a round, so above 1 ours is faster (rate) or slower, dearer (the others).
    """

    name: str
    version: str
    rate: Spread
    p50_ms: Spread
    p99_ms: Spread
    server_ms: Spread
    client_ms: Spread
    rss_mib: Spread
    pss_mib: Spread
    processes: int
    rate_ratio: Spread
    p50_ratio: Spread
    p99_ratio: Spread
    server_ms_ratio: Spread
    pss_ratio: Spread


def rows_of(
    rounds: Mapping[str, Sequence[Measured]], *, ours: str, versions: Mapping[str, str] | None = None
) -> list[Row]:
    """A row a contender, in the order of rounds; ours: whose figures are divided by the others'."""
    return [_row(name, (versions or {}).get(name, ""), measured, rounds[ours]) for name, measured in rounds.items()]


def _row(name: str, version: str, theirs: Sequence[Measured], ours: Sequence[Measured]) -> Row:
    pairs = list(zip(ours, theirs, strict=True))
    return Row(
        name=name,
        version=version,
        rate=spread([one.lap.rate for one in theirs]),
        p50_ms=spread([one.lap.p50_ms for one in theirs]),
        p99_ms=spread([one.lap.p99_ms for one in theirs]),
        server_ms=spread([one.server_ms for one in theirs]),
        client_ms=spread([one.client_ms for one in theirs]),
        rss_mib=spread([one.memory.rss_mib for one in theirs]),
        pss_mib=spread([one.memory.pss_mib for one in theirs]),
        processes=max(one.memory.processes for one in theirs),
        rate_ratio=spread([a.lap.rate / b.lap.rate for a, b in pairs]),
        p50_ratio=spread([a.lap.p50_ms / b.lap.p50_ms for a, b in pairs]),
        p99_ratio=spread([a.lap.p99_ms / b.lap.p99_ms for a, b in pairs]),
        server_ms_ratio=spread([a.server_ms / b.server_ms for a, b in pairs]),
        pss_ratio=spread([a.memory.pss_mib / b.memory.pss_mib for a, b in pairs]),
    )


def format_rows(rows: Sequence[Row], *, ours: str) -> str:
    """Both tables, for people."""
    figures = [
        (
            f"{row.name} {row.version}".strip(),
            row.rate,
            row.p50_ms,
            row.p99_ms,
            row.server_ms,
            row.client_ms,
            row.rss_mib,
            row.pss_mib,
            row.processes,
        )
        for row in rows
    ]
    ratios = [
        (row.name, row.rate_ratio, row.p50_ratio, row.p99_ratio, row.server_ms_ratio, row.pss_ratio)
        for row in rows
        if row.name != ours
    ]
    return "\n".join([format_table(HEAD, figures), "", format_table(RATIO_HEAD, ratios)])
