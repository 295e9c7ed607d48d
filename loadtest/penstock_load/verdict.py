"""Whether a run met its targets: a verdict a row, and the exit code. Pure; judged is the median over the rounds.

A run with a complaint (its generator was the bottleneck, say) is trusted in neither direction: a generator that sends
too little spares the server, and one that sends late makes it look slow. So each of its rows that would be judged is
"not measured", says what it would have been, and the exit code is 1.
"""

import fnmatch
from collections.abc import Iterable, Sequence

import msgspec

from penstock_load.hardware import ANY, describe, matches
from penstock_load.results import Machine, Measurement, Run, State, Verdict
from penstock_load.targets import NOTHING_MEASURES_IT, Comparison, Target, with_unit

_BESIDE = "give --beside URL of the Triton behind"
_NEAR = "run it on the server's own machine"
_WAYS = {
    "rate_ratio": _BESIDE,
    "added_p50_ms": _BESIDE,
    "added_p99_ms": _BESIDE,
    "knee_per_s": "run penstock load knee",
    "capacity_per_s": "a phase with is_capacity finds it",
    "goodput_of_capacity": "a phase with is_capacity finds the capacity",
    "cpu_ms_per_ok": f"the CPU of the server's processes could not be read; {_NEAR}",
    "rss_slope_mib_per_min": f"a judged phase of 75 s or more shows it; {_NEAR}",
    "p99_drift": "a judged phase of 9 s or more shows it",
    "load_ms": "run penstock load run cold-start",
    "first_answer_ms": "run penstock load run cold-start",
    "streams_per_core": f"not one stream was held; {_NEAR}",
    "nvdec_share": "run python -m loadtest.bench.gpu.video",
    "refusal_p99_ms": "nothing was refused",
    "batch_size_mean": "the server does not say how large its batches are",
}
_WAYS_ELSEWHERE = {
    "batcher-replay": "comes with penstock plan",
    NOTHING_MEASURES_IT: "a fact, which no load test measures",
}


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was like. machine: the generator's; is_local: the server's, too. complaints: why it cannot pass.

    server_hardware: what a person says that the server runs on (--hardware), which counts before all else; or "".
    """

    machine: Machine
    models: tuple[str, ...]
    slo_p99_ms: float
    server_hardware: str = ""
    is_local: bool = True
    complaints: tuple[str, ...] = ()

    @property
    def server_on(self) -> str:
        """The server's hardware in words; empty if unknown."""
        return self.server_hardware or (describe(self.machine) if self.is_local else "")


def circumstances_of(run: Run) -> Circumstances:
    """What a run was like, by what it says of itself."""
    return Circumstances(
        machine=run.machine,
        models=run.models,
        slo_p99_ms=run.slo_p99_ms,
        server_hardware=run.server_hardware,
        is_local=run.is_local,
        complaints=run.complaints,
    )


def judge(
    targets: Iterable[Target], measurements: Iterable[Measurement], circumstances: Circumstances
) -> tuple[Verdict, ...]:
    """A verdict for each target, in their order."""
    measured = {one.measure: one for one in measurements}
    return tuple(_verdict(target, measured.get(target.measure), circumstances) for target in targets)


def exit_code(verdicts: Sequence[Verdict], complaints: Sequence[str]) -> int:
    """0 if something passed, nothing failed and there are no complaints. Else 1, also if nothing could be judged."""
    states = {verdict.state for verdict in verdicts}
    return 0 if State.PASS in states and State.FAIL not in states and not complaints else 1


def way_out(target: Target) -> str:
    """What would measure the target."""
    for name in target.scenarios:
        if name in _WAYS_ELSEWHERE:
            return _WAYS_ELSEWHERE[name]
        if name.startswith("bench "):
            bench = name.removeprefix("bench ").replace("image_endpoint", "gateway.image_endpoint")
            return f"run python -m loadtest.bench.{bench}"
    return _WAYS.get(target.measure, "no answer came")


