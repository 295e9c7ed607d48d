"""What the settings of detection and tracking change in the results: objects, tracks, and who crosses a line.

    python -m loadtest.bench.video.detection_settings --home ~/.penstock --video vtest.avi

Runs `penstock video run` on the first 300 frames of OpenCV's vtest.avi once for each value. Files lose no frames, so a
run gives the same results on every machine with the same libraries, however busy it is. The line and the crossings that
were counted by eye are in tests/deepstream_pipeline/vtest_crossings.toml.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av

from loadtest.bench.child import CHECKOUT
from loadtest.bench.report import format_table, present
from loadtest.bench.wire import BadAnswer

TRUTH = CHECKOUT / "tests" / "deepstream_pipeline" / "vtest_crossings.toml"
RUN_S = 300.0
MODEL = "yolox-nano"
VALUES = {
    "usual": (),
    "conf 0.1": ("--conf", "0.1"),
    "conf 0.5": ("--conf", "0.5"),
    "iou 0.3": ("--iou", "0.3"),
    "iou 0.7": ("--iou", "0.7"),
    "interval 1": ("--interval", "1"),
    "interval 4": ("--interval", "4"),
    "interval 9": ("--interval", "9"),
}
HEAD = ("setting", "objects a frame", "tracks", "in", "out")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a run. objects: detections of all classes in each frame, with or without a track. tracks: different IDs."""

    setting: str
    objects: float
    tracks: int
    crossed_in: int
    crossed_out: int

    @property
    def row(self) -> tuple[object, ...]:
        """A row of the table."""
        return self.setting, f"{self.objects:.2f}", self.tracks, self.crossed_in, self.crossed_out


def outcome_of(setting: str, lines: Sequence[dict[str, object]], line_name: str) -> Outcome:
    """lines: of objects.jsonl."""
    objects = [one for line in lines for one in line["objects"]]  # type: ignore[attr-defined]
    tracks = {one["track_id"] for one in objects if one["track_id"] is not None}
    counts: dict[str, int] = lines[-1]["counts"]  # type: ignore[assignment]
    ways = {way: counts[f"line-crossing/{line_name}.{way}"] for way in ("in", "out")}
    return Outcome(setting, len(objects) / len(lines), len(tracks), ways["in"], ways["out"])


def cut(source: Path, path: Path, count: int) -> None:
    """Writes the first frames: packets are copied, nothing is encoded again."""
    with av.open(str(source)) as clip, av.open(str(path), "w") as first:
        stream = clip.streams.video[0]
        copied = first.add_stream_from_template(stream)
        for number, packet in enumerate(clip.demux(stream)):
            if number == count:
                break
            packet.stream = copied
            first.mux(packet)


def run_one(setting: str, clip: Path, line: str, home: Path, out: Path) -> Outcome:
    """Raises BadAnswer if the program fails."""
    command = [
        *(str(CHECKOUT / ".venv" / "bin" / "penstock"), "video", "run", "--source", str(clip), "--model", MODEL),
        *("--engine", "embedded", "--no-api", "--line", f"pavement={line}", "--sink", "jsonl", "--out", str(out)),
        *("--events", "off", "--no-progress", *VALUES[setting]),
    ]
    environ = os.environ | {"PENSTOCK_HOME": str(home)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode:
        raise BadAnswer(f"{setting}: penstock video run ended with {done.returncode}: {done.stderr[-500:]}")
    with (out / "objects.jsonl").open() as file:
        return outcome_of(setting, [json.loads(one) for one in file], "pavement")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.video.detection_settings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--home", type=Path, required=True, metavar="DIR", help=f"PENSTOCK_HOME with {MODEL}")
    parser.add_argument("--video", type=Path, required=True, metavar="FILE", help="vtest.avi")
    parser.add_argument("--only", nargs="+", choices=VALUES, default=list(VALUES), metavar="SETTING")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser.parse_args(arguments)


def main() -> int:
    """0 when everything was measured."""
    options = parse_arguments()
    truth = tomllib.loads(TRUTH.read_text())
    line = ",".join(f"{number}" for point in truth["line"] for number in point)
    crossed = Counter(one["direction"] for one in truth["crossing"])
    found = []
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-detection-") as folder:
            clip = Path(folder) / "clip.avi"
            cut(options.video, clip, truth["frames"])
            for number, setting in enumerate(options.only):
                found.append(run_one(setting, clip, line, options.home, Path(folder) / f"out-{number}"))
                print(".", end="", file=sys.stderr, flush=True)
    except (BadAnswer, OSError, subprocess.TimeoutExpired) as error:
        print(f"detection_settings: {error}", file=sys.stderr)
        return 1
    note = f"{MODEL}, {truth['frames']} frames; counted by eye: {crossed['in']} in, {crossed['out']} out"
    present(found, note, format_table(HEAD, [one.row for one in found]), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
