"""Runs that reports are tried on, in addition to those of runs.py."""

from collections.abc import Callable

import msgspec

from penstock_load.measure.measures import knee_measurement, measure
from penstock_load.results import PhaseResult, Run, State, Verdict
from tests.loadtest.runs import make_phase, make_records, make_run


def changed(run: Run, **fields: object) -> Run:
    """The run with other fields, and the measurements of its phases."""
    run = msgspec.structs.replace(run, **fields)
    return msgspec.structs.replace(run, measurements=(*run.measurements, *measure(run.phases, run.reloads)))


def verdict(state: State, **fields: object) -> Verdict:
    """A row for p99 at most 250 ms."""
    row = Verdict(
        target_id="slo",
        title="latency that 99 % kept",
        state=state,
        measure="p99_ms",
        comparison="at_most",
        figure=250.0,
        unit="ms",
        why="20.1 ms, at most 250 ms",
        value=20.1,
    )
    return msgspec.structs.replace(row, **fields)


def ladder() -> PhaseResult:
    """A phase whose rate doubles every four seconds, and whose last step breaks the SLO of 100 ms."""
    steps = ((20, 10.0), (40, 12.0), (80, 15.0), (160, 300.0))
    records = [
        record
        for place, (per_s, median_ms) in enumerate(steps)
        for record in make_records(
            phase="ladder", began_s=place * 4.0, seconds=4.0, per_s=per_s, median_ms=median_ms, seed=place
        )
    ]
    return make_phase(records, seconds=16.0, is_judged=False)


def knee_run(trials: int) -> Run:
    """Trials from 20/s upwards; what is above 100/s breaks the SLO."""
    phases = []
    for place in range(trials):
        rate = 20 + 180 * place / max(trials - 1, 1)
        records = make_records(
            phase=f"trial {place + 1}: {rate:.4g}/s",
            began_s=place * 3.0,
            seconds=2.0,
            per_s=rate,
            median_ms=10.0 if rate < 100 else 400.0,
            seed=place,
        )
        phases.append(make_phase(records, seconds=2.0, is_judged=False))
    return msgspec.structs.replace(make_run(), phases=tuple(phases), rounds=1, measurements=(knee_measurement([90.0]),))


def one_phase(**bad: float) -> Callable[[], Run]:
    """A run of one phase in which all requests ended in one way."""

    def run() -> Run:
        phase = make_phase(make_records(per_s=20.0, **bad))
        return changed(make_run(), phases=(phase,), rounds=1)

    return run
