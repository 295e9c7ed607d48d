"""Whether two runs were made on the same terms, so that what differs between them is the server."""

import statistics
from collections.abc import Callable

from loadtest.results import PhaseResult, Run, Side

OFFERED_TOLERANCE = 0.02
SECONDS_TOLERANCE = 0.05
TERMS: tuple[tuple[str, Callable[[Run], object]], ...] = (
    ("scenario", lambda run: run.scenario),
    ("models", lambda run: ", ".join(sorted(run.models)) or "none"),
    ("SLO", lambda run: f"{run.slo_p99_ms:g} ms"),
    ("payloads' seed", lambda run: run.seed),
    ("server's hardware", lambda run: run.server_hardware),
    ("generator's processor", lambda run: f"{run.machine.cpu}, {run.machine.cores} cores"),
    ("generator's GPUs", lambda run: ", ".join(run.machine.gpus) or "none"),
    ("generator's place", lambda run: "the server's machine" if run.is_local else "another machine"),
    ("judged phases", lambda run: ", ".join(sorted({phase.phase for phase in _judged(run)})) or "none"),
)


def differences(a: Run, b: Run) -> tuple[str, ...]:
    """A sentence for each thing that makes a comparison of the two unfair; none where there is nothing to say."""
    terms = [
        f"the {what} differs: {of(a)} in A, {of(b)} in B"
        if what not in ("models", "judged phases", "generator's GPUs")
        else f"the {what} differ: {of(a)} in A, {of(b)} in B"
        for what, of in TERMS
        if of(a) != of(b)
    ]
    complaints = [
        f"{name} cannot be relied on: {complaint}" for name, run in (("A", a), ("B", b)) for complaint in run.complaints
    ]
    return (*terms, *_phase_differences(a, b), *complaints)


def _phase_differences(a: Run, b: Run) -> list[str]:
    told = []
    for phase in sorted({it.phase for it in _judged(a)} & {it.phase for it in _judged(b)}):
        offered = [_median(run, phase, lambda it: it.offered_per_s) for run in (a, b)]
        seconds = [_median(run, phase, lambda it: it.seconds) for run in (a, b)]
        if _is_open_loop(a, phase) != _is_open_loop(b, phase):
            told.append(f"the phase {phase} was an open loop in one run and a closed one in the other")
        elif _is_open_loop(a, phase) and _differ(offered, OFFERED_TOLERANCE):
            rates = f"{offered[0]:.4g}/s in A and {offered[1]:.4g}/s in B"
            told.append(f"the phase {phase} was offered {rates}; --rate gives both the same")
        if _differ(seconds, SECONDS_TOLERANCE):
            told.append(f"the phase {phase} lasted {seconds[0]:.4g} s in A and {seconds[1]:.4g} s in B")
    return told


def _judged(run: Run) -> list[PhaseResult]:
    return [phase for phase in run.phases if phase.is_judged and phase.side is Side.TARGET]


def _is_open_loop(run: Run, name: str) -> bool:
    return any(phase.is_open_loop for phase in _judged(run) if phase.phase == name)


def _median(run: Run, name: str, of: Callable[[PhaseResult], float]) -> float:
    return statistics.median(of(phase) for phase in _judged(run) if phase.phase == name)


def _differ(pair: list[float], tolerance: float) -> bool:
    return abs(pair[0] - pair[1]) > tolerance * max(pair)
