"""The GPU bench's report from its file alone: `python -m loadtest.bench.gpu.report gpu.json`, on any machine.

Writes report.md beside it, NAME.md beside another NAME.json. Every figure is the median over the rounds (lowest to
highest).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench.gpu.figures import PointRow, group_of, rows_of, runs_of
from loadtest.bench.report import markdown_table, spread_range, verdict_rows
from penstock_load.committed import Committed, ResultsError, read_bench
from penstock_load.report.document import percent
from penstock_load.targets import read_targets

TITLES = {
    "chart": "The chart of 2017 again: images/s, one image a request to a bare Triton",
    "plain-chart": "The same without cuDNN's fused calls",
    "raw": "The program without a server",
    "served": "The same program served by a bare Triton",
    "jpeg": "JPEG over HTTP through `penstock up`, answered by classes",
    "image": "/image of a gateway with the embedded engine: one ONNX model on the GPU, and on the CPU with an instance "
    "a core",
    "agreement": "Answers compared with the CPU's in FP32: boxes of one class by IoU (borderline: a box within the "
    "border of the threshold may be missing; switched: NMS may keep either of two boxes whose scores on the CPU are a "
    "tie), top classes without ties",
}
_SHARES = ("util", "kernel_running", "in_time")


def report_text(content: Mapping[str, Any], judged: Committed | None) -> str:
    """The page as Markdown. judged: by targets.toml; None if no target is about this file."""
    conditions, runs = content["conditions"], runs_of(content)
    rows = rows_of(runs)
    models = ", ".join(dict.fromkeys(row.model for row in rows))
    trial = "**No GPU, no MPS: a trial of the bench.** " if conditions["gpu versions"].startswith("no driver") else ""
    head = [
        f"# {'ONNX models on a GPU' if _is_onnx(rows) else 'One GPU, many processes: MPS, batching, JPEG'}", "",
        f"{conditions['machine']}. {conditions.get('at', '')}. Models {models}; `-random` in a name: the weights are, "
        f"the arithmetic is the network's. {trial}The load generator ran on the same cores. Figures are medians over "
        "interleaved rounds (lowest to highest). SM activity says that an SM holds work, not how much: occupancy and "
        "tensor activity stand beside it.", "",
        f"    {conditions['command']}", "",
        f"{conditions['versions']}. {conditions.get('gpu versions', '')}", "",
    ]  # fmt: skip
    of = {row["measure"]: row["of"] for row in content["results"] if row["kind"] == "ratio"}
    verdicts = [(*row, of.get(measure, "")) for *row, measure in verdict_rows(judged)]
    sections = [
        "\n".join(head),
        markdown_table("Targets", ("target", "measured", "floor / goal", "verdict", "of"), verdicts),
        *(part_table(title, [row for row in rows if row.part == part]) for part, title in TITLES.items()),
    ]
    rounds: dict[str, int] = {}
    for run in runs:
        rounds[group_of(run)] = max(rounds.get(group_of(run), 0), run.round)
    most = max(rounds.values(), default=0)
    facts = [f"* {name}: {value}" for name, value in content["facts"].items() if name != "failures"]
    facts += [f"* **{part} was cut**: {count} of {most} rounds" for part, count in rounds.items() if count < most]
    facts += [f"* **not measured**: {' '.join(str(why).split())}" for why in content["facts"].get("failures", [])]
    return "\n".join([*filter(None, sections), "## Facts", "", *facts, ""])


def _is_onnx(rows: Sequence[PointRow]) -> bool:
    return bool(rows) and all(row.part in ("image", "agreement") for row in rows)


def part_table(title: str, rows: Sequence[PointRow]) -> str:
    """A line a point, by its key, with every figure that a row of the part has."""
    rows = sorted(rows, key=lambda row: [f"{value:>6}" for value in row.key.values()])
    keys = list(dict.fromkeys(name for row in rows for name in row.key))
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    cells = [[*(row.key.get(key, "") for key in keys), *(_cell(row, name) for name in names)] for row in rows]
    return markdown_table(title, [name.replace("_", " ") for name in (*keys, *names)], cells)


def _cell(row: PointRow, name: str) -> str:
    if name not in row.figures:
        return ""
    is_share = name.endswith("_activity") or name in ("sm_occupancy", *_SHARES)
    return percent(row.figures[name].median) if is_share else spread_range(row.figures[name])


def main(arguments: Sequence[str] | None = None) -> int:
    """0: written. 1: the file is none of the bench's."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu.report", description=__doc__)
    parser.add_argument("file", type=Path, help="what python -m loadtest.bench.gpu wrote")
    path = parser.parse_args(arguments).file
    page = path.with_name("report.md" if path.stem == "gpu" else f"{path.stem}.md")
    try:
        page.write_text(report_text(json.loads(path.read_text()), read_bench(path, read_targets())))
    except (OSError, ResultsError, KeyError, TypeError, ValueError) as error:
        print(f"report: {path} is no file of the GPU bench: {error!r}", file=sys.stderr)
        return 1
    print(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
