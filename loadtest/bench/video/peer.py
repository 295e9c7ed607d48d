"""The peer: a plain loop of OpenCV's VideoCapture and onnxruntime, as tutorials have it, at its best.

    python -m loadtest.bench.video.peer CLIP MODEL_FOLDER SECONDS THREADS WAY

THREADS: onnxruntime's, within a call. WAY: plain, or ahead for a second thread that reads and decodes meanwhile. It
prints frames a second and CPU milliseconds a frame. It may use all that ours uses, so that only the architecture
differs: the same conversion, the same parser, the same ONNX file, OpenCV's own decoder threads. It has no tracker, no
rules, no sinks, no metrics, no second process and no way to survive a bad stream.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import cv2
import numpy as np
import numpy.typing as npt
import onnxruntime

from penstock.engines.config_pbtxt import read_config
from penstock.protocol.inference import InferResponse, tensor_from_numpy
from penstock.vision.card import card_from_config
from penstock.vision.preprocess import geometry_of
from penstock.vision.results import parse
from penstock_video.sources.child_link import prepare_row

WARM_UP_S, AHEAD = 1.0, 4
Pixels = npt.NDArray[np.uint8]


def pictures(clip: str) -> Iterator[Pixels]:
    """The clip's, again and again."""
    while True:
        capture = cv2.VideoCapture(clip, cv2.CAP_FFMPEG)
        if not capture.isOpened():
            raise OSError(f"OpenCV does not open {clip}")
        while True:
            is_read, picture = capture.read()
            if not is_read:
                break
            yield picture
        capture.release()


def read_ahead(clip: str) -> Iterator[Pixels]:
    """The same, decoded by a thread of its own."""
    waiting: queue.Queue[Pixels] = queue.Queue(AHEAD)

    def read() -> None:
        for picture in pictures(clip):
            waiting.put(picture)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield waiting.get(timeout=30.0)


def detector(folder: Path, threads: int) -> Callable[[Pixels], object]:
    """What a picture becomes: the parser's result."""
    card = card_from_config(read_config(folder / "config.pbtxt"))
    assert card is not None, f"{folder} is an image model"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def detect(picture: Pixels) -> object:
        height, width = picture.shape[:2]
        row = prepare_row(picture, card.prepare_spec, is_bgr=True)
        arrays = session.run(names, {card.input_name: row[None]})
        outputs = tuple(tensor_from_numpy(name, array) for name, array in zip(names, arrays, strict=True))
        response = InferResponse(folder.name, "1", outputs)
        return parse(card, response, 0, geometry_of(width, height, card.prepare_spec))

    return detect


def main(arguments: list[str]) -> NoReturn:
    """Ends the process with 0 when it was measured."""
    clip, folder, seconds, threads, way = arguments
    source = read_ahead(clip) if way == "ahead" else pictures(clip)
    detect = detector(Path(folder), int(threads))
    begin, count, cpu_s = time.perf_counter(), 0, 0.0
    started = 0.0
    for picture in source:
        detect(picture)
        now = time.perf_counter()
        if not started:
            if now - begin >= min(WARM_UP_S, float(seconds)):
                started, cpu_s = now, time.process_time()
            continue
        count += 1
        if now - started >= float(seconds):
            break
    elapsed_s = time.perf_counter() - started
    print(f"{count / elapsed_s} {(time.process_time() - cpu_s) * 1000 / count}", flush=True)
    os._exit(0)  # OpenCV's threads are left as they are: the reading one is within it


if __name__ == "__main__":
    main(sys.argv[1:])
