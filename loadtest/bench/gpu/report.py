"""The GPU bench's report from its file alone: `python -m loadtest.bench.gpu.report gpu.json`, on any machine.

Writes report.md and plots beside it. Every figure is the median over the rounds, the lowest and the highest behind it.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench.gpu.chart import CALLERS_FACT, THREADS
from loadtest.bench.gpu.figures import PointRow, faults_of, group_of, limit_text, ratios_of, rows_of, runs_of
from loadtest.bench.gpu.plots import MODES, WAYS, write_plots
from loadtest.bench.report import markdown_table, spread, spread_range, verdict_rows
from penstock_load.committed import Committed, ResultsError, read_bench
from penstock_load.report.document import percent, plain_number
from penstock_load.targets import read_targets

NO_GPU = "**No GPU, no MPS: a trial of the bench.** "
PART_OF_PLOT = {"chart.png": "chart", "activity.png": "chart", "served.png": "served", "jpeg.png": "jpeg"}


class Conditions:
    """What stands in the file."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.conditions: dict[str, str] = content["conditions"]
        self.facts: dict[str, Any] = content["facts"]
        self.runs = runs_of(content)
        self.faults = faults_of(content)
        self.rows = rows_of(self.runs)
        self.models = "Models " + ", ".join(dict.fromkeys(row.model for row in self.rows))

    @property
    def cores(self) -> int:
        """Cores of the machine; 0 if unknown."""
        found = re.search(r"(\d+) cores", self.conditions.get("machine", ""))
        return int(found[1]) if found else 0

    @property
    def has_gpu(self) -> bool:
        """Whether a card was measured."""
        return not self.conditions.get("gpu versions", "").startswith("no driver")

    @property
    def slo_ms(self) -> float:
        """That the pictures were held to."""
        return float(self.conditions.get("slo_p99_ms", 15))

    def of(self, *parts: str) -> list[PointRow]:
        """The rows of these parts."""
        return [row for row in self.rows if row.part in parts]


def report_text(bench: Conditions, judged: Committed | None, plots: Sequence[str]) -> str:
    """The page as Markdown. judged: by targets.toml; None if no target is about this file."""
    pictures = {part: [name for name in plots if PART_OF_PLOT[name] == part] for part in PART_OF_PLOT.values()}
    sections = [
        _head(bench),
        _verdicts(bench, judged),
        *(_with_plots(text, pictures[part]) for part, text in (
            ("chart", "\n".join(filter(None, (_chart(bench), _whole(bench))))),
            ("served", _served(bench)), ("jpeg", _jpeg(bench)),
        )),
        _faults(bench),
        _facts(bench),
    ]  # fmt: skip
    return "\n".join(section for section in sections if section)


def _with_plots(text: str, names: Iterable[str]) -> str:
    return text and "\n".join([text, *(f"![{name.removesuffix('.png')}]({name})\n" for name in names)])


def _head(bench: Conditions) -> str:
    conditions = bench.conditions
    lines = [
        "# One GPU, many processes: MPS, batching, JPEG, faults",
        "",
        f"{conditions['machine']}. {conditions.get('at', '')}. {bench.models}; `-random` in a name: the weights are, "
        f"the arithmetic is the network's. {'' if bench.has_gpu else NO_GPU}The load generator ran on the same cores. "
        "Every figure is the median over the "
        "rounds, whose runs are interleaved in an order drawn anew (lowest to highest).",
        "",
        f"    {conditions['command']}",
        "",
        f"{conditions['versions']}. {conditions.get('gpu versions', '')}".strip(),
        "",
    ]
    return "\n".join(lines)


def _verdicts(bench: Conditions, judged: Committed | None) -> str:
    words = {ratio.measure: ratio.of for ratio in ratios_of(bench.runs)}
    rows = [(*row, words.get(measure, "")) for *row, measure in verdict_rows(judged)]
    return markdown_table("What it was held to", ("target", "measured", "floor / goal", "verdict", "of"), rows)