def _verdict(target: Target, measurement: Measurement | None, circumstances: Circumstances) -> Verdict:
    state, why = _judged(target, measurement, circumstances)
    value = measurement.spread.median if measurement else None
    is_judged = state in (State.PASS, State.FAIL)
    return Verdict(
        target_id=target.id,
        title=target.title,
        state=state,
        measure=target.measure,
        comparison=target.comparison,
        figure=target.figure or 0.0,
        unit=target.unit,
        why=why + ("; its condition was quoted from memory" if target.from_memory else ""),
        value=value,
        ratio=value / target.figure if value is not None and target.figure else None,
        goal=target.goal,
        meets_goal=_is_met(target, value, target.goal) if is_judged and value is not None and target.goal else None,
        hardware=str(target.hardware),
        source=target.source,
    )


def _judged(target: Target, measurement: Measurement | None, circumstances: Circumstances) -> tuple[State, str]:
    """Four cases, in this order: it speaks of something else, nothing was measured, nothing can be trusted, judged."""
    if differences := _differences(target, circumstances):
        return State.NOT_COMPARABLE, _apart(target, measurement, differences)
    if measurement is None or target.figure is None:
        return State.NOT_MEASURED, way_out(target)
    state = State.PASS if _is_met(target, measurement.spread.median, target.figure) else State.FAIL
    why = _compared(target, measurement, target.figure)
    if circumstances.complaints:
        return (
            State.NOT_MEASURED,
            f"not to be trusted, {circumstances.complaints[0].rstrip('.')}; it says {why}: {state}",
        )
    return state, why


def _is_met(target: Target, value: float | None, figure: float | None) -> bool:
    if value is None or figure is None:
        return False
    return value >= figure if target.comparison is Comparison.AT_LEAST else value <= figure


def _compared(target: Target, measurement: Measurement, figure: float) -> str:
    """ "152/s (147 to 156), at least 140/s"."""
    low, high = measurement.spread.low, measurement.spread.high
    straddles = low < figure < high
    split = "; the rounds lie on both sides, the median decides" if straddles else ""
    return f"{spread_text(measurement, target.unit, unlike=figure)}, {target.wanted}{split}"


def spread_text(measurement: Measurement, unit: str, *, unlike: float | None = None) -> str:
    """The median and the rounds about it, "152/s (147 to 156)". unlike: as of with_unit."""
    spread = measurement.spread
    value = with_unit(spread.median, unit, unlike=unlike)
    if measurement.rounds == 1:
        return f"{value} in one round"
    if spread.low == spread.high and measurement.rounds:
        return f"{value} in all {measurement.rounds} rounds"
    return f"{value} ({with_unit(spread.low, '')} to {with_unit(spread.high, '')})"


def _differences(target: Target, circumstances: Circumstances) -> list[str]:
    """What the target speaks of and the run was not."""
    found = []
    if target.comparison is Comparison.QUOTED:
        found.append(f"quoted from {target.source}, never judged")
    if target.hardware != ANY:
        found += _other_hardware(target, circumstances)
    strangers = [name for name in circumstances.models if not any(fnmatch.fnmatch(name, it) for it in target.models)]
    if target.models and strangers:
        found.append(f"speaks of {' or '.join(target.models)}, this run asked {', '.join(strangers)}")
    if not found and target.slo_p99_ms not in (None, circumstances.slo_p99_ms):
        found.append(f"speaks of an SLO of {target.slo_p99_ms:g} ms: --slo-p99-ms {target.slo_p99_ms:g}")
    return found


def _other_hardware(target: Target, circumstances: Circumstances) -> list[str]:
    if not circumstances.server_on:
        return [f"speaks of {target.hardware}; what the server runs on is not known: say so with --hardware"]
    found = circumstances.server_hardware or circumstances.machine
    return [] if matches(target.hardware, found) else [f"speaks of {target.hardware}, not {circumstances.server_on}"]


def _apart(target: Target, measurement: Measurement | None, differences: list[str]) -> str:
    """ "speaks of a V100, not AMD EPYC, 2 cores: 0.03 of its 5,707 images/s, 152/s (147 to 156)"."""
    words = "; ".join(differences)
    if measurement is None or not target.figure:
        return words
    ratio = with_unit(measurement.spread.median / target.figure, "ratio")
    here, there = spread_text(measurement, measurement.unit), with_unit(target.figure, target.unit)
    return f"{words}: {ratio} of its {there}, {here}"
