"""An ONNX detector on the card and on the CPU, end to end: JPEGs to /image of a gateway with the embedded engine.

Device and precision are chosen as by `penstock models add`; a copy runs on the CPU with an instance of one thread a
core. One gateway serves both; a closed loop measures one of them at a time, in a random order in each round. Decoding,
preprocessing, parsing and the load generator use the same cores in both.

--no-gpu compares the CPU with itself: a trial of the bench.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import cv2
import onnxruntime as ort

from loadtest.bench.gpu.agreement import card_facts
from loadtest.bench.gpu.callers import OK, CallerLane, exchange, reply_text
from loadtest.bench.gpu.figures import PointLedger
from loadtest.bench.gpu.generators import START_S, Generators
from loadtest.bench.gpu.pictures import Pixels
from loadtest.bench.gpu.programs import PenstockUp
from loadtest.bench.gpu.scenes import read_scenes
from loadtest.bench.gpu.stretch import busy_cpu_s, figures_of
from loadtest.bench.gpu.tritons import picture_request
from loadtest.bench.report import conditions
from loadtest.bench.wire import BadAnswer
from penstock.engines.config_pbtxt import read_proto
from penstock.engines.ort_serving.placement import Precision
from penstock.engines.ort_serving.session import SEVERITY_FATAL
from penstock.engines.ort_serving.threads import available_cores
from penstock.logs import LogFormat, configure_logs
from penstock.models.add import AddOptions, add_model, name_from
from penstock.models.added_folder import CannotAdd, proto_text
from penstock.models.inspect.inspection import Hints
from penstock.models.placement.choice import ON_CPU, CannotPlace, Device, PlacementChoice, PlacementWish
from penstock.models.placement.placed_model import placed_config
from penstock.models.placement.placing import place, why_no_gpu
from penstock.vision.spec import ColorFormat

PICTURES, QUALITY = 64, 90
READY_S, FIRST_ANSWER_S = 60.0, 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """One model of the gateway. model: the file's name. on: cpu or gpu."""

    model: str
    on: str
    name: str
    why: str = ""


def add_both(source: Path, home: Path, *, is_gpu: bool, precision: Precision | None = None) -> list[Served]:
    """The model as it is chosen, which must be the GPU, and its copy on the CPU. Raises BadAnswer."""
    model = name_from(source)
    wish = PlacementWish(precision=precision) if is_gpu else PlacementWish(Device.CPU)
    chosen, copy = home / "models" / f"{model}-gpu", home / "models" / f"{model}-cpu"
    try:
        if source.is_dir():
            _copy(source, chosen)
            choice: PlacementChoice | None = place(chosen, wish, pictures=(), rows=1, no_gpu=why_no_gpu())
        else:
            choice = add_model(source, chosen.name, AddOptions(Hints(), wish=wish), home=home).placement
    except (CannotAdd, CannotPlace) as error:
        raise BadAnswer(f"{source} was not added: {error}") from error
    if is_gpu and (choice is None or choice.device is not Device.GPU):
        raise BadAnswer(f"{model} {choice.why if choice else 'was not tried: there is no GPU'}")
    _copy(chosen, copy)
    for folder in (copy,) if is_gpu else (copy, chosen):
        _spread_over_cores(folder)
    return [Served(model, "gpu", chosen.name, choice.why if choice else ""), Served(model, "cpu", copy.name)]


def _copy(source: Path, target: Path) -> None:
    """The model folder under another name."""
    shutil.copytree(source, target)
    config = read_proto(target / "config.pbtxt")
    config.name = target.name
    (target / "config.pbtxt").write_text(proto_text(config), encoding="utf-8")


def _spread_over_cores(folder: Path) -> None:
    """On the CPU, an instance of one thread a core."""
    config = placed_config(read_proto(folder / "config.pbtxt"), ON_CPU)
    config.instance_group[0].count = available_cores()
    del config.parameters["precision"]
    if "max_batch_size" in config.parameters:
        config.parameters["max_batch_size"].string_value = "1"
    (folder / "config.pbtxt").write_text(proto_text(config), encoding="utf-8")


def pictures_of(media: Path) -> list[bytes]:
    """Frames, photos and crops as JPEGs, evenly spread. Raises BadAnswer."""
    scenes = read_scenes(media, limit=PICTURES)
    return [_jpeg(scenes.decoded(number, ColorFormat.BGR).pixels) for number in range(len(scenes))]


def _jpeg(pixels: Pixels) -> bytes:
    return bytes(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1])


