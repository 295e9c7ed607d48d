"""What the settings change that matter most: pairs of stacks that differ in one setting, in interleaved stretches.

    python -m loadtest.bench.gateway.settings --model-folder ~/.penstock/models/yolox-nano --image a.jpg --video a.avi

A pair is a stretch with the usual value and one with the other value, in random order. The other stack is idle then.
`ratio` is the other value by the usual one: above 1 is more answers (or frames) a second, a longer p99, or more CPU
time. Its interval contains the median with 95 % confidence (order statistics of the pairs). On a machine that others
use, too, CPU time is the steadiest of the three. Requests come from a closed loop of callers. A caller that is refused
waits for 50 ms. The p99 is of requests that were answered.
Without --image or --video the parts that need them are left out.
"""

import argparse
import asyncio
import random
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import uvloop

from loadtest.bench.child import CHECKOUT
from loadtest.bench.closed_loop import quantile, run_closed_loop
from loadtest.bench.gateway.before_after import CPU_MS, Interval, Stack, median_interval, stack_of
from loadtest.bench.report import BenchSpread, format_table, present, spread, write_json
from loadtest.bench.video.program import VideoProgram
from loadtest.bench.wire import BadAnswer, BenchHttp, BenchRequest

RATE, P99_MS, REFUSED = "answers/s", "p99 ms", "refused"
FRAMES, FRAME_CPU_MS = "frames/s", "CPU ms a frame"
WARM_UP_S, REFUSED_WAIT_S = 3.0, 0.05
HEAD = ("setting", "usual", "other", "measure", "usual", "other", "ratio, 95 %")
_COUNT = re.compile(r"(?m)^(instance_group[^\n]*count: )\d+")


