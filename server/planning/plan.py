"""A whole plan: every case with its bounds and the row of each contender, as one value that can be written as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.planning.contenders import Contender
from server.planning.race import Bounds, Case, Load, Row, bounds_of, run


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a plan that one process can do alone: a contender's row of a case, or the case's bounds (None).

    number: the case's place in the plan. multiples: of Nexus' bound, for overload.
    """

    number: int
    case: Case
    contender: Contender | None
    multiples: tuple[float, ...] = ()


Result = tuple[int, Row | Bounds]  # the case's place, and what was found


@dataclass(frozen=True, slots=True)
class Race:
    """A case's outcome; rows in the order in which the contenders were named."""

    case: Case
    bounds: Bounds
    rows: tuple[Row, ...]

    @property
    def ours(self) -> Row | None:
        """Our row, where we were asked for."""
        return next((row for row in self.rows if row.contender is Contender.OURS), None)


def pieces_of(cases: Sequence[Case], contenders: Sequence[Contender], multiples: Sequence[float]) -> list[Piece]:
    """All parts, those first that take longest."""
    dear = sorted(contenders, key=lambda one: one not in (Contender.CLIPPER, Contender.TRITON, Contender.AIMD))
    return [Piece(number, case, who, tuple(multiples)) for who in (*dear, None) for number, case in enumerate(cases)]


def do(piece: Piece) -> Result:
    """What the part gives."""
    if piece.contender is None:
        return piece.number, bounds_of(piece.case)
    return piece.number, run(piece.case, piece.contender, piece.multiples)


def gather(cases: Sequence[Case], contenders: Sequence[Contender], results: Iterable[Result]) -> list[Race]:
    """The races, from all their parts in any order."""
    rows: dict[tuple[int, Contender], Row] = {}
    bounds: dict[int, Bounds] = {}
    for number, found in results:
        if isinstance(found, Row):
            rows[number, found.contender] = found
        else:
            bounds[number] = found
    return [
        Race(case, bounds[number], tuple(rows[number, who] for who in contenders)) for number, case in enumerate(cases)
    ]


def as_object(races: Sequence[Race]) -> dict[str, object]:
    """{"races": [{profile, slo_ms, arrivals, …, bounds, rows}]}: times in milliseconds, rates in requests a second."""
    return {"races": [_race(race) for race in races]}


def _race(race: Race) -> dict[str, object]:
    case, engine = race.case, race.case.problem.engine
    return {
        "profile": engine.profile.name,
        "instances": engine.instances,
        "slo_ms": case.problem.slo_s * 1e3,
        "arrivals": case.pattern,
        "share": case.share,
        "requests_at_least": case.effort.count,
        "seeds": list(case.effort.seeds),
        "bounds": {
            "nexus": race.bounds.nexus,
            "even": race.bounds.even,
            "capacity": race.bounds.capacity,
            "possible": None if race.bounds.possible is None else race.bounds.possible.per_s,
            "possible_plus_minus": None if race.bounds.possible is None else race.bounds.possible.plus_minus,
        },
        "rows": [_row(row) for row in race.rows],
    }


def _row(row: Row) -> dict[str, object]:
    return {
        "policy": row.contender.value,
        "knobs": row.words,
        "settings_tried": row.settings,
        "rate": row.rate.per_s,
        "plus_minus": row.rate.plus_minus,
        "rate_by_seed": list(row.rate.by_seed),
        "at_rate": _load(row.at_rate),
        "overload": [{"times": multiple, **_load(load)} for multiple, load in row.overload],
    }


def _load(load: Load) -> dict[str, object]:
    return {
        "offered": load.offered_per_s,
        "goodput": load.goodput_per_s,
        "within": load.within,
        "late": load.late,
        "refused": load.refused,
        "expired": load.expired,
        "mean_batch": load.mean_batch,
        "p50_ms": load.p50_s * 1e3,
        "p99_ms": load.p99_s * 1e3,
    }