def measure(
    up: PenstockUp, served: Sequence[Served], ledger: PointLedger, generators: Generators, options: argparse.Namespace
) -> None:
    """Every model in every round. Raises BadAnswer, OSError."""
    pictures = pictures_of(options.media)
    ledger.facts["image bytes a picture"] = sum(map(len, pictures)) // len(pictures)
    requests = {one.name: [picture_request(one.name, picture) for picture in pictures] for one in served}
    for one in served:
        _ask_once(up.port, requests[one.name][0], one.name)
    for number in range(1, options.rounds + 1):
        order = list(served)
        random.Random(options.seed + number).shuffle(order)
        for one in order:
            lanes = [
                CallerLane(one.name, up.port, requests[one.name][n % len(pictures)]) for n in range(options.callers)
            ]
            figures = _stretch(up, lanes, generators, options)
            ledger.add("image", number, {"model": one.model, "on": one.on}, figures, one.model)
            ledger.save()
            cpu_ms = figures["server_cpu_ms"]
            print(f"image: round {number}, {one.name}: {figures['rate']:.0f}/s, {cpu_ms:.1f} CPU ms", flush=True)


def _ask_once(port: int, request: bytes, name: str) -> None:
    until_s = time.monotonic() + FIRST_ANSWER_S
    while (reply := exchange(port, request, timeout_s=FIRST_ANSWER_S)).status != OK:
        if time.monotonic() > until_s:
            raise BadAnswer(f"{name} answered {reply_text(reply)}")
        time.sleep(0.2)


def _stretch(
    up: PenstockUp, lanes: Sequence[CallerLane], generators: Generators, options: argparse.Namespace
) -> dict[str, float]:
    """Rate and latencies; CPU time of the server for each picture, and the machine's busy cores."""
    begin_s = time.monotonic() + START_S + options.settle
    wait = generators.closed(lanes, settle_s=options.settle, seconds=options.seconds)
    time.sleep(max(0.0, begin_s - time.monotonic()))
    before_s, busy_s = sum(up.cpu_s().values()), busy_cpu_s()
    time.sleep(max(0.0, begin_s + options.seconds - time.monotonic()))
    used_s, busy_s, elapsed_s = sum(up.cpu_s().values()) - before_s, busy_cpu_s() - busy_s, time.monotonic() - begin_s
    figures = figures_of(wait(), lanes)
    per_picture_ms = used_s / elapsed_s / figures["rate"] * 1000
    return figures | {"server_cpu_ms": per_picture_ms, "machine_cores": busy_s / elapsed_s}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu.onnx_image", description=__doc__)
    add = parser.add_argument
    add("models", type=Path, nargs="+", metavar="FILE", help="ONNX files, and folders of models that were added")
    add("--media", type=Path, required=True, metavar="DIR", help="folder with .avi and .jpg")
    add("--json", type=Path, default=Path("image.json"), metavar="FILE", help="the figures [image.json]")
    add("--precision", type=Precision, metavar="P", help="on the GPU: fp32, tf32 or fp16 [chosen by a trial]")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=2.0, help="of each run [2]")
    add("--settle", type=float, default=1.0, help="seconds before each run that are left out [1]")
    add("--callers", type=int, default=96, metavar="N", help="of the closed loop [96]")
    add("--generators", type=int, default=2, metavar="N", help="processes that make the load [2]")
    add("--workers", type=int, default=0, metavar="N", help="of penstock up [by the cores]")
    add("--seed", type=int, default=1, help="of the order [1]")
    add("--no-gpu", dest="is_gpu", action="store_false", help="use the CPU instead of the GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every model was measured, else 1. The file has all results that were measured."""
    options = parse_arguments(arguments)
    configure_logs(LogFormat.TEXT, "error")
    ort.set_default_logger_severity(SEVERITY_FATAL)
    ledger = PointLedger(options.json, conditions() | card_facts(is_gpu=options.is_gpu), "")
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-image-")))
        generators = stack.enter_context(Generators(options.generators))
        served: list[Served] = []
        for file in options.models:
            try:
                served += add_both(file, home, is_gpu=options.is_gpu, precision=options.precision)
                ledger.facts[f"image {served[-2].model}"] = served[-2].why
                print(f"image: {served[-2].name} {served[-2].why}", flush=True)
            except BadAnswer as error:
                ledger.failures.append(f"image: {error}")
        try:
            if served:
                flags = ("--workers", str(options.workers), "--model-repository", str(home / "none"))
                (home / "none").mkdir()
                up = PenstockUp(home, [one.name for one in served], *flags, environment=None)
                stack.enter_context(up)
                up.wait(time.monotonic() + READY_S)
                measure(up, served, ledger, generators, options)
        except (BadAnswer, OSError) as error:
            ledger.failures.append(f"image: {error}")
        ledger.save()
    for why in ledger.failures:
        print(why, file=sys.stderr)
    return 1 if ledger.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
