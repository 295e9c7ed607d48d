"""Pictures on a GPU: how far nvJPEG's pixels are from the gateway's, and decode rates."""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from penstock.engines.torch_serving.config import PictureFit, PictureSpec
from penstock.vision import spec as vision
from penstock.vision.decode import decode
from penstock.vision.preprocess import prepare

# ResNet-50's usual input, and the same in plain levels of 255.
NETWORK = PictureSpec(
    width=224,
    height=224,
    fit=PictureFit.CROP,
    shorter_side=256,
    scale=1 / 255,
    offsets=(123.675, 116.28, 103.53),
    channel_factors=(1 / 0.229, 1 / 0.224, 1 / 0.225),
)
LEVELS = PictureSpec(width=224, height=224, fit=PictureFit.CROP, shorter_side=256)
_GATEWAYS = vision.PrepareSpec(width=224, height=224, fit=vision.ResizeMode.CROP, shorter_side=256)


@dataclass(frozen=True)
class Difference:
    """Between two inputs, in levels of 255, over all values of all pictures."""

    mean: float
    p99: float
    largest: float

    def is_within(self, tolerance: "Difference") -> bool:
        return self.mean <= tolerance.mean and self.p99 <= tolerance.p99 and self.largest <= tolerance.largest


def difference(encoded: Sequence[bytes], reader: Any, spec: PictureSpec) -> Difference:
    """What the reader makes of the pictures, against the gateway's decoder and resize on the CPU. spec: LEVELS'."""
    import torch

    out = torch.empty((len(encoded), spec.channels, spec.height, spec.width), device="cuda")
    errors = [error for error in reader.prepare(encoded, out) if error is not None]
    if errors:
        raise ValueError(errors[0])
    expected = np.stack([prepare(decode(one, vision.ColorFormat.RGB), _GATEWAYS)[0] for one in encoded])
    levels = np.abs(out.cpu().numpy() - expected)
    return Difference(float(levels.mean()), float(np.percentile(levels, 99)), float(levels.max()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables; --json FILE keeps the figures."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu.pictures", description=__doc__)
    parser.add_argument("--batches", default="1,8,16,32,64,128", help="pictures in a call")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", default="1,4,8", help="of so many at once, 32 pictures in a call; 0 for none")
    parser.add_argument("--json", help="a file for the figures")
    asked = parser.parse_args(arguments)
    try:
        import torch
        import torchvision  # noqa: F401  what decodes
    except ImportError as error:
        parser.exit(
            2,
            f"{error.name} is not installed: this bench wants PyTorch and what `make up` installs in one environment\n",
        )
    if not torch.cuda.is_available():
        parser.exit(2, "no NVIDIA GPU that torch can use: nothing is measured\n")
    batches, counts = ([int(word) for word in text.split(",")] for text in (asked.batches, asked.processes))
    print(f"{torch.cuda.get_device_name()}: pictures/s of photo-like JPEGs, median (smallest to largest)", flush=True)
    figures: dict[str, Any] = {"rates": _rates(photos(max(batches)), batches, asked.seconds, asked.rounds)}
    figures["host_us_a_picture"] = _host_us()
    print(f"Python a picture beside the calls: {figures['host_us_a_picture']:.1f} us")
    figures["difference"] = _differences()
    figures["processes"] = {count: _of_processes(count) for count in counts if count}
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


def _rates(made: list[bytes], batches: Sequence[int], seconds: float, rounds: int) -> dict[str, dict[int, list[float]]]:
    """Pictures a second of each way, batch size and round."""
    found: dict[str, dict[int, list[float]]] = {}
    for batch in batches:
        ways = _ways(made[:batch])
        if not found:
            print("batch  " + "".join(f"{name:>30}" for name in ways))
        for _ in range(rounds):
            for name, way in ways.items():
                found.setdefault(name, {}).setdefault(batch, []).append(batch * _calls_per_s(way, seconds))
        rounds_of = [rates[batch] for rates in found.values()]
        texts = (f"{statistics.median(one):,.0f} ({min(one):,.0f} to {max(one):,.0f})" for one in rounds_of)
        print(f"{batch:5}  " + "".join(f"{text:>30}" for text in texts), flush=True)
    return found


def _ways(batch: list[bytes]) -> dict[str, Callable[[], Any]]:
    """What is timed, each a call that ends when the card is done."""
    import torch

    from penstock.engines.torch_serving.nvjpeg import GpuJpegs
    from penstock.engines.torch_serving.pictures import PictureReader

    device = torch.device("cuda", torch.cuda.current_device())
    reader = PictureReader(NETWORK, device)
    out = torch.empty((len(batch), 3, 224, 224), dtype=torch.float16, device=device)
    out = out.to(memory_format=torch.channels_last)
    headers: list[Any] = [reader._header(one) for one in batch]
    sizes = [(one.width, one.height) for one in headers]
    jpegs = {has: GpuJpegs(device, is_grey=False, is_hardware_wanted=has) for has in (False, True)}
    decoded = reader._decode(batch, headers)

    def ended(work: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> None:
            with torch.inference_mode():  # as the instance calls it
                work()
            torch.cuda.synchronize()

        return call

    return {
        f"{jpegs[False].name} by torchvision": ended(lambda: jpegs[False].decode(batch, sizes)),
        f"{jpegs[True].name}, direct": ended(lambda: jpegs[True].decode(batch, sizes)),
        "kernel": ended(lambda: reader._launch(decoded, out)),
        f"both ({reader.decoder})": ended(lambda: reader.prepare(batch, out)),
    }


def _calls_per_s(work: Callable[[], Any], seconds: float) -> float:
    work()
    calls, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        work()
        calls += 1
    return calls / spent


def _of_processes(count: int) -> float:
    """Pictures a second of all, each process with a reader of its own: how instances share the card's decoders."""
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(count), context.Queue()
    workers = [context.Process(target=_one_process, args=(start, answers)) for _ in range(count)]
    for worker in workers:
        worker.start()
    total = sum(answers.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    print(f"{count} processes, 32 pictures a call: {total:,.0f} pictures/s", flush=True)
    return float(total)


def _one_process(start: Any, answers: Any) -> None:
    """Puts its pictures a second, over a second that begins when all are ready."""
    import torch

    from penstock.engines.torch_serving.pictures import PictureReader

    reader = PictureReader(NETWORK, torch.device("cuda", 0))
    batch, out = photos(32), torch.empty((32, 3, 224, 224), dtype=torch.float16, device="cuda:0")

    def work() -> None:
        reader.prepare(batch, out)
        torch.cuda.synchronize()

    work()
    start.wait(timeout=60)
    answers.put(32 * _calls_per_s(work, 1.0))


def _host_us() -> float:
    """Of Python a picture in a batch of 64, but for the calls into nvJPEG and CUDA."""
    import torch

    from penstock.engines.torch_serving.pictures import PictureReader

    made = photos(64)
    reader = PictureReader(NETWORK, torch.device("cuda", torch.cuda.current_device()))
    decoded = reader._decode(made, [reader._header(one) for one in made])

    def work() -> None:
        for one in made:
            reader._header(one)
        for found in decoded:
            reader._row(found)

    return 1e6 / (64 * _calls_per_s(work, 0.2))


def _differences() -> dict[str, dict[str, float]]:
    """By subsampling of the chroma, over 32 photo-like pictures."""
    import cv2
    import torch

    from penstock.engines.torch_serving.nvjpeg import GpuJpegs
    from penstock.engines.torch_serving.pictures import PictureReader

    device = torch.device("cuda", torch.cuda.current_device())
    reader, plain = PictureReader(LEVELS, device), PictureReader(LEVELS, device)
    plain._jpegs = GpuJpegs(device, is_grey=False, is_hardware_wanted=False)
    pixels = [cv2.imdecode(np.frombuffer(one, np.uint8), cv2.IMREAD_COLOR) for one in photos(32, seed=1)]
    samplings = {"4:4:4": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444, "4:2:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420}
    found = {}
    for name, factor in samplings.items():
        options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor, cv2.IMWRITE_JPEG_QUALITY, 92]
        encoded = [bytes(cv2.imencode(".jpg", one, options)[1]) for one in pixels]
        for one in (reader, plain):
            levels = difference(encoded, one, LEVELS)
            found[f"{name} by {one.decoder}"] = asdict(levels)
            print(f"{name} by {one.decoder} against the CPU's path, levels of 255: {levels}", flush=True)
    return found


Pixels = npt.NDArray[np.uint8]

# (width, height) and its share: ImageNet's most frequent ones.
PHOTO_SIZES = {(500, 375): 0.6, (375, 500): 0.15, (500, 333): 0.15, (333, 500): 0.05, (500, 500): 0.05}
_MASTERS = 12
_MASTER_SIDE = 640
_QUALITIES = (89, 97)
_LUMA, _CHROMA = 35.0, 10.0  # standard deviations of shapes: photographs differ in brightness more than in colour


def photos(count: int, *, seed: int = 0, sizes: dict[tuple[int, int], float] | None = None) -> list[bytes]:
    """Encoded JPEGs, the same for the same arguments and OpenCV; each its own crop, colours and quality."""
    random = np.random.default_rng(seed)
    shares = sizes or PHOTO_SIZES
    masters = [_master(random) for _ in range(min(_MASTERS, count))]
    chosen = random.choice(len(shares), count, p=list(shares.values()))
    every = list(shares)
    return [_photo(random, masters[i % len(masters)], *every[choice]) for i, choice in enumerate(chosen)]


def _photo(random: np.random.Generator, master: Pixels, width: int, height: int) -> bytes:
    scale = max(width, height) / _MASTER_SIDE
    if scale > 1:
        master = cv2.resize(master, None, fx=scale, fy=scale)
    left = int(random.integers(master.shape[1] - width + 1))
    top = int(random.integers(master.shape[0] - height + 1))
    crop = master[top : top + height, left : left + width]
    crop = crop[:: random.choice([-1, 1]), :: random.choice([-1, 1])]
    lit = cv2.convertScaleAbs(np.ascontiguousarray(crop), alpha=random.uniform(0.8, 1.1), beta=random.uniform(-15, 15))
    quality = int(random.integers(*_QUALITIES))
    return bytes(cv2.imencode(".jpg", lit, [cv2.IMWRITE_JPEG_QUALITY, quality])[1])


def _master(random: np.random.Generator) -> Pixels:
    """Clouds whose amplitude falls with frequency as in photographs, shapes with edges, and a sensor's grain."""
    side = _MASTER_SIDE
    canvas = np.full((side, side, 3), random.uniform(100, 150), np.float32)
    cells = 2
    while cells <= side:
        canvas += cv2.resize(_colors(random, (cells, cells), (2.0 / cells) ** 0.6), (side, side))
        cells *= 2
    for _ in range(30):
        corners = random.normal(0, random.uniform(0.05, 0.3), (int(random.integers(3, 8)), 2)) + random.uniform(0, 1, 2)
        shape = cv2.fillPoly(np.zeros((side, side), np.uint8), [np.int32(corners * side)], 255, cv2.LINE_AA)
        canvas += (shape / np.float32(255.0))[..., None] * _colors(random, (1, 1), 1.0)
    canvas += random.normal(0, random.uniform(3, 9), (side, side, 1)).astype(np.float32)
    return np.clip(canvas, 0, 255).astype(np.uint8)


def _colors(random: np.random.Generator, shape: tuple[int, int], strength: float) -> npt.NDArray[np.float32]:
    """(*shape, 3) around 0: mostly brightness, some colour."""
    brightness, color = random.normal(0, _LUMA, (*shape, 1)), random.normal(0, _CHROMA, (*shape, 3))
    return ((brightness + color) * strength).astype(np.float32)


if __name__ == "__main__":
    pass

    main()
