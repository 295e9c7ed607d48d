"""The verdict in one sentence."""

from collections import Counter

from loadtest.report.document import Tone
from loadtest.report.offered import knee_of
from loadtest.report.rounds import PhaseRounds, is_knee_search, key_phase, spread_of
from loadtest.report.wording import count, duration, number, one_line, plain_number, times
from loadtest.results import Run, State

_SUBJECT_CHARACTERS = 80


def outcome(run: Run) -> Tone:
    """GOOD: at least one target is met and none missed; BAD: one is missed, or the run counts for nothing."""
    states = [verdict.state for verdict in run.verdicts]
    if run.complaints or State.FAIL in states:
        return Tone.BAD
    return Tone.GOOD if State.PASS in states else Tone.PLAIN


def headline(run: Run) -> str:
    """One sentence: the verdict, what was tested, and the figures that matter most."""
    is_judged = any(verdict.state in (State.PASS, State.FAIL) for verdict in run.verdicts)
    if is_knee_search(run) and not (is_judged or run.complaints):
        return f"KNEE: {_knee(run)}; {_subject(run)}"
    return f"{_verdict(run)}; {', '.join([_subject(run), *_figures(run)])}"


def _verdict(run: Run) -> str:
    states = Counter(verdict.state for verdict in run.verdicts)
    if run.complaints:
        return f"FAIL: nothing passes ({times(len(run.complaints), 'complaint')})"
    judged = states[State.PASS] + states[State.FAIL]
    if states[State.FAIL]:
        return f"FAIL: {count(states[State.FAIL])} of {_rows(judged)} not met{_unjudged(states)}"
    if states[State.PASS]:
        return f"PASS: {count(states[State.PASS])} of {_rows(judged)}{_unjudged(states)}"
    if run.verdicts:
        return f"NO VERDICT: no target could be judged{_unjudged(states)}"
    return "NO VERDICT: no target speaks of this scenario"


def _rows(judged: int) -> str:
    return times(judged, "row")


def _unjudged(states: Counter[State]) -> str:
    told = [f"{states[state]} {state.value}" for state in (State.NOT_COMPARABLE, State.NOT_MEASURED) if states[state]]
    return f" ({', '.join(told)})" if told else ""


def _subject(run: Run) -> str:
    server = f" ({one_line(run.server, at_most=_SUBJECT_CHARACTERS)})" if run.server else ""
    scenario, target = (one_line(text, at_most=_SUBJECT_CHARACTERS) for text in (run.scenario, run.target_url))
    return f"{scenario} against {target}{server}"


def _figures(run: Run) -> list[str]:
    phase = key_phase(run)
    if is_knee_search(run):
        return [_knee(run)]
    if phase is None:
        return _reload_figures(run)
    return [_rate(phase), _p99(phase)]


def _knee(run: Run) -> str:
    knee, slo = knee_of(run), f"p99 within {plain_number(run.slo_p99_ms)} ms"
    return f"no rate that was tried keeps {slo}" if knee is None else f"{plain_number(knee)} requests/s keep {slo}"


def _rate(phase: PhaseRounds) -> str:
    if phase.first.is_open_loop:
        return f"{plain_number(phase.spread(lambda result: result.offered_per_s).median)} requests/s"
    return f"{plain_number(phase.spread(lambda result: result.ok_per_s).median)} answers/s"


def _p99(phase: PhaseRounds) -> str:
    p99 = phase.waited_spread(lambda result: result.all.latency.p99)
    return f"p99 {_latency(p99.median)}" if p99 else "nothing was answered"


def _latency(ms: float) -> str:
    return f"{number(ms)} ms" if ms < 10_000 else duration(ms / 1e3)


def _reload_figures(run: Run) -> list[str]:
    if held := next((one for one in run.measurements if one.measure == "streams_held"), None):
        return [f"{plain_number(held.spread.median)} streams held"]
    if not run.reloads:
        return ["nothing was measured"]
    load_ms = spread_of([reload.load_ms for reload in run.reloads]).median
    first_ms = spread_of([reload.first_answer_ms for reload in run.reloads]).median
    return [times(len(run.reloads), "reload"), f"load {_latency(load_ms)}", f"first answer {_latency(first_ms)}"]