def _chart(bench: Conditions) -> str:
    rows = {(str(row.key["mode"]), int(row.key["clients"])): row for row in bench.of("chart")}
    if not rows:
        return ""
    modes = [mode for mode in MODES if any(mode == found for found, _ in rows)]
    clients = sorted({count for _, count in rows})
    rates = [(count, *(_figure(rows.get((mode, count)), "rate") for mode in modes)) for count in clients]
    names = [MODES[mode][0] for mode in modes]
    text = markdown_table("The chart of 2017 again: images/s, one image a request", ("clients", *names), rates)
    busy = [
        (f"{MODES[mode][0]}, {count}", _share(row, "util"), _share(row, "sm_activity"), _share(row, "sm_occupancy"),
         _share(row, "tensor_activity"), _share(row, "memory_bandwidth_activity"), _middle(row, "machine_cores"),
         _middle(row, "p50_ms"), _middle(row, "p99_ms"), _middle(row, "batch_size"))
        for mode in modes for count in clients if (row := rows.get((mode, count)))
    ]  # fmt: skip
    head = ("mode, clients", "util", "SM", "occupancy", "tensor", "memory", "cores", "p50 ms", "p99 ms", "batch")
    text += "\n" + markdown_table("", head, busy)
    limits = [
        f"* {MODES[mode][0]}, {clients[-1]} clients: {limit_text(rows[mode, clients[-1]], bench.cores)}"
        for mode in modes
        if (mode, clients[-1]) in rows
    ]
    return "\n".join([text, _how(bench), "", "What limits each mode at the most clients:", "", *limits, ""])


def _how(bench: Conditions) -> str:
    callers = bench.facts.get(f"chart, {CALLERS_FACT}", 1)
    said = (
        "A bare Triton without the gateway, asked over HTTP with the image in system shared memory; "
        f"{callers} caller(s) a client. util is nvidia-smi's; SM, occupancy, tensor, memory: "
        "NVML's GPM over the run; cores: busy of the machine's. **SM activity says that an SM holds work, not how "
        "much**: occupancy and tensor activity stand beside it."
    )
    if (threads := bench.facts.get(THREADS)) and bench.has_gpu:
        said += (
            f" MPS: a client may use {threads} % of the card's threads, the instances of MPS + batching all; batching "
            "is Triton's own, over a few instances of one model (`--instances`)."
        )
    return said


def _whole(bench: Conditions) -> str:
    """What MPS does where each client may use the whole card, and what batching makes of it."""
    rows = {(str(row.key["mode"]), int(row.key["clients"])): row for row in bench.of("whole")}
    counts = sorted({count for mode, count in rows if mode != "none"})
    pairs = [(count, (rows.get(("none", count)), rows.get(("mps-whole", count)))) for count in counts]
    whole_rows = [
        (count, *(_figure(row, "rate") for row in pair), *(_share(row, "sm_activity") if row else "" for row in pair))
        for count, pair in pairs
    ]
    head = ("clients", "no MPS", MODES["mps-whole"][0], "SM, no MPS", "SM, MPS")
    text = markdown_table("MPS alone, without a limit of threads: images/s", head, whole_rows)
    ratios = [ratio for ratio in ratios_of(bench.runs) if ratio.measure.endswith("_over_whole_mps") and ratio.values]
    return (
        "\n".join([text, *(f"* {ratio.of}: {spread_range(spread(ratio.values))}" for ratio in ratios), ""])
        if text
        else ""
    )


def _served(bench: Conditions) -> str:
    found = bench.of("raw", "served")
    rows = [
        (row.part, *(row.key[name] for name in ("processes", "batch", "memory")), _figure(row, "rate"),
         _share(row, "sm_activity"), _share(row, "tensor_activity"), _middle(row, "machine_cores"))
        for row in sorted(found, key=lambda row: (row.part, -row.figures["rate"].median))
    ]  # fmt: skip
    head = ("", "processes", "batch", "memory", "images/s", "SM", "tensor", "cores")
    how = (
        "A bare Triton, asked over HTTP; the tensors lie in CUDA's shared memory or in the system's, from where each "
        "is copied twice. Raw: the same program, two batches in flight, without a client.\n"
    )
    text = markdown_table("The program served, and the same program raw, under MPS", head, rows)
    return text and f"{text}\n{how}"


