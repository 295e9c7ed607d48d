"""The report of video on a GPU: what was held, by what, what limits it; gpu-video.md and .json, a plot, from pieces.

    python -m loadtest.bench.gpu.video.report gpu-video --into loadtest/results/gpu-h200

A file notes.md in the folder is put at the end of the page: what was done beside the bench, with its commands.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench.gpu.video.clips import CAMERAS, FPS
from loadtest.bench.gpu.video.plan import PARTS, Folder
from loadtest.bench.gpu.video.results import (
    PARTS_OF_CPU,
    Body,
    cores_of,
    cpu_by_part,
    decoders_limit,
    decoders_text,
    figures,
    missed_try,
    of_part,
    results_of,
    servers,
    shares_of_alone,
    stream_limit_text,
    sustained_trial,
    write_plot,
)
from loadtest.bench.gpu.video.usage import engine_text
from loadtest.bench.report import BenchSpread, markdown_table, spread, spread_range, verdict_rows
from penstock_load.committed import Committed, ResultsError, read_bench
from penstock_load.report.document import percent, plain_number
from penstock_load.targets import read_targets

JSON_FILE, PAGE = "gpu-video.json", "gpu-video.md"
_SUSTAINED = (
    "**Held** means: over a window ({seconds} s), at most 0.1 % of the due frames dropped, 99.5 to 100.5 % of them "
    "answered, no stream more than three frames short, 99 % of all streams' answers within {bound} ms of the frame's "
    "capture, by the programs' own histograms. Capture is the moment at which the clip's clock makes a frame's packet "
    "due, before which it is not decoded, as a camera's cannot be: decoding, every wait and being late count. "
    "A number that was missed was given a second window, if it was not far from being held. The number held is "
    "searched to within 2 %."
)
_NEVER_RUN = (
    "**Never run here**: cameras over a network (every stream is a clip of its kind, read from a file of the machine; "
    "streams begin at different moments), streams with B-frames, unlike streams side by side, other cards, an engine "
    "on another host, sinks (but for the faults, where every result was written)."
)
_CPU_KINDS = ("decode process", "video program", "triton", "model instance")


def report_text(bodies: Sequence[Body], judged: Committed | None, plot: str, notes: str) -> str:
    """The page as Markdown. plot: a file beside it, or empty."""
    shown = f"![streams]({plot})\n" if plot else ""
    sections = (
        _head(bodies), _verdicts(judged, bodies), _streams(bodies), shown, _limits(bodies), _cpu_by_part(bodies),
        _alone(bodies), _hand_over(bodies), _cpu(bodies), _faults(bodies), _how(bodies), notes,
    )  # fmt: skip
    return "\n".join(section for section in sections if section)


def _head(bodies: Sequence[Body]) -> str:
    run = bodies[-1]["conditions"]
    commands = dict.fromkeys(one["conditions"]["command"] for one in bodies)
    lines = ["# Video on one GPU: decode, prepare, infer, track", ""]
    lines += [f"{run['machine']}. {_when(bodies)}. {run['gpu versions']}. {run['versions']}.", ""]
    lines += [f"Model: {run['model']}; `-random`: its weights are, the arithmetic is the network's. "
              f"Video programs: {run['programs']}. The bench and the clips' reading share the cores.", ""]  # fmt: skip
    lines += [_SUSTAINED.format(seconds=_seconds(bodies), bound=run["slo_p99_ms"]), ""]
    lines += ["Figures are medians over the rounds (lowest to highest).", ""]
    return "\n".join([*lines, *(f"    {command}" for command in commands), ""])


def _when(bodies: Sequence[Body]) -> str:
    at = sorted({str(one["conditions"]["at"]) for one in bodies})
    return " to ".join(dict.fromkeys((at[0], at[-1])))


def _seconds(bodies: Sequence[Body]) -> str:
    tries = [one for body in of_part(bodies, "streams") for one in body["found"]["tries"] if "seconds" in one]
    seconds = [float(one["seconds"]) for one in tries]
    return f"{min(seconds):.1f} to {max(seconds):.1f}" if tries else "some"


def _verdicts(judged: Committed | None, bodies: Sequence[Body]) -> str:
    rows = [row[:4] for row in verdict_rows(judged)]
    text = markdown_table("What it was held to", ("target", "measured", "floor / goal", "verdict"), rows)
    if times := servers(bodies):
        text += f"\n**How many CPU servers is this card?** {times:.1f} of these: it holds so many times the 720p30 "
        text += "streams that the same cores hold when they decode themselves, with the same engine on the card.\n"
    return text


def _streams(bodies: Sequence[Body]) -> str:
    rows = []
    for name, camera in CAMERAS.items():
        found = of_part(bodies, "streams", name)
        if not found:
            continue
        tries = [one for one in map(sustained_trial, found) if one]
        alone, shares = figures(found, "alone_per_s"), shares_of_alone(bodies, name)
        rows.append((
            camera.words, camera.goal, spread_range(figures(found, "held")),
            _missed_at(found),
            _span([full for full in map(decoders_limit, found) if full]),
            f"{alone.median / FPS:.0f}" if alone and alone.median else "",
            _shares(spread(shares)) if shares else "",
            *(_middle(tries, key) for key in ("rate", "p50_ms", "p99_ms", "frames_a_batch")),
        ))  # fmt: skip
    head = ("camera", "target", "held", "missed at", "no more decoders at", "NVDEC alone", "held by NVDEC alone")
    return markdown_table("Streams held", (*head, "frames/s", "p50 ms", "p99 ms", "frames a batch"), rows)


def _missed_at(found: Sequence[Body]) -> str:
    missed = [one for one in found if one["found"]["missed"]]
    rounds = f", in {len(missed)} of {len(found)} rounds" if 0 < len(missed) < len(found) else ""
    return f"{spread_range(figures(missed, 'missed'))}{rounds}"


def _limits(bodies: Sequence[Body]) -> str:
    parts = []
    for name, camera in CAMERAS.items():
        found = of_part(bodies, "streams", name)
        if not found:
            continue
        missing = next((body for body in reversed(found) if missed_try(body)), found[-1])
        parts += [*_sustained_by(camera.words, found[-1]), *_missed_by(camera.words, missing)]
    full = [full_at for full_at in map(decoders_limit, of_part(bodies, "streams")) if full_at]
    tried = [one for body in of_part(bodies, "streams") for one in body["found"]["tries"] if "full_at" in one]
    about = [" ".join([decoders_text(max(full)), *_sentence(tried[-1:])]), ""] if full else []
    return "\n".join(["## What limits", "", *about, *parts]) if parts else ""


def _sustained_by(camera: str, body: Body) -> Iterator[str]:
    cores, decoders, held = cores_of(body["conditions"]["machine"]), decoders_limit(body), sustained_trial(body)
    if held:
        yield from (f"### {camera}, {held['streams']} streams, held in round {body['round']}", "")
        is_most = bool(decoders or missed_try(body))
        yield from (stream_limit_text(held, cores, decoders, is_most=is_most), "", _profile(held))
    if cut := body["found"].get("cut"):
        yield from (f"The search of round {body['round']} broke off before {cut}.", "")
    if decoders and not missed_try(body):
        yield from (f"More than {decoders} were not tried: the card was known to be full at so many.", "")


def _missed_by(camera: str, body: Body) -> Iterator[str]:
    cores, missed = cores_of(body["conditions"]["machine"]), missed_try(body)
    if missed:
        is_full = "full_at" in missed
        why = "the card makes no more decoders" if is_full else missed["complaint"]
        yield from (f"### {camera}, {missed['streams']} streams, not held in round {body['round']}: {why}", "")
        yield from (*_sentence([missed]), "") if is_full else (stream_limit_text(missed, cores), "", _profile(missed))


def _sentence(tried: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"Of {one['streams']} streams {one['full_at']} had answers: {one['complaint']}." for one in tried]


def _profile(tried: Mapping[str, Any]) -> str:
    kinds = sorted(tried["cores"], key=lambda kind: -tried["cores"][kind])
    rows = [(kind, f"{tried['cores'][kind]:.2f}", f"{tried['cpu_ms_a_frame'][kind]:.3f}") for kind in kinds]
    text = markdown_table("", ("who", "cores", "CPU ms a frame"), rows)
    busiest = "; ".join(f"{what} {cores:.2f}" for what, cores in tried["threads_by_name"][:8])
    rows_by = ", ".join(f"{n:,} by {how}" for how, n in tried["rows"].items() if n) or "unknown"
    decoders = ", ".join(f"{n} {kind}" for kind, n in tried["decode_processes"].items() if n)
    card = ", ".join(f"{name} {value:,.2f}" for name, value in tried["card"].items())
    batch = f"A call of the engine: {tried['frames_a_batch']:.1f} frames, {tried['infer_ms_a_batch']:.1f} ms."
    batch = " ".join(filter(None, (batch, engine_text(tried.get("engine", {})))))
    lines = [
        f"{batch} Rows: {rows_by}. Decode processes: {decoders or 'unknown'}. Threads by name, in cores: {busiest}."
    ]
    return "\n".join([text, *lines, *([f"Card: {card}."] if card else []), ""])


def _cpu_by_part(bodies: Sequence[Body]) -> str:
    rows = []
    for part, how in (("streams", "streams"), ("cpu", "decoded by the CPU")):
        for name, camera in CAMERAS.items():
            tries = [one for one in map(sustained_trial, of_part(bodies, part, name)) if one]
            if tries:
                spent = [cpu_by_part(one) for one in tries]
                each = [_span([one[part_of] for one in spent if part_of in one]) for part_of in PARTS_OF_CPU]
                machine = _span([one["cpu_ms_a_frame"]["machine"] for one in tries])
                rows.append((f"{camera.words}, {how}", _span([one["streams"] for one in tries]), *each, machine))
    head = ("camera", "streams", *PARTS_OF_CPU, "the whole machine, with the bench")
    text = "Of the highest number held in each round. The gateway's is the engine's, too, where it has no process.\n"
    return markdown_table("CPU ms a frame, by part", head, rows) + (f"\n{text}" if rows else "")


def _alone(bodies: Sequence[Body]) -> str:
    rows = []
    for name, camera in CAMERAS.items():
        found = of_part(bodies, "nvdec", name)
        if not found:
            continue
        rate = figures(found, "best", "rate")
        shapes = sorted({_shape(one["found"]["best"]) for one in found})
        nvdec = figures(found, "best", "card", "nvdec") or figures(found, "best", "card", "decoder_utilisation")
        rows.append((
            camera.words, spread_range(rate), f"{rate.median / FPS:.0f}" if rate else "", ", ".join(shapes),
            spread_range(figures(found, "best", "cores")), percent(nvdec.median) if nvdec else "",
            found[-1]["conditions"]["clip"],
        ))  # fmt: skip
    head = ("camera", "frames/s", "streams of 30", "best processes × threads", "cores", "NVDEC busy", "clip")
    text = (
        "Every thread has a decoder of its own, with a CUDA stream of its own as in the product; packets lie in memory."
    )
    return markdown_table("NVDEC alone", head, rows) + (f"\n{text}\n" if rows else "")


def _shape(alone: Mapping[str, Any]) -> str:
    return f"{alone['processes']} × {alone['threads']}{', MPS' if alone.get('is_mps') else ''}"


def _hand_over(bodies: Sequence[Body]) -> str:
    rows = []
    found = of_part(bodies, "hand-over")
    for way in ("device", "host"):
        tries = [one["found"]["ways"][way] for one in found if way in one["found"]["ways"]]
        if tries:
            held = sum(not one["complaint"] for one in tries)
            rows.append((
                way, _on_card(tries), tries[0]["streams"], f"{held} of {len(tries)}",
                _middle(tries, "p50_ms"), _middle(tries, "p99_ms"),
                _of(tries, "cpu_ms_a_frame", "machine"), *(_of(tries, "cores", kind) for kind in _CPU_KINDS),
                *(_of(tries, "card", way_of) for way_of in ("pcie_to_card_mb_s", "pcie_to_host_mb_s")),
            ))  # fmt: skip
    head = ("hand-over", "rows on the card", "streams", "held", "p50 ms", "p99 ms", "CPU ms a frame")
    names = ("cores: decode", "video", "Triton", "model", "PCIe to card MB/s", "to host MB/s")
    failed = [
        f"Not measured: {way} in round {one['round']}. {why}"
        for one in found
        for way, why in one["found"].get("failed", {}).items()
    ]
    return "\n".join([markdown_table("Frames handed over", (*head, *names), rows), *(f"{line}\n" for line in failed)])


def _on_card(tries: Sequence[Mapping[str, Any]]) -> str:
    rows = [one["rows"] for one in tries]
    count = sum(sum(one.values()) for one in rows)
    return percent(sum(one.get("device", 0) for one in rows) / count) if count else ""


def _cpu(bodies: Sequence[Body]) -> str:
    rows = []
    for one in of_part(bodies, "cpu"):
        tried, cores = sustained_trial(one), int(one["found"]["machine_cores"])
        if tried:
            rows.append((
                one["round"], tried["streams"], f"{tried['streams'] / cores:.2f}", f"{tried['p99_ms']:.0f}",
                f"{tried['cores']['machine']:.1f} of {cores}", f"{tried['cpu_ms_a_frame']['machine']:.2f}",
            ))  # fmt: skip
    head = ("round", "streams held", "a core", "p99 ms", "cores busy", "CPU ms a frame")
    return markdown_table("The CPU beside it: the same 720p30 streams, decoded by the cores", head, rows)


def _faults(bodies: Sequence[Body]) -> str:
    rows = [
        (
            fault["what"], f"{fault['own']['cameras']}: {fault['own']['largest_gap_s']:.2f} s",
            f"{fault['own']['median_gap_s']:.2f} s", fault["others"]["cameras"],
            f"{1000 * fault['others']['largest_gap_s']:.0f} ms", fault["others"]["missing_frames"],
            fault["slowest_within_s"], "; ".join(_rubbish(one) for one in fault.get("rubbish", [])),
        )
        for one in of_part(bodies, "faults")
        for fault in one["found"]["faults"]
    ]  # fmt: skip
    head = ("what", "own cameras: longest silence", "median", "other cameras", "their longest gap", "frames they miss")
    return markdown_table("Faults", (*head, "every answer within s", "the bad camera"), rows)


def _rubbish(stream: Mapping[str, Any]) -> str:
    return f"{stream['state']}, {stream['frames']} frames{', ' + stream['reason'] if stream['reason'] else ''}"


def _how(bodies: Sequence[Body]) -> str:
    lines = ["## How it went", ""]
    for part in PARTS:
        found = of_part(bodies, part)
        took = sum(float(one["found"].get("took_s", 0.0)) for one in found)
        rounds = sorted({one["round"] for one in found})
        text = f"rounds {', '.join(map(str, rounds))}, {took:.0f} s in all" if found else "**not measured**"
        lines.append(f"* {part}: {text}")
    return "\n".join([*lines, "", _NEVER_RUN, ""])


def _span(values: Sequence[float]) -> str:
    return spread_range(spread(values)) if values else ""


def _shares(found: BenchSpread) -> str:
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"


def _middle(tries: Sequence[Mapping[str, Any]], key: str) -> str:
    return plain_number(spread([float(one[key]) for one in tries]).median) if tries else ""


def _of(tries: Sequence[Mapping[str, Any]], group: str, key: str) -> str:
    values = [float(one[group][key]) for one in tries if key in one[group]]
    return plain_number(spread(values).median) if values else ""


def write_report(folder: Path, into: Path) -> Iterator[Path]:
    """All files; what was written. Raises OSError, ResultsError, ValueError where there is no piece."""
    bodies = Folder(folder).all()
    if not bodies:
        raise ValueError("no piece of a run is there")
    into.mkdir(parents=True, exist_ok=True)
    path, page, notes = into / JSON_FILE, into / PAGE, folder / "notes.md"
    content = {"conditions": bodies[-1]["conditions"], "results": results_of(bodies)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    yield path
    if plot := write_plot(into, bodies, float(bodies[-1]["conditions"]["slo_p99_ms"])):
        yield into / plot
    beside = notes.read_text() if notes.exists() else ""
    page.write_text(report_text(bodies, read_bench(path, read_targets()), plot, beside))
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
