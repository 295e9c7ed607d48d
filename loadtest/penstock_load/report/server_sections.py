"""What the server says of itself: batches, stages, its load, and reloads of a model."""

import statistics
from collections.abc import Callable, Sequence

from penstock_load.report.document import (
    NOTHING,
    Absence,
    Cell,
    PlotName,
    Section,
    Table,
    count,
    drop_columns,
    number,
    one_line,
    percent,
)
from penstock_load.report.figures import neighbours, phase_name, spread_cell
from penstock_load.report.rounds import PhaseRounds, drawn_phases, phase_rounds, split_phases, spread_of
from penstock_load.results import Reload, Run, Second, Side

GPU_SHARE = (
    "GPU is NVML's utilisation: the share of time in which at least one kernel ran, however few of the GPU's cores it"
    " used. At 100 % most of the GPU may still be idle; "
)
SM_ACTIVITY_KNOWN = "SM activity beside it is the share of its SMs that had work."
SM_ACTIVITY_UNKNOWN = (
    "SM activity would be the better figure, but this GPU does not report it, or this user may not read it."
)
_STAGE_TEXTS = {
    "infer": "“infer” is the whole wait for the engine, with the engine's own queue where that is not shown beside it",
    "server": "“server” is the server's time outside its named stages",
    "other": "“other” is the client's service time less the server's: network, client, and, where requests timed out,"
    " the waiting for them",
}


def batch_section(run: Run) -> Section | Absence:
    """How many rows ran together."""
    phases = [phase for phase in drawn_phases(run) if phase.batch_sizes()]
    if not phases:
        return Absence("Batch sizes", "Neither the answers nor the server's statistics say in which batch they ran.")
    by_answers = all(phase.says_batch_sizes() for phase in phases)
    source = "each answer's own word" if by_answers else "the server's statistics, a count a batch"
    return Section(
        "batches",
        "Batch sizes",
        plot=PlotName.BATCHES,
        how_to_read="How many rows the model got at once: bars to the right mean that requests shared the engine's"
        " time, bars at 1 that each went alone.",
        tables=(_batches(phases),),
        remarks=(f"By {source}.",),
    )


def stage_section(run: Run) -> Section | Absence:
    """Where the time of a request goes."""
    split = split_phases(run)
    if not split:
        return Absence("Stages", "The server tells no timings of its own, so its time cannot be split.")
    words = [_STAGE_TEXTS[name] for name in split[0][1] if name in _STAGE_TEXTS]
    return Section(
        "stages",
        "Where the time goes",
        plot=PlotName.STAGES,
        how_to_read="Each bar is the mean answer of a phase, from the moment it was sent; the widest part is what to"
        " mend first. A queue that grows with the rate is work that waits for the engine.",
        tables=(_stages(split),),
        remarks=(f"By the server's own timings; {'; '.join(words)}.",) if words else (),
    )


def load_section(run: Run) -> Section | Absence:
    """CPU, GPU and memory."""
    readings: dict[str, Callable[[Second], float | None]] = {
        "server CPU": lambda second: second.server_cpu,
        "machine CPU": lambda second: second.machine_cpu,
        "GPU": lambda second: second.gpu,
        "memory": lambda second: second.rss_mib,
    }
    missing = [name for name, pick in readings.items() if not _is_read(run, pick)]
    if len(missing) == len(readings):
        return Absence("CPU and GPU load", "The load of the server's machine could not be read.")
    remarks = [f"Not read: {', '.join(missing)}."] if missing else []
    others = neighbours(run)
    return Section(
        "load",
        "CPU and GPU load",
        sentences=(*([_gpu_text(run)] if "GPU" not in missing else []), *([f"{others}."] if others else [])),
        plot=PlotName.LOAD,
        how_to_read="Server CPU is how many cores the server's processes kept busy; the machine's share counts every"
        " process, the load generator too where it shares the machine. A machine near 100 % is the limit, whatever"
        " fills it. Memory is each process's resident set, so what they share counts in each; where it climbs at the"
        " same load and never falls, it is a leak.",
        tables=(_loads(run),),
        remarks=tuple(remarks),
    )