@dataclass(frozen=True, slots=True)
class Side:
    """One value of a setting. text: of it. batching: options of the model. width: of the pictures, in pixels.

    instances: of the model; 0 for those of its config.pbtxt. sources: their number. video: flags of `video run`.
    """

    text: str
    batching: str = ""
    flags: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    engine: str = "embedded"
    instances: int = 0
    width: int = 640
    sources: int = 1
    video: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting with two values. callers: of the closed loop."""

    name: str
    usual: Side
    other: Side
    callers: int = 8


NO_DEADLINE = "slo_p99_ms=60000"
SETTINGS = (
    Setting("engine", Side("embedded"), Side("triton", engine="triton")),
    Setting("who forms batches", Side("gateway", "gateway"), Side("off", "off")),
    Setting("max_queue_delay_us", Side("0", "gateway"), Side("20000", "gateway,max_queue_delay_us=20000")),
    Setting("instance_group count", Side("2", instances=2), Side("1", instances=1)),
    Setting("decoders", Side("2", environ={"PENSTOCK_DECODERS": "2"}), Side("1", environ={"PENSTOCK_DECODERS": "1"})),
    Setting("workers", Side("1", flags=("--workers", "1")), Side("2", flags=("--workers", "2"))),
    Setting("width of the pictures", Side("640"), Side("1920", width=1920)),
    Setting("slo_p99_ms", Side("60000", f"gateway,{NO_DEADLINE}"), Side("1000", "gateway,slo_p99_ms=1000"), callers=64),
    Setting(
        "max_queue_size",
        Side("1024", f"gateway,{NO_DEADLINE}"),
        Side("8", f"gateway,{NO_DEADLINE},max_queue_size=8"),
        callers=64,
    ),
)
VIDEO = (
    Setting("tracker", Side("bytetrack"), Side("none", video=("--tracker", "none"))),
    Setting("interval", Side("0"), Side("2", video=("--interval", "2"))),
    Setting("annotated film", Side("no"), Side("yes", video=("--sink", "mp4", "--out", "OUT"))),
    Setting(
        "batch-size, 4 sources",
        Side("8", sources=4, video=("--batch-size", "8")),
        Side("1", sources=4, video=("--batch-size", "1")),
    ),
)


@dataclass(frozen=True, slots=True)
class Effect:
    """A measure of a setting over the pairs."""

    name: str
    usual_value: str
    other_value: str
    measure: str
    usual: BenchSpread
    other: BenchSpread
    ratio: Interval | None

    @property
    def row(self) -> tuple[object, ...]:
        """A row of the table."""
        return self.name, self.usual_value, self.other_value, self.measure, self.usual, self.other, self.ratio or ""


Stretch = dict[str, float]


def effects(setting: Setting, pairs: Sequence[tuple[Stretch, Stretch]]) -> list[Effect]:
    """Every measure. A share has no ratio. Raises ValueError for fewer than six pairs."""
    found = []
    for measure in pairs[0][0]:
        usual, other = [pair[0][measure] for pair in pairs], [pair[1][measure] for pair in pairs]
        ratio = None
        if measure != REFUSED:
            ratio = median_interval([b / a for a, b in zip(usual, other, strict=True)])
        elif not any((*usual, *other)):
            continue
        found.append(
            Effect(setting.name, setting.usual.text, setting.other.text, measure, spread(usual), spread(other), ratio)
        )
    return found


async def stretch_of(
    http: BenchHttp, request: BenchRequest, callers: int, seconds: float, cpu_s: Callable[[], float]
) -> Stretch:
    """One stretch. cpu_s: CPU seconds of the stack so far. Raises BadAnswer for an answer that is no refusal."""
    latencies_s: list[float] = []
    refused = 0

    async def call(_: int) -> None:
        nonlocal refused
        begun = time.perf_counter()
        status, body = await http.send(request)
        if status == 200:
            latencies_s.append(time.perf_counter() - begun)
        elif status in (503, 504):
            refused += 1
            await asyncio.sleep(REFUSED_WAIT_S)
        else:
            raise BadAnswer(f"{request.path} answered {status}: {body[:300]!r}")

    begun, used_s = time.perf_counter(), cpu_s()
    await run_closed_loop(call, concurrency=callers, seconds=seconds)
    elapsed_s = time.perf_counter() - begun
    count = len(latencies_s)
    if not count:
        raise BadAnswer(f"no answer in {seconds:g} s: make --seconds longer")
    return {
        RATE: count / elapsed_s,
        P99_MS: quantile(sorted(latencies_s), 0.99) * 1000,
        CPU_MS: (cpu_s() - used_s) * 1000 / max(count, 1),
        REFUSED: refused / max(count + refused, 1),
    }


def picture_of(path: Path, width: int) -> bytes:
    """The photo at that width, as JPEG of quality 90. Raises BadAnswer."""
    pixels = cv2.imread(str(path))
    if pixels is None:
        raise BadAnswer(f"{path} is no picture")
    height = round(pixels.shape[0] * width / pixels.shape[1])
    interpolation = cv2.INTER_AREA if width < pixels.shape[1] else cv2.INTER_CUBIC
    scaled = cv2.resize(pixels, (width, height), interpolation=interpolation)
    return bytes(cv2.imencode(".jpg", scaled, [cv2.IMWRITE_JPEG_QUALITY, 90])[1])


def write_model(source: Path, home: Path, instances: int) -> None:
    """Copies the model's folder into the home of a stack. instances: of it; 0 for its own."""
    folder = home / "models" / source.name
    shutil.copytree(source, folder)
    if instances:
        config = folder / "config.pbtxt"
        text, count = _COUNT.subn(rf"\g<1>{instances}", config.read_text())
        if not count:
            raise BadAnswer(f"{config} has no instance_group with a count")
        config.write_text(text)


def flags_of(side: Side, model: str) -> list[str]:
    """Of `penstock up`."""
    batching = ["--batching", f"{model}={side.batching}"] if side.batching else []
    return ["--models", model, *batching, *side.flags]


