"""The top of a report: the verdict in a sentence, the key figures, and the charts that support it."""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from penstock_load.report.curves import has_a_curve, knee_of, knee_sentence, offered_points, rate_varies
from penstock_load.report.document import (
    Cell,
    KeyChart,
    KeyFigure,
    PlotName,
    Tone,
    count,
    duration,
    join,
    moment,
    number,
    one_line,
    percent,
    plain_number,
    sentence,
    times,
)
from penstock_load.report.rounds import PhaseRounds, is_knee_search, key_phase, spread_of
from penstock_load.results import PhaseResult, RequestSummary, Run, Side, State, Verdict
from penstock_load.targets import Comparison, with_unit

_TEXT_CHARACTERS = 80
_MEMORY_MEASURE = "rss_slope_mib_per_min"


def outcome(run: Run) -> Tone:
    """GOOD: at least one target is met and none missed. BAD: one is missed, or the run is invalid."""
    states = [verdict.state for verdict in run.verdicts]
    if run.complaints or State.FAIL in states:
        return Tone.BAD
    return Tone.GOOD if State.PASS in states else Tone.PLAIN


def headline(run: Run) -> str:
    """One sentence: the verdict and what decided it."""
    states = Counter(verdict.state for verdict in run.verdicts)
    judged, unmeasured = states[State.PASS] + states[State.FAIL], _unjudged(states, State.NOT_MEASURED)
    if run.complaints:
        more = f" (and {times(len(run.complaints) - 1, 'more complaint')})" if run.complaints[1:] else ""
        return f"FAIL: the run is invalid: {one_line(run.complaints[0])}{more}"
    if states[State.FAIL]:
        worst = next(verdict for verdict in run.verdicts if verdict.state is State.FAIL)
        return f"FAIL: {_missed(worst)}; {states[State.FAIL]} of {times(judged, 'target')} missed{unmeasured}"
    if states[State.PASS]:
        return f"PASS: {_finding(run)}; {judged} of {times(judged, 'target')} met{unmeasured}"
    if is_knee_search(run):
        return f"KNEE: {_finding(run)}"
    unjudged = _unjudged(states, State.NOT_COMPARABLE, State.NOT_MEASURED)
    why = f"no target could be judged{unjudged}" if run.verdicts else "no target applies to this scenario"
    return f"NO VERDICT: {why}; {_finding(run)}"


def subject(run: Run) -> str:
    """What was tested, by what, and when."""
    server = f" ({one_line(run.server, at_most=_TEXT_CHARACTERS)})" if run.server else ""
    scenario, target = (one_line(text, at_most=_TEXT_CHARACTERS) for text in (run.scenario, run.target_url))
    commit = f", commit {one_line(run.commit, at_most=_TEXT_CHARACTERS)}" if run.commit else ""
    return f"{scenario} against {target}{server}{commit}, {moment(run.began_at)}"


_PERCENTILES = {"p50_ms": "p50", "p90_ms": "p90", "p95_ms": "p95", "p99_ms": "p99", "p999_ms": "p99.9"}


def _missed(verdict: Verdict) -> str:
    """ "p99 362 ms, limit 250 ms"; of other measures the title and the reason."""
    if verdict.value is not None and verdict.measure in _PERCENTILES and verdict.comparison == Comparison.AT_MOST:
        value = with_unit(verdict.value, verdict.unit, unlike=verdict.figure)
        return f"{_PERCENTILES[verdict.measure]} {value}, limit {with_unit(verdict.figure, verdict.unit)}"
    return f"{one_line(verdict.title)}: {one_line(verdict.why)}".rstrip(".")


def _unjudged(states: Counter[State], *shown: State) -> str:
    counts = [f"{states[state]} {state.value}" for state in shown if states[state]]
    return f" ({', '.join(counts)})" if counts else ""