def _jpeg(bench: Conditions) -> str:
    rows = [
        (WAYS.get(str(row.key["decoded_by"]), ("?",))[0], row.rounds, _figure(row, "capacity_per_s"),
         _figure(row, "held_per_s"),
         _middle(row, "p50_ms"), _middle(row, "p99_ms"),
         *(_middle(row, f"{kind}_cores") for kind in ("gateway", "model", "triton", "generator", "machine")),
         _share(row, "sm_activity"))
        for row in bench.of("jpeg")
    ]  # fmt: skip
    head = (
        *("decoded by", "rounds", "closed loop/s", f"held/s at p99 {bench.slo_ms:g} ms", "p50 ms", "p99 ms"),
        *("gateway cores", "instances", "Triton", "generator", "machine", "SM"),
    )
    how = (
        "Through `penstock up`: JPEG in, the five best classes out. Held: the highest rate that was kept, where each "
        "was tried once more if it was missed; p50 and p99 are those at it.\n"
    )
    text = markdown_table("JPEG over HTTP, answered by classes", head, rows)
    return text and f"{text}\n{how}"


def _faults(bench: Conditions) -> str:
    rows = [
        (one["fault"], _who(one), _seconds(one["recovery_s"]), _others_silence(one),
         "; ".join(f"{count} × {said}" for said, count in sorted(one["said"].items(), key=lambda it: -it[1])[:3]),
         one["note"])
        for one in bench.faults
    ]  # fmt: skip
    head = (
        "fault",
        "callers that failed",
        "until all are served again",
        "the others' longest silence",
        "what their clients received",
        "note",
    )
    return markdown_table("When one process ends", head, rows)


def _who(fault: Mapping[str, Any]) -> str:
    failed, victim = fault["failed"], fault["victim"]
    others = {name: count for name, count in failed.items() if name != victim}
    own = f"its own ({failed[victim]} requests); " if victim in failed else ""
    return f"{own}{len(others)} of {len(fault['silent_s']) - bool(victim)} others ({sum(others.values())} requests)"


def _others_silence(fault: Mapping[str, Any]) -> str:
    silent = {name: seconds for name, seconds in fault["silent_s"].items() if name != fault["victim"]}
    if not silent:
        return ""
    name = max(silent, key=lambda other: silent[other])
    return f"{silent[name]:.2f} s, from {fault.get('silent_from_s', {}).get(name, 0.0):.2f} s on"


def _seconds(value: float | None) -> str:
    return "not within the watch" if value is None else f"{value:.2f} s"


def _facts(bench: Conditions) -> str:
    lines = [f"* {name}: {value}" for name, value in bench.facts.items() if name != "failures"]
    rounds: dict[str, int] = {}
    for run in bench.runs:
        rounds[group_of(run.part)] = max(rounds.get(group_of(run.part), 0), run.round)
    most = max(rounds.values(), default=0)
    lines += [f"* **{part} was cut**: {count} of {most} rounds" for part, count in rounds.items() if count < most]
    failures = [f"* **not measured**: {' '.join(str(failure).split())}" for failure in bench.facts.get("failures", [])]
    return "\n".join(["## How it went", "", *lines, *failures, ""])


def _figure(row: PointRow | None, name: str) -> str:
    return spread_range(row.figures[name]) if row and name in row.figures else ""


def _middle(row: PointRow, name: str) -> str:
    return plain_number(row.figures[name].median) if name in row.figures else ""


def _share(row: PointRow, name: str) -> str:
    return percent(row.figures[name].median) if name in row.figures else ""


def write_report(path: Path) -> Iterator[Path]:
    """Writes beside the file; what was written. Raises OSError, ResultsError, for another file KeyError, ValueError."""
    bench = Conditions(json.loads(path.read_text()))
    plots = write_plots(path.parent, bench.rows, bench.runs, bench.slo_ms, int(bench.facts.get(THREADS, 0)))
    judged = read_bench(path, read_targets())
    page = path.with_name("report.md")
    page.write_text(report_text(bench, judged, plots))
    yield page
    yield from (path.parent / name for name in plots)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: written. 1: the file is none of the bench's."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu.report", description=__doc__)
    parser.add_argument("file", type=Path, help="what python -m loadtest.bench.gpu wrote")
    options = parser.parse_args(arguments)
    try:
        print("\n".join(map(str, write_report(options.file))))
    except (OSError, ResultsError, KeyError, TypeError, ValueError) as error:
        print(f"report: {options.file} is no file of the GPU bench: {error!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
