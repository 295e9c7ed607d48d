"""What a preview costs: a drawn picture of host memory made a JPEG by libjpeg-turbo, and by nvJPEG on the card.

    python -m loadtest.bench.gpu.previews

The same picture, both ways in turn, one thread; the median of each way's repetitions, and the thread's CPU time: a
thread that waits for the card costs no core. Without a card the first way alone.
"""

import statistics
import time
from collections.abc import Mapping

import cv2
import numpy as np

from loadtest.bench.gpu.pictures import photos
from penstock_video.errors import PipelineError
from penstock_video.gpu.device import Device
from penstock_video.sinks.jpeg import JpegEncoder, JpegKind, jpeg_encoder
from penstock_video.types import ByteArray

SIZES = ((640, 360), (1280, 720), (1920, 1080))
REPETITIONS = 200
WARM_UP_REPETITIONS = 10


def photo(width: int, height: int) -> ByteArray:
    """A photo-like RGB picture."""
    bgr = cv2.imdecode(np.frombuffer(photos(1, sizes={(width, height): 1.0})[0], np.uint8), cv2.IMREAD_COLOR)
    picture: ByteArray = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB).astype(np.uint8, copy=False)
    return picture


def rates(encoders: Mapping[str, JpegEncoder], picture: ByteArray) -> dict[str, tuple[float, float, int]]:
    """(median ms of a picture, CPU ms of the thread a picture, bytes) by each way."""
    walls: dict[str, list[float]] = {name: [] for name in encoders}
    cpu_s, size_bytes = dict.fromkeys(encoders, 0.0), dict.fromkeys(encoders, 0)
    for repetition in range(WARM_UP_REPETITIONS + REPETITIONS):
        for name, encoder in encoders.items():
            began, cpu_began = time.perf_counter(), time.thread_time()
            size_bytes[name] = len(encoder.encode(picture))
            if repetition >= WARM_UP_REPETITIONS:
                walls[name].append(time.perf_counter() - began)
                cpu_s[name] += time.thread_time() - cpu_began
    return {
        name: (1e3 * statistics.median(walls[name]), 1e3 * cpu_s[name] / REPETITIONS, size_bytes[name])
        for name in encoders
    }


def main() -> None:
    """Print the table."""
    encoders = {"libjpeg-turbo": jpeg_encoder(JpegKind.CPU, None)}
    try:
        device = Device.open()
        encoders["nvJPEG"] = jpeg_encoder(JpegKind.NVJPEG, device)
        print(f"on {device.name}")
    except PipelineError as error:
        print(f"without nvJPEG: {error.message}")
    print("size        way            median ms  CPU ms  bytes")
    for size in SIZES:
        for name, (wall_ms, cpu_ms, size_bytes) in rates(encoders, photo(*size)).items():
            print(f"{f'{size[0]}x{size[1]}':<11} {name:<14} {wall_ms:9.3f} {cpu_ms:7.3f} {size_bytes:7}")
    for encoder in encoders.values():
        encoder.close()


if __name__ == "__main__":
    main()
