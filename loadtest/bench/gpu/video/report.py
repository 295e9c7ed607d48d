"""The report of video on a GPU, from the pieces of a run: gpu-video.md and gpu-video.json.

    python -m loadtest.bench.gpu.video.report gpu-video --into loadtest/results/gpu-h200

A file notes.md in the folder is put at the end of the page.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench.gpu.video.clips import CAMERAS, FPS
from loadtest.bench.gpu.video.pieces import LOADS, PARTS, Body, Folder
from loadtest.bench.report import BenchSpread, markdown_table, ratio_row, spread, spread_range, verdict_rows
from penstock_load.committed import Committed, ResultsError, read_bench
from penstock_load.report.document import percent, plain_number
from penstock_load.targets import read_targets

JSON_FILE, PAGE = "gpu-video.json", "gpu-video.md"
SHARE_OF = "h264-720p"  # the camera of nvdec_share
_SUSTAINED = (
    "**Held**: in a window, at most 0.1 % of the due frames were dropped, 99.5 to 100.5 % answered, no stream was more "
    "than three frames short, and 99 % of all streams' answers (95 % with a detector) came within {bound} ms of the "
    "frame's capture, by the programs' own histograms. Capture is when the clip's clock makes a frame's packet due. A "
    "number that was missed got a second window, if it was not far from being held. The number is searched to within "
    "2 %. Figures are medians over the rounds (lowest to highest)."
)


def report_text(bodies: Sequence[Body], judged: Committed | None, notes: str) -> str:
    """The page as Markdown."""
    run = bodies[-1]["conditions"]
    at = sorted({str(one["conditions"]["at"]) for one in bodies})
    models = dict.fromkeys(str(one["conditions"]["model"]) for one in bodies if one["part"] in LOADS)
    commands = dict.fromkeys(f"    {one['conditions']['command']}" for one in bodies)
    head = [
        "# Video on one GPU: decode, prepare, infer, track", "",
        f"{run['machine']}. {' to '.join(dict.fromkeys((at[0], at[-1])))}. "
        f"{run['gpu versions']}. {run['versions']}.", "",
        f"Model: {' and '.join(models)}; `-random`: its weights are, the arithmetic is the network's. "
        f"Video programs: {run['programs']}. The bench and the clips' reading share the cores.", "",
        _SUSTAINED.format(bound=run["slo_p99_ms"]), "", *commands, "",
    ]  # fmt: skip
    verdicts = [row[:4] for row in verdict_rows(judged)]
    sections = [
        "\n".join(head),
        markdown_table("Targets", ("target", "measured", "floor / goal", "verdict"), verdicts),
        _streams(bodies), _windows(bodies), _alone(bodies), _rounds(bodies), notes,
    ]  # fmt: skip
    return "\n".join(section for section in sections if section)


def of_part(bodies: Iterable[Body], part: str, camera: str) -> list[Body]:
    """Its pieces, by round."""
    return [one for one in bodies if (one["part"], one["camera"]) == (part, camera)]


def shares_of_alone(bodies: Sequence[Body], camera: str) -> list[float]:
    """Of each round that has both: frames of the sustained streams by what NVDEC alone decoded."""
    found = [one["found"] for one in of_part(bodies, "streams", camera)]
    return [float(one["held"]) * FPS / float(one["alone_per_s"]) for one in found if one.get("alone_per_s")]


def results_of(bodies: Sequence[Body]) -> list[dict[str, Any]]:
    """What stands under "results": the ratios of the targets, then every piece."""
    rows: list[dict[str, Any]] = []
    for part, load in LOADS.items():
        for name, camera in CAMERAS.items():
            found = of_part(bodies, part, name)
            held = [float(one["found"]["held"]) for one in found]
            of = f"{camera.words}, held in each round"
            rows += ratio_row(_model_of(found), load.measure or camera.measure, held, of) if found else []
    of = f"{CAMERAS[SHARE_OF].words}, by NVDEC alone in the same round"
    shares = shares_of_alone(bodies, SHARE_OF)
    rows += ratio_row(_model_of(of_part(bodies, "streams", SHARE_OF)), "nvdec_share", shares, of) if shares else []
    return rows + [{"kind": one["part"], "model": _model_of([one]), **one} for one in bodies]


def _model_of(bodies: Sequence[Body]) -> str:
    return str(bodies[0]["conditions"].get("model", "")).partition(" ")[0]


def _words(part: str, name: str) -> str:
    """Of a camera and what its frames go through."""
    rest = {"detector": ", YOLOX-S on every frame", "tracked": ", YOLOX-S on every third frame, tracked"}
    return CAMERAS[name].words + rest.get(part, "")


def _streams(bodies: Sequence[Body]) -> str:
    rows = []
    for part, name in ((part, name) for part in LOADS for name in CAMERAS):
        found = [one["found"] for one in of_part(bodies, part, name)]
        if found:
            alone = [one["alone_per_s"] / FPS for one in found if one.get("alone_per_s")]
            rows.append((
                _words(part, name), LOADS[part].goal or CAMERAS[name].goal, _span([one["held"] for one in found]),
                _span([one["missed"] for one in found if one["missed"]]),
                _span([one["full_at"] for one in found if one.get("full_at")]),
                _span(alone), _span(shares_of_alone(bodies, name), is_share=True) if part == "streams" else "",
            ))  # fmt: skip
    head = ("camera", "target", "held", "missed at", "no more decoders at", "NVDEC alone", "held by NVDEC alone")
    return markdown_table("Streams held", head, rows)


def _windows(bodies: Sequence[Body]) -> str:
    """What was busy in the last window of each search's highest sustained and lowest missed number."""
    rows = []
    for body in bodies:
        tries = [one for one in body["found"]["tries"] if body["part"] in LOADS and "card" in one]
        held = [one for one in tries if not one["complaint"]]
        missed = [one for one in tries if one["complaint"]]
        for one in (*sorted(held, key=_count)[-1:], *sorted(missed, key=_count)[:1]):
            card, interrupts, cores = one["card"], one.get("interrupts", {}), one["cores"]
            rows.append((
                f"{_words(body['part'], body['camera'])}, round {body['round']}", one["streams"],
                one["complaint"] or "held",
                *(plain_number(one.get(key, 0.0)) for key in ("rate", "p50_ms", "p95_ms", "p99_ms", "frames_a_batch")),
                percent(max(card.get("nvdec", 0.0), card.get("decoder_utilisation", 0.0))),
                percent(card.get("sm", 0.0)),
                plain_number(cores["machine"]),
                f"{percent(interrupts['busy'])} ({percent(interrupts['others_busy'])})" if interrupts else "",
                ", ".join(f"{kind} {ms:.2f}" for kind, ms in one["cpu_ms_a_frame"].items()),
            ))  # fmt: skip
    head = (
        *(
            "camera",
            "streams",
            "",
            "frames/s",
            "p50 ms",
            "p95 ms",
            "p99 ms",
            "frames a batch",
            "NVDEC",
            "SM",
            "cores busy",
        ),
        *("the core with the GPU's interrupts (the others)", "CPU ms a frame"),
    )
    return markdown_table("What was busy", head, rows)


