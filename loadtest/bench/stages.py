"""The image endpoint's stages alone, by the gateway's own functions, on every core: what no gateway can beat."""

import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Self

import cv2
import onnxruntime

from penstock.gateway.batching.merging import merge_rows
from penstock.protocol.engine import ModelConfig
from penstock.protocol.inference import Array, InferResponse, Tensor, tensor_from_numpy
from penstock.vision.card import VisionCard
from penstock.vision.decode import DecodedImage, decode
from penstock.vision.preprocess import geometry_of, least_decoded_size, prepare
from penstock.vision.results import parse
from penstock.vision.spec import PrepareSpec


@dataclass(frozen=True, slots=True)
class StageRun:
    """rate: images a second on all cores together. cpu_ms: milliseconds of CPU an image."""

    rate: float
    cpu_ms: float


class StageProcesses:
    """One warm process a core, each working through the same pictures."""

    def __init__(self, pictures: Sequence[bytes], spec: PrepareSpec) -> None:
        self._count = len(os.sched_getaffinity(0))
        self._pictures, self._spec = tuple(pictures), spec
        self._pool = ProcessPoolExecutor(self._count, get_context("spawn"), cv2.setNumThreads, (1,))

    def __enter__(self) -> Self:
        self.decode_alone(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def decode_alone(self, seconds: float) -> StageRun:
        """Encoded bytes to pixels."""
        return self._together(_decode_once, seconds)

    def resize_alone(self, seconds: float) -> StageRun:
        """Pixels to the network's input: resize, normalise, lay out."""
        return self._together(_resize_once, seconds)

    def outputs_alone(self, card: VisionCard, outputs: Sequence[dict[str, Array]], seconds: float) -> StageRun:
        """The engine's outputs of each picture to results. outputs: by name, batch axis and all."""
        return self._shared(_parse_once, (self._pictures, card, tuple(outputs), seconds))

    def engine_alone(self, file: Path, tensors: Sequence[Tensor], seconds: float) -> StageRun:
        """ONNX Runtime with one thread in each process: what the embedded engine cannot beat. file: ONNX."""
        return self._shared(_infer_once, (file, tuple((one.name, one.to_numpy()) for one in tensors), seconds))

    def _together(self, stage: Callable[[tuple[bytes, ...], PrepareSpec, float], StageRun], seconds: float) -> StageRun:
        return self._shared(stage, (self._pictures, self._spec, seconds))

    def _shared(self, stage: Callable[..., StageRun], arguments: tuple[object, ...]) -> StageRun:
        running = [self._pool.submit(stage, *arguments) for _ in range(self._count)]
        runs = [future.result() for future in running]
        rate = sum(one.rate for one in runs)
        return StageRun(rate, sum(one.cpu_ms * one.rate for one in runs) / rate)


def raw_tensors(pictures: Sequence[bytes], spec: PrepareSpec, config: ModelConfig) -> list[Tensor]:
    """What the engine gets for each picture, batch axis and all."""
    arrays = [prepare(_decode(picture, spec), spec)[0] for picture in pictures]
    name, shape = config.inputs[0].name, config.inputs[0].shape
    calls = [merge_rows([array], declared_shape=shape, max_batch_size=config.max_batch_size)[0] for array in arrays]
    return [tensor_from_numpy(name, call.array) for call in calls]


def _decode(picture: bytes, spec: PrepareSpec) -> DecodedImage:
    return decode(picture, spec.color, at_least=least_decoded_size(spec))


def _decode_once(pictures: tuple[bytes, ...], spec: PrepareSpec, seconds: float) -> StageRun:
    return _run_stage([functools.partial(_decode, picture, spec) for picture in pictures], seconds)


def _resize_once(pictures: tuple[bytes, ...], spec: PrepareSpec, seconds: float) -> StageRun:
    return _run_stage([functools.partial(prepare, _decode(picture, spec), spec) for picture in pictures], seconds)


def _parse_once(
    pictures: tuple[bytes, ...], card: VisionCard, outputs: tuple[dict[str, Array], ...], seconds: float
) -> StageRun:
    jobs = []
    for picture, arrays in zip(pictures, outputs, strict=True):
        pixels = _decode(picture, card.prepare_spec)
        geometry = geometry_of(pixels.source_width, pixels.source_height, card.prepare_spec)
        response = InferResponse("m", "1", tuple(tensor_from_numpy(name, array) for name, array in arrays.items()))
        jobs.append(functools.partial(parse, card, response, 0, geometry))
    return _run_stage(jobs, seconds)


@functools.lru_cache(1)
def _session(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _infer_once(file: Path, inputs: tuple[tuple[str, Array], ...], seconds: float) -> StageRun:
    session = _session(file)
    return _run_stage([functools.partial(session.run, None, {name: array}) for name, array in inputs], seconds)


def _run_stage(jobs: Sequence[Callable[[], object]], seconds: float) -> StageRun:
    started, cpu_started, count = time.perf_counter(), time.process_time(), 0
    for job in itertools.cycle(jobs):
        job()
        count += 1
        if time.perf_counter() - started >= seconds:
            break
    return StageRun(count / (time.perf_counter() - started), (time.process_time() - cpu_started) * 1000 / count)
