"""What a terminal shows of a run: the table while it goes, and verdict and figures when it has ended."""

import math
from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock_load.report.document import NOTHING, Tone, count, number, one_line, percent, plain_number
from penstock_load.report.figures import TONES, folded_text, goal_text, phase_name, split_verdicts
from penstock_load.report.rounds import PhaseRounds, phase_rounds
from penstock_load.results import LiveView, PhaseResult, Run, Side, Verdict

BAR_CHARACTERS, SPARKS = 32, 40
_STYLES = {Tone.PLAIN: "", Tone.GOOD: "bold green", Tone.BAD: "bold red", Tone.QUIET: "dim"}
_BLOCKS = "▁▂▃▄▅▆▇█"
_PHASE_CHARACTERS = 28
_MAX_TEXT_WIDTH = 40
_FIRST_SECONDS = 2  # a rate is of whole seconds, so that the first has none


def verdict_table(verdicts: Iterable[Verdict]) -> Table:
    """A row a target, those that failed first; fits 80 columns. Its sentence holds the figure and the target.

    Targets of other hardware are only counted.
    """
    table = _table("Verdict")
    table.add_column("state", no_wrap=True)
    table.add_column("what", overflow="fold", max_width=_MAX_TEXT_WIDTH, ratio=2)
    table.add_column("why", overflow="fold", ratio=3)
    shown, folded = split_verdicts(verdicts)
    if folded:
        table.caption, table.caption_justify = f"not shown: {folded_text(len(folded))}", "left"
    for verdict in shown:
        what = _beneath(one_line(verdict.title), one_line(verdict.target_id))
        why = _beneath(one_line(verdict.why), goal_text(verdict))
        table.add_row(Text(verdict.state.value.upper(), style=_STYLES[TONES[verdict.state]]), what, why)
    return table


def figures_table(run: Run) -> Table:
    """A row a phase and side: rates, latencies, what went wrong; fits 80 columns. Medians of the rounds."""
    table = _table("Phases: medians of the rounds, latency in ms")
    table.add_column("phase", overflow="fold", max_width=_PHASE_CHARACTERS)
    for word in ("offered/s", "ok/s", "in SLO", "p50", "p90", "p99", "max", "wrong"):
        table.add_column(word, justify="right", no_wrap=True)
    for phase in phase_rounds(run):
        table.add_row(*_figures(phase, run.slo_p99_ms))
    return table


def live_table(view: LiveView) -> RenderableType:
    """The phase that runs, in about eight lines of at most 80 columns."""
    lines = [_where(view), _progress(view), _rates(view), _latencies(view), _sparkline(view), _counts(view)]
    lines.append(Text.assemble(("generator ", "dim"), f"lag {plain_number(view.generator_lag_ms)} ms"))
    if view.complaint:
        lines.append(Text(one_line(view.complaint), style="bold red"))
    for line in lines:
        line.no_wrap = True
        line.overflow = "ellipsis"
    return Group(*lines)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")


def _beneath(text: str, detail: str) -> Text:
    label = Text(text)
    return label.append(f"\n{detail}", style="dim") if detail else label


def _figures(phase: PhaseRounds, slo_p99_ms: float) -> tuple[Text, ...]:
    intended, good = phase.total(lambda all_: all_.intended), phase.total(lambda all_: all_.good)
    wrong = intended - phase.total(lambda all_: all_.ok)
    is_open = phase.first.is_open_loop
    p99 = phase.waited_spread(lambda result: result.all.latency.p99)
    is_late = is_open and p99 is not None and p99.median > slo_p99_ms
    return (
        Text(phase_name(phase), style="bold" if phase.first.is_judged else ""),
        Text(_rate(phase, lambda result: result.offered_per_s) if is_open else NOTHING),
        Text(_rate(phase, lambda result: result.ok_per_s)),
        Text(percent(good / intended) if intended else NOTHING),
        _latency(phase, lambda result: result.all.latency.p50),
        _latency(phase, lambda result: result.all.latency.p90),
        _latency(phase, lambda result: result.all.latency.p99, style=_STYLES[Tone.BAD] if is_late else ""),
        _latency(phase, lambda result: result.all.latency.highest),
        Text(count(wrong), style=_STYLES[Tone.BAD] if wrong else ""),
    )