def _count(tried: Mapping[str, Any]) -> int:
    return int(tried["streams"])


def _alone(bodies: Sequence[Body]) -> str:
    rows = []
    for name, camera in CAMERAS.items():
        pieces = of_part(bodies, "nvdec", name)
        if pieces:
            best = [one["found"]["best"] for one in pieces]
            nvdec = [one["card"].get("nvdec") or one["card"].get("decoder_utilisation") or 0.0 for one in best]
            rows.append((
                camera.words, _span([one["rate"] for one in best]), _span([one["rate"] / FPS for one in best]),
                ", ".join(sorted({_shape(one) for one in best})), _span([one["cores"] for one in best]),
                percent(spread(nvdec).median), pieces[-1]["conditions"]["clip"],
            ))  # fmt: skip
    head = ("camera", "frames/s", "streams of 30", "best processes × threads", "cores", "NVDEC busy", "clip")
    return markdown_table("NVDEC alone: a decoder a thread, packets in memory", head, rows)


def _shape(alone: Mapping[str, Any]) -> str:
    return f"{alone['processes']} × {alone['threads']}{', MPS' if alone.get('is_mps') else ''}"


def _rounds(bodies: Sequence[Body]) -> str:
    lines = ["## Rounds", ""]
    for part in PARTS:
        found = [one for one in bodies if one["part"] == part]
        took = sum(float(one["found"].get("took_s", 0.0)) for one in found)
        rounds = ", ".join(map(str, sorted({one["round"] for one in found})))
        lines.append(f"* {part}: {f'rounds {rounds}, {took:.0f} s in all' if found else '**not measured**'}")
        lines += [
            f"* {one['camera']}, round {one['round']} ended before {one['found']['cut']}."
            for one in found
            if one["found"].get("cut")
        ]
    lines += [
        "",
        "Never run: cameras over a network, streams with B-frames, other GPUs, an engine on another host.",
        "",
    ]
    return "\n".join(lines)


def _span(values: Sequence[float], *, is_share: bool = False) -> str:
    if not values:
        return ""
    found: BenchSpread = spread(values)
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})" if is_share else spread_range(found)


def write_report(folder: Path, into: Path) -> Iterator[Path]:
    """Both files. Raises OSError, ResultsError, ValueError without a piece."""
    bodies = Folder(folder).all()
    if not bodies:
        raise ValueError("no piece of a run is there")
    into.mkdir(parents=True, exist_ok=True)
    path, page, notes = into / JSON_FILE, into / PAGE, folder / "notes.md"
    content = {"conditions": bodies[-1]["conditions"], "results": results_of(bodies)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    yield path
    page.write_text(report_text(bodies, read_bench(path, read_targets()), notes.read_text() if notes.exists() else ""))
    yield page


def main(arguments: Sequence[str] | None = None) -> int:
    """0: written. 1: the folder has no run's pieces."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu.video.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="what python -m loadtest.bench.gpu.video wrote into")
    parser.add_argument("--into", type=Path, metavar="DIR", help="for the two files [the folder itself]")
    options = parser.parse_args(arguments)
    try:
        print("\n".join(map(str, write_report(options.folder, options.into or options.folder))))
    except (OSError, ResultsError, KeyError, TypeError, ValueError) as error:
        print(f"report: {options.folder} has no pieces of the bench of video on a GPU: {error!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
