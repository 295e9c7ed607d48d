"""The nouns of a dashboard: boards have rows, rows have panels, panels have queries."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "#808080"


class Look(Enum):
    """How a panel shows what its queries answer."""

    LINES = "timeseries"
    STACKED = "timeseries, stacked"
    STEPS = "timeseries, in steps"
    HEATMAP = "heatmap"
    STAT = "stat"
    STATES = "state-timeline"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL with Grafana's variables, and what its series are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. unit: Grafana's word. width: of 24; height: in grid rows.

    steps: colours from values on, the first from below everything. words: text and colour of values, for states.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...] = ()
    look: Look = Look.LINES
    width: int = 8
    height: int = 8
    steps: tuple[tuple[float | None, str], ...] = ((None, GREEN),)
    words: tuple[tuple[str, str, str], ...] = ()
    minimum: float | None = 0
    maximum: float | None = None
    decimals: int | None = None
    text: str = ""
    right: tuple[
        tuple[str, str], ...
    ] = ()  # series (by a pattern of their names) with an axis of their own, and its unit


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, from left to right; a collapsed one costs no queries until it is opened."""

    title: str
    panels: tuple[Panel, ...]
    is_collapsed: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A variable: the values that a label of a metric has.

    is_always_there: All is then exactly these; else any value, and none, too.
    """

    name: str
    label: str
    query: str
    is_always_there: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. uid: what links say, never changed."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...] = field(default=())


def one(expr: str, legend: str = "{{instance}}") -> tuple[Query, ...]:
    """A panel's only query."""
    return (Query(expr, legend),)


def figure(title: str, description: str, unit: str, queries: tuple[Query, ...], **more: Any) -> Panel:
    """A small panel with one number, blue where it has no better and no worse."""
    more = {"steps": ((None, BLUE),)} | more
    return Panel(title, description, unit, queries, Look.STAT, width=4, height=4, **more)


def quantile(q: float, bucket: str, matchers: str, by: str = "") -> str:
    """A quantile of a histogram's buckets; by: a label to tell apart."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({bucket}{{{matchers}}}[$__rate_interval])))"


def quantiles(bucket: str, matchers: str, by: str = "") -> tuple[Query, ...]:
    """p50, p90 and p99 of a histogram's buckets."""
    prefix = f"{{{{{by}}}}} " if by else ""
    return tuple(Query(quantile(q, bucket, matchers, by), f"{prefix}p{round(q * 100)}") for q in (0.5, 0.9, 0.99))


def heatmap(bucket: str, matchers: str) -> tuple[Query, ...]:
    """How many fell into each bucket, over time."""
    return one(f"sum by (le) (increase({bucket}{{{matchers}}}[$__rate_interval]))", "{{le}}")


def mean(name: str, matchers: str, by: str) -> str:
    """A histogram's or summary's mean."""
    top = f"sum by ({by}) (rate({name}_sum{{{matchers}}}[$__rate_interval]))"
    return f"{top} / sum by ({by}) (rate({name}_count{{{matchers}}}[$__rate_interval]))"