def _finding(run: Run) -> str:
    """The figures that matter most, in words."""
    slo = f"{plain_number(run.slo_p99_ms)} ms"
    if is_knee_search(run):
        knee, within = knee_of(run), f"p99 within {slo}"
        return (
            f"no rate that was tried keeps {within}"
            if knee is None
            else f"{plain_number(knee)} requests/s keep {within}"
        )
    phase = key_phase(run)
    if phase is None:
        return _reload_finding(run)
    p99 = phase.waited_spread(lambda result: result.all.latency.p99)
    if p99 is None:
        return f"at {_rate(phase)} nothing was answered"
    return f"p99 {_latency(p99.median)}, limit {slo}, at {_rate(phase)}"


def _rate(phase: PhaseRounds) -> str:
    if phase.first.is_open_loop:
        return f"{plain_number(phase.spread(lambda result: result.offered_per_s).median)} requests/s"
    return f"{plain_number(phase.spread(lambda result: result.ok_per_s).median)} answers/s"


def _latency(ms: float) -> str:
    return f"{number(ms)} ms" if ms < 10_000 else duration(ms / 1e3)


def _reload_finding(run: Run) -> str:
    if (streams := _median(run, "streams_held")) is not None:
        return f"{plain_number(streams)} streams held"
    if not run.reloads:
        return "nothing was measured"
    load_ms = spread_of([reload.load_ms for reload in run.reloads]).median
    first_ms = spread_of([reload.first_answer_ms for reload in run.reloads]).median
    reloads = times(len(run.reloads), "reload")
    return f"{reloads}, loaded in {_latency(load_ms)}, first answer in {_latency(first_ms)}"


def _median(run: Run, measure: str) -> float | None:
    return next((one.spread.median for one in run.measurements if one.measure == measure), None)


def key_figures(run: Run) -> tuple[KeyFigure, ...]:
    """The key figures."""
    phase = key_phase(run)
    if phase is None:
        return _reload_figures(run)
    found = []
    for name, pick in (("p50", _p50), ("p99", _p99)):
        if (spread := phase.waited_spread(pick)) is not None:
            is_late = name == "p99" and phase.first.is_open_loop and spread.median > run.slo_p99_ms
            detail = f"SLO {plain_number(run.slo_p99_ms)} ms" if name == "p99" else "half of the answers were faster"
            found.append(KeyFigure(name, Cell(_latency(spread.median), detail, Tone.BAD if is_late else Tone.PLAIN)))
    answered = phase.spread(lambda result: result.ok_per_s).median
    offered = phase.spread(lambda result: result.offered_per_s).median
    detail = f"of {plain_number(offered)}/s offered" if phase.first.is_open_loop else "in a closed loop"
    found.append(KeyFigure("answered", Cell(f"{plain_number(answered)}/s", detail)))
    found.append(KeyFigure("not answered", _wrong(phase)))
    if capacity := _median(run, "capacity_per_s"):
        found.append(KeyFigure("capacity", Cell(f"{plain_number(capacity)}/s", "closed loop")))
    return tuple(found)


def _p50(result: PhaseResult) -> float:
    return result.all.latency.p50


def _p99(result: PhaseResult) -> float:
    return result.all.latency.p99


TERMS = {
    "p99": "99 of 100 requests were answered within this time, counted from the moment at which each was due",
    "SLO": "service level objective, the limit for the p99",
    "knee": "the highest rate that keeps the SLO",
    "closed loop": "each client sends its next request after the answer; a rate in an open loop does not wait",
}


