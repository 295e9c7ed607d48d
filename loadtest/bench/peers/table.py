"""What the rounds say: median (lowest-highest) a contender, and ours against each within the same round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.bench.peers.measuring import Measured
from loadtest.bench.report import Spread, format_table, spread

HEAD = ("server", "rate/s", "full p50 ms", "full p99 ms", "light p50 ms", "light p99 ms")
COST_HEAD = ("server", "CPU ms", "client ms", "RSS MiB", "PSS MiB", "processes")
RATIO_HEAD = ("ours / peer", "rate", "full p50", "full p99", "light p50", "light p99", "CPU ms", "PSS")


@dataclass(frozen=True, slots=True)
class Row:
    """One contender over the rounds. rate: answers a second; server_ms, client_ms: of CPU, an answer.

    full: the closed loop, as many callers as always. light: the open loop at the same rate for all.

    The ratios are ours / this one's within a round, so above 1 ours is faster (rate) or slower, dearer (the others).
    """

    name: str
    version: str
    rate: Spread
    full_p50_ms: Spread
    full_p99_ms: Spread
    light_p50_ms: Spread
    light_p99_ms: Spread
    server_ms: Spread
    client_ms: Spread
    rss_mib: Spread
    pss_mib: Spread
    processes: int
    rate_ratio: Spread
    full_p50_ratio: Spread
    full_p99_ratio: Spread
    light_p50_ratio: Spread
    light_p99_ratio: Spread
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
        rate=spread([one.closed.rate for one in theirs]),
        full_p50_ms=spread([one.closed.p50_ms for one in theirs]),
        full_p99_ms=spread([one.closed.p99_ms for one in theirs]),
        light_p50_ms=spread([one.light.p50_ms for one in theirs]),
        light_p99_ms=spread([one.light.p99_ms for one in theirs]),
        server_ms=spread([one.server_ms for one in theirs]),
        client_ms=spread([one.client_ms for one in theirs]),
        rss_mib=spread([one.memory.rss_mib for one in theirs]),
        pss_mib=spread([one.memory.pss_mib for one in theirs]),
        processes=max(one.memory.processes for one in theirs),
        rate_ratio=spread([a.closed.rate / b.closed.rate for a, b in pairs]),
        full_p50_ratio=spread([a.closed.p50_ms / b.closed.p50_ms for a, b in pairs]),
        full_p99_ratio=spread([a.closed.p99_ms / b.closed.p99_ms for a, b in pairs]),
        light_p50_ratio=spread([a.light.p50_ms / b.light.p50_ms for a, b in pairs]),
        light_p99_ratio=spread([a.light.p99_ms / b.light.p99_ms for a, b in pairs]),
        server_ms_ratio=spread([a.server_ms / b.server_ms for a, b in pairs]),
        pss_ratio=spread([a.memory.pss_mib / b.memory.pss_mib for a, b in pairs]),
    )


def format_rows(rows: Sequence[Row], *, ours: str) -> str:
    """The tables, for people."""
    names = [f"{row.name} {row.version}".strip() for row in rows]
    figures = [
        (name, row.rate, row.full_p50_ms, row.full_p99_ms, row.light_p50_ms, row.light_p99_ms)
        for name, row in zip(names, rows, strict=True)
    ]
    costs = [
        (name, row.server_ms, row.client_ms, row.rss_mib, row.pss_mib, row.processes)
        for name, row in zip(names, rows, strict=True)
    ]
    ratios = [_ratios(row) for row in rows if row.name != ours]
    return "\n\n".join([format_table(HEAD, figures), format_table(COST_HEAD, costs), format_table(RATIO_HEAD, ratios)])


def _ratios(row: Row) -> tuple[object, ...]:
    full = (row.full_p50_ratio, row.full_p99_ratio)
    light = (row.light_p50_ratio, row.light_p99_ratio)
    return (row.name, row.rate_ratio, *full, *light, row.server_ms_ratio, row.pss_ratio)