def _gpu_text(run: Run) -> str:
    is_known = _is_read(run, lambda second: second.gpu_sm)
    return GPU_SHARE + (SM_ACTIVITY_KNOWN if is_known else SM_ACTIVITY_UNKNOWN)


def reload_section(run: Run) -> Section | None:
    """How long a model takes to load and to answer first."""
    if not run.reloads:
        return None
    groups = dict.fromkeys((reload.model, reload.side) for reload in run.reloads)
    rows = tuple(_reloads(run, model, side) for model, side in groups)
    head = ("model", "reloads", "load ms", "first answer ms", "second answer ms")
    return Section(
        "reloads",
        "Reloads",
        sentences=("The model was unloaded and loaded again; the second answer shows what the first one paid.",),
        tables=(Table(head, rows), _each_reload(run)),
    )


def _batches(phases: list[PhaseRounds]) -> Table:
    rows = []
    for phase in phases:
        sizes = phase.batch_sizes()
        total = sum(amount for _, amount in sizes)
        alone = sum(amount for size, amount in sizes if size == 1)
        largest = max(size for size, _ in sizes)
        rows.append(
            (
                Cell(phase_name(phase)),
                *map(Cell, (number(phase.rows_a_batch()), count(largest), percent(alone / total))),
            )
        )
    return Table(("phase", "rows a batch", "largest", "alone"), tuple(rows))


def _stages(split: Sequence[tuple[PhaseRounds, dict[str, float]]]) -> Table:
    rows = tuple(
        (Cell(phase_name(phase)), *(Cell(number(ms)) for ms in (*stages.values(), sum(stages.values()))))
        for phase, stages in split
    )
    return Table(("phase", *map(one_line, split[0][1]), "sum"), rows, caption="Mean milliseconds of an answer")


def _is_read(run: Run, pick: Callable[[Second], float | None]) -> bool:
    return any(pick(second) is not None for result in run.phases for second in result.timeline)


def _loads(run: Run) -> Table:
    head = (
        *("phase", "server CPU, cores", "machine CPU", "GPU", "SM activity"),
        *("memory MiB, mean", "memory MiB, highest"),
    )
    rows = tuple(_load(phase) for phase in phase_rounds(run))
    return drop_columns(Table(head, rows), NOTHING)


def _load(phase: PhaseRounds) -> tuple[Cell, ...]:
    seconds = [second for result in phase.rounds for second in result.timeline]

    def values(pick: Callable[[Second], float | None]) -> list[float]:
        return [value for second in seconds if (value := pick(second)) is not None]

    def mean(pick: Callable[[Second], float | None], word: Callable[[float], str]) -> Cell:
        read = values(pick)
        return Cell(word(statistics.fmean(read)) if read else NOTHING)

    memory = values(lambda second: second.rss_mib)
    return (
        Cell(phase_name(phase)),
        mean(lambda second: second.server_cpu, number),
        mean(lambda second: second.machine_cpu, percent),
        mean(lambda second: second.gpu, percent),
        mean(lambda second: second.gpu_sm, percent),
        mean(lambda second: second.rss_mib, number),
        Cell(number(max(memory)) if memory else NOTHING),
    )


def _reloads(run: Run, model: str, side: Side) -> tuple[Cell, ...]:
    found = [reload for reload in run.reloads if (reload.model, reload.side) == (model, side)]
    name = one_line(model) if side is Side.TARGET else f"{one_line(model)} · beside"

    def cell(figure: Callable[[Reload], float]) -> Cell:
        return spread_cell(spread_of([figure(reload) for reload in found]), is_single=len(found) < 2)

    return (
        Cell(name),
        Cell(count(len(found))),
        cell(lambda reload: reload.load_ms),
        cell(lambda reload: reload.first_answer_ms),
        cell(lambda reload: reload.second_answer_ms),
    )


def _each_reload(run: Run) -> Table:
    rows = tuple(
        (
            Cell(one_line(reload.model)),
            Cell(str(reload.round)),
            *map(Cell, map(number, (reload.load_ms, reload.first_answer_ms, reload.second_answer_ms))),
        )
        for reload in run.reloads
    )
    return Table(("model", "round", "load ms", "first answer ms", "second answer ms"), rows, caption="Each reload")