def _rate(phase: PhaseRounds, figure: Callable[[PhaseResult], float]) -> str:
    return number(phase.spread(figure).median)


def _latency(phase: PhaseRounds, figure: Callable[[PhaseResult], float], *, style: str = "") -> Text:
    spread = phase.waited_spread(figure)
    return Text(number(spread.median) if spread else NOTHING, style=style)


def _where(view: LiveView) -> Text:
    side = "" if view.side is Side.TARGET else " · beside"
    round_ = f" · round {view.round} of {view.rounds}" if view.rounds > 1 else ""
    name = one_line(view.phase, at_most=_PHASE_CHARACTERS)
    return Text.assemble((name, "bold"), f"{side}   phase {view.phase_number} of {view.phase_count}{round_}")


def _progress(view: LiveView) -> Text:
    if view.seconds <= 0:
        return Text(f"{_seconds(view.elapsed_s)} s so far")
    share = min(1.0, max(0.0, view.elapsed_s / view.seconds))
    done = round(share * BAR_CHARACTERS)
    progress = f"  {_seconds(min(view.elapsed_s, view.seconds))} of {_seconds(view.seconds)} s"
    return Text.assemble(("━" * done, "cyan"), ("─" * (BAR_CHARACTERS - done), "dim"), progress)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}"


def _rates(view: LiveView) -> Text:
    is_over = view.elapsed_s >= view.seconds > 0
    waiting = "all sent" if is_over else "open loop"
    offered = f"offered {number(view.offered_per_s)}/s" if view.offered_per_s else waiting
    if not view.is_open_loop:
        offered = "closed loop"
    is_known = view.rate_per_s or not view.ok or view.elapsed_s >= _FIRST_SECONDS
    rates = f"{offered:<22}answered {f'{number(view.rate_per_s)}/s' if is_known else NOTHING}"
    return Text(f"{rates:<44}in flight {count(view.in_flight)}")


def _latencies(view: LiveView) -> Text:
    if view.p50_ms is None or view.p99_ms is None:
        return Text("no answer yet", style="dim")
    is_late = view.p99_ms > view.slo_p99_ms
    p50, p99 = f"p50 {number(view.p50_ms)} ms", f"p99 {number(view.p99_ms)} ms"
    slo = f"SLO {plain_number(view.slo_p99_ms)} ms{': broken' if is_late else ''}"
    return Text.assemble(f"{p50:<22}", (f"{p99:<22}", _STYLES[Tone.BAD if is_late else Tone.GOOD]), (slo, "dim"))


def _sparkline(view: LiveView) -> Text:
    """The last p99s, as tall as they are long; red above the SLO."""
    recent = view.recent[-SPARKS:]
    line = Text("p99 ", style="dim")
    for ms, block in zip(recent, sparks(recent), strict=True):
        line.append(block, style="red" if ms > view.slo_p99_ms else "green")
    return line


def sparks(values: Sequence[float]) -> str:
    """A block a value, the highest the tallest; a blank for NaN."""
    highest = max((value for value in values if math.isfinite(value)), default=0.0)
    return "".join(_block(value, highest) for value in values)


def _block(value: float, highest: float) -> str:
    if math.isnan(value):
        return " "
    if highest <= 0:
        return _BLOCKS[0]
    return _BLOCKS[max(0, min(len(_BLOCKS) - 1, math.ceil(len(_BLOCKS) * min(value / highest, 1.0)) - 1))]


def _counts(view: LiveView) -> Text:
    line = Text(f"ended {count(view.sent)}  ok {count(view.ok)}")
    for word, amount in (("refused", view.refused), ("failed", view.failed), ("timed out", view.timeouts)):
        line.append(f"  {word} {count(amount)}", style=_STYLES[Tone.BAD] if amount else "dim")
    return line