class Bench:
    """Measures settings of one model. Raises BadAnswer."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._model = options.model_folder.resolve().name

    def gateway(self, setting: Setting) -> list[Effect]:
        """A setting of the gateway."""
        with self._stack(setting.usual) as usual, self._stack(setting.other) as other:
            return effects(setting, uvloop.run(self._pairs(setting, usual, other)))

    async def _pairs(self, setting: Setting, usual: Stack, other: Stack) -> list[tuple[Stretch, Stretch]]:
        options, path = self._options, f"/v2/models/{self._model}/image"
        sides = {0: (usual, setting.usual), 1: (other, setting.other)}
        pairs = []
        async with (
            BenchHttp(f"http://127.0.0.1:{usual.http_port}") as first,
            BenchHttp(f"http://127.0.0.1:{other.http_port}") as second,
        ):
            calls = {
                index: (
                    http,
                    BenchRequest(path, {"content-type": "image/jpeg"}, picture_of(options.image, side.width)),
                    setting.callers,
                )
                for index, ((_, side), http) in enumerate(zip(sides.values(), (first, second), strict=True))
            }
            for index, call in calls.items():
                await stretch_of(*call, WARM_UP_S, sides[index][0].meter.read_s)
            for _ in range(options.pairs):
                found: dict[int, Stretch] = {}
                for index in random.sample((0, 1), 2):
                    read_s = sides[index][0].meter.read_s
                    found[index] = await stretch_of(*calls[index], options.seconds, read_s)
                pairs.append((found[0], found[1]))
                _tick()
        return pairs

    def video(self, setting: Setting, stack: Stack) -> list[Effect]:
        """A setting of the video program, beside one stack."""
        pairs = []
        for _ in range(self._options.pairs):
            found: dict[int, Stretch] = {}
            for index in random.sample((0, 1), 2):
                found[index] = self._video_stretch((setting.usual, setting.other)[index], stack)
            pairs.append((found[0], found[1]))
            _tick()
        return effects(setting, pairs)

    def _video_stretch(self, side: Side, stack: Stack) -> Stretch:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory(dir=self._folder) as out:
            flags = [word.replace("OUT", out) for word in side.video]
            video = VideoProgram(
                stack.program, stack.meter, self._model, [self._options.video] * side.sources, port, "--loop",
                "--events", "off", *flags, environ=stack.environ,
            )  # fmt: skip
            with video as program:
                found = program.measure(self._options.seconds)
        if not found.frames:
            raise BadAnswer(f"no frame in {self._options.seconds:g} s: make --seconds longer")
        cpu_ms = found.cpu_ms * sum(found.inferred) / max(found.frames, 1)  # of a frame, inferred or not
        return {FRAMES: found.frames / found.seconds, FRAME_CPU_MS: cpu_ms}

    def _stack(self, side: Side) -> AbstractContextManager[Stack]:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        write_model(self._options.model_folder, folder / "home", side.instances)
        return stack_of(CHECKOUT, folder, *flags_of(side, self._model), engine=side.engine, more=dict(side.environ))

    def run(self, wanted: Sequence[str]) -> list[Effect]:
        """All settings of these names."""
        found: list[Effect] = []
        if self._options.image:
            for setting in SETTINGS:
                if setting.name in wanted:
                    found += self.gateway(setting)
                    self._keep(found)
        chosen = [setting for setting in VIDEO if setting.name in wanted]
        if self._options.video and chosen:
            with self._stack(Side("")) as stack:
                for setting in chosen:
                    found += self.video(setting, stack)
                    self._keep(found)
        return found

    def _keep(self, found: Sequence[Effect]) -> None:
        if self._options.json is not None:  # what was measured stays, if a later setting fails
            write_json(self._options.json, found)


def _tick() -> None:
    print(".", end="", file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gateway.settings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [setting.name for setting in (*SETTINGS, *VIDEO)]
    parser.add_argument("--model-folder", type=Path, required=True, metavar="DIR", help="a pulled or added model")
    parser.add_argument("--image", type=Path, metavar="FILE", help="a photo")
    parser.add_argument("--video", type=Path, metavar="FILE", help="a film")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SETTING", help=", ".join(names))
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each stretch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser.parse_args(arguments)


def main() -> int:
    """0 when everything was measured."""
    options = parse_arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-settings-") as folder:
            found = Bench(options, Path(folder)).run(options.only)
    except (BadAnswer, OSError, ValueError) as error:
        print(f"settings: {error}", file=sys.stderr)
        return 1
    note = f"{options.model_folder.name}: {options.pairs} pairs of 2 × {options.seconds:g} s"
    present(found, note, format_table(HEAD, [effect.row for effect in found]), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