def terms(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The terms in these texts with their meanings."""
    whole = " ".join(texts)
    return tuple((term, meaning) for term, meaning in TERMS.items() if re.search(rf"\b{term}\b", whole, re.IGNORECASE))


def _reload_figures(run: Run) -> tuple[KeyFigure, ...]:
    names = {"load_ms": "load", "first_answer_ms": "first answer"}
    found = [
        KeyFigure(name, Cell(_latency(ms), "median"))
        for of, name in names.items()
        if (ms := _median(run, of)) is not None
    ]
    if (streams := _median(run, "streams_held")) is not None:
        found.append(KeyFigure("streams", Cell(plain_number(streams), "held at once")))
    if (share := _median(run, "streams_per_core")) is not None:
        found.append(KeyFigure("streams per core", Cell(plain_number(share))))
    return tuple(found)


_WRONG: tuple[tuple[str, Callable[[RequestSummary], int]], ...] = (
    ("refused", lambda summary: summary.refused),
    ("failed", lambda summary: summary.failed),
    ("timed out", lambda summary: summary.timeouts),
    ("not sent", lambda summary: summary.not_sent),
)


def wrong_words(phase: PhaseRounds) -> list[str]:
    """What went wrong, each with its count: "3,702 refused"."""
    return [f"{count(amount)} {word}" for word, pick in _WRONG if (amount := phase.total(pick))]


def _wrong(phase: PhaseRounds) -> Cell:
    words, intended = wrong_words(phase), phase.total(lambda summary: summary.intended)
    wrong = intended - phase.total(lambda summary: summary.ok)
    if not wrong or not intended:
        return Cell("0 %", f"of {count(intended)} requests")
    is_broken = phase.total(lambda summary: summary.failed + summary.timeouts + summary.not_sent) > 0
    return Cell(percent(wrong / intended), ", ".join(words), Tone.BAD if is_broken else Tone.PLAIN)


def shown_results(run: Run) -> tuple[PhaseResult, ...]:
    """What the charts over time show: the key phase in the round with the median p99, and that round's later phases.

    The later phases show whether the effects of the key phase end with it. Of a search for the knee: its best trial.
    """
    phase = key_phase(run)
    if phase is None:
        return ()
    ordered = sorted(phase.rounds, key=_p99)
    typical = ordered[(len(ordered) - 1) // 2]
    if is_knee_search(run):
        return (typical,)
    later = [
        result
        for result in run.phases
        if result.side is Side.TARGET and result.round == typical.round and result.began_s >= typical.began_s
    ]
    return tuple(sorted(later, key=lambda result: result.began_s))


def shown_run(run: Run) -> Run:
    """The run with those results only."""
    return msgspec.structs.replace(run, phases=shown_results(run))


def key_charts(run: Run) -> tuple[KeyChart, ...]:
    """The charts that support the verdict: three where the run sent requests, at most two of reloads."""
    phase = key_phase(run)
    if phase is None:
        return _reload_charts(run)
    has_latency = any(result.all.latency.count for result in phase.rounds)
    if is_knee_search(run):
        curves = (_curve_chart(run), _answered_chart(run)) if has_a_curve(offered_points(run, Side.TARGET)) else ()
        return (*curves, *([_percentile_chart(phase)] if has_latency else []))
    if not any(result.timeline for result in shown_results(run)):
        return ()
    first = [_refusal_chart(phase)] if _judges_refusals(run) else [_latency_chart(run, phase)] if has_latency else []
    return (*first, _rate_chart(run, phase), *_third(run, phase))


def _judges_refusals(run: Run) -> bool:
    return any(verdict.measure == "refusal_p99_ms" and verdict.value is not None for verdict in run.verdicts)


def _refusal_chart(phase: PhaseRounds) -> KeyChart:
    p99_ms = phase.spread(lambda result: result.all.refusals.p99).median
    finding = f"99 % of the rejected requests were rejected within {_latency(p99_ms)}."
    return KeyChart(PlotName.KEY_REFUSALS, "Time to a refusal", finding)


def _third(run: Run, phase: PhaseRounds) -> list[KeyChart]:
    """The chart of what else decides the verdict: memory, the queue, or latency at other rates."""
    typical = shown_results(run)[0]
    memory = [second.rss_mib for second in typical.timeline if second.rss_mib is not None]
    if memory and any(verdict.measure == _MEMORY_MEASURE for verdict in run.verdicts):
        finding = f"Server memory was {number(memory[0])} MiB at first and {number(memory[-1])} MiB at the end."
        return [KeyChart(PlotName.KEY_MEMORY, "Server memory", finding)]
    if phase.total(lambda summary: summary.refused) or rate_varies(typical):
        return [_queue_chart(run)]
    if has_a_curve(offered_points(run, Side.TARGET)):
        return [_curve_chart(run)]
    has_latency = any(result.all.latency.count for result in phase.rounds)
    return [_percentile_chart(phase)] if has_latency else []


def _latency_chart(run: Run, phase: PhaseRounds) -> KeyChart:
    seconds = [second.p99_ms for second in shown_results(run)[0].timeline if second.p99_ms > 0]
    late = sum(ms > run.slo_p99_ms for ms in seconds)
    slo = f"the SLO of {plain_number(run.slo_p99_ms)} ms"
    kept = f"stayed within {slo}" if not late else f"was above {slo}"
    where = f"in every one of {len(seconds)} seconds" if not late else f"in {late} of {len(seconds)} seconds"
    return KeyChart(PlotName.KEY_LATENCY, "Latency over time", f"p99 {kept} {where}.{_round_note(run, phase)}")


def _rate_chart(run: Run, phase: PhaseRounds) -> KeyChart:
    words, first = wrong_words(phase), phase.first
    answered = f"{plain_number(phase.spread(lambda result: result.ok_per_s).median)}/s were answered"
    if first.is_open_loop:
        offered = plain_number(phase.spread(lambda result: result.offered_per_s).median)
        answered = f"Of {offered}/s offered, {answered}"
    wrong = f"{join(words)}" if words else "none was refused or failed"
    return KeyChart(PlotName.KEY_RATES, "Requests over time", sentence(f"{answered}; {wrong}"))


def _queue_chart(run: Run) -> KeyChart:
    results = shown_results(run)
    highest = max((second.in_flight for result in results for second in result.timeline), default=0)
    ended = results[-1].timeline[-1].in_flight if results[-1].timeline else 0
    finding = f"At most {count(highest)} requests were in flight at once, and {count(ended)} in the last second."
    return KeyChart(PlotName.KEY_QUEUE, "Requests in flight", finding)


def _curve_chart(run: Run) -> KeyChart:
    return KeyChart(PlotName.KEY_CURVE, "Latency against rate", knee_sentence(run, offered_points(run, Side.TARGET)))


def _answered_chart(run: Run) -> KeyChart:
    points = [point for point in offered_points(run, Side.TARGET) if point.is_usable]
    most = max((point.ok_per_s for point in points), default=0.0)
    return KeyChart(PlotName.KEY_ANSWERED, "Answered against offered", f"At most {plain_number(most)}/s were answered.")


def _percentile_chart(phase: PhaseRounds) -> KeyChart:
    typical = sorted((result for result in phase.rounds if result.all.latency.count), key=_p99)[0].all.latency
    finding = f"Half of the answers came within {_latency(typical.p50)}, 99.9 % within {_latency(typical.p999)}."
    return KeyChart(PlotName.KEY_PERCENTILES, "Latency percentiles", finding)


def _reload_charts(run: Run) -> tuple[KeyChart, ...]:
    if not run.reloads:
        return ()
    loads = [reload.load_ms for reload in run.reloads]
    firsts, seconds = ([getattr(one, name) for one in run.reloads] for name in ("first_answer_ms", "second_answer_ms"))
    return (
        KeyChart(PlotName.KEY_LOADS, "Time to load", f"The slowest of {len(loads)} loads took {_latency(max(loads))}."),
        KeyChart(
            PlotName.KEY_FIRST_ANSWERS,
            "First answers",
            f"The first answer took {_latency(statistics.median(firsts))}, the second"
            f" {_latency(statistics.median(seconds))} (medians).",
        ),
    )


def _round_note(run: Run, phase: PhaseRounds) -> str:
    """Which of several rounds is shown."""
    return f" Shown: round {shown_results(run)[0].round} of {run.rounds}, the median p99." if phase.rounds[1:] else ""
