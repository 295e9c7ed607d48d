"""The stages of one stream alone, on all cores: FFmpeg's decoding, the child's conversion, the pipeline's engine."""

import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import av
import cv2
import numpy as np

from loadtest.bench.stages import StageRun
from loadtest.bench.wire import BadAnswer
from penstock.vision.spec import ColorFormat, PrepareSpec
from penstock_video.decode.codec import Painter
from penstock_video.infer.calls import RowsResult
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import Network
from penstock_video.sources.child_link import prepare_row
from penstock_video.types import RowArray

MAX_FRAMES = 48  # of the clip, decoded, in each process
THREADS = (1, 2, 3, 4)
LOADS = ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (4, 2), (4, 3), (8, 2))  # (rows of a call, calls at once)
LATE_S, DEADLINE_S = 30.0, 20.0
# What the decode process asks of glibc, asked before numpy is there: a picture's memory is not given back each time.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How the engine is asked: so many rows in a call, so many calls at once."""

    rows: int
    calls: int


def decode_alone(clip: Path, frames: int, threads: int, times: int) -> StageRun:
    """FFmpeg on all cores, into nothing; PyAV's own FFmpeg where the program is not here. Raises BadAnswer."""
    program = shutil.which("ffmpeg")
    if program is None:
        return _decode_by_pyav(clip, threads, times)
    command = [program, "-v", "error", "-nostdin", "-stream_loop", str(times - 1), "-threads", str(threads)]
    started, cpu_started = time.perf_counter(), _children_s()
    done = subprocess.run([*command, "-i", str(clip), "-an", "-f", "null", "-"], capture_output=True, text=True)
    if done.returncode:
        raise BadAnswer(f"ffmpeg did not decode {clip}: {done.stderr.strip()}")
    elapsed_s, count = time.perf_counter() - started, frames * times
    return StageRun(count / elapsed_s, (_children_s() - cpu_started) * 1000 / count)


def _decode_by_pyav(clip: Path, threads: int, times: int) -> StageRun:
    started, cpu_started, count = time.perf_counter(), time.process_time(), 0
    for _ in range(times):
        with av.open(str(clip)) as container:
            context = container.streams.video[0].codec_context
            context.thread_count, context.thread_type = threads, "AUTO"
            count += sum(1 for _ in container.decode(video=0))
    return StageRun(count / (time.perf_counter() - started), (time.process_time() - cpu_started) * 1000 / count)


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


class Preparing:
    """A warm process a core that makes the network's rows of the clip's pictures, as a decode process does."""

    def __init__(self, clip: Path) -> None:
        self._clip = str(clip)
        self._count = len(os.sched_getaffinity(0))
        before = {name: os.environ.get(name) for name in _KEEP_MEMORY}
        os.environ.update(_KEEP_MEMORY)
        try:
            self._pool = ProcessPoolExecutor(self._count, get_context("spawn"), _begin, (self._clip,))
            for running in [self._pool.submit(time.sleep, 0.2) for _ in range(self._count)]:
                running.result()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def close(self) -> None:
        """The processes end."""
        self._pool.shutdown(cancel_futures=True)

    def alone(self, spec: bytes, seconds: float) -> StageRun:
        """Pictures to rows: colours, resizing, normalising, layout."""
        running = [self._pool.submit(_prepare_once, spec, seconds) for _ in range(self._count)]
        runs = [future.result() for future in running]
        rate = sum(run.rate for run in runs)
        return StageRun(rate, sum(run.cpu_ms * run.rate for run in runs) / rate)

    def rows(self, spec: bytes, count: int) -> list[RowArray]:
        """The first pictures' rows."""
        return self._pool.submit(_rows, spec, count).result()


_pictures: list[av.VideoFrame] = []  # of this process of the pool


def _begin(clip: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the bench's to hear
    cv2.setNumThreads(1)
    with av.open(clip) as container:
        _pictures.extend(itertools.islice(container.decode(video=0), MAX_FRAMES))


def _prepare_once(spec: bytes, seconds: float) -> StageRun:
    prepare, painter, slot = PrepareSpec.unpack(spec), Painter(), _Slot()
    started, cpu_started, count = time.perf_counter(), time.process_time(), 0
    for picture in itertools.cycle(_pictures):
        _row(painter, picture, prepare, slot)
        count += 1
        if time.perf_counter() - started >= seconds:
            break
    return StageRun(count / (time.perf_counter() - started), (time.process_time() - cpu_started) * 1000 / count)


def _rows(spec: bytes, count: int) -> list[RowArray]:
    painter, prepare = Painter(), PrepareSpec.unpack(spec)
    return [_row(painter, picture, prepare, _Slot()).copy() for picture in _pictures[:count]]


def _row(painter: Painter, picture: av.VideoFrame, spec: PrepareSpec, slot: "_Slot") -> RowArray:
    is_bgr = spec.color is ColorFormat.BGR
    pixels = painter.bgr(picture) if is_bgr else painter.rgb(picture)
    return prepare_row(pixels, spec, slot, is_bgr=is_bgr)


class _Slot:
    """Memory that is written again and again, as a ring's slot is."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def __call__(self, shape: tuple[int, ...], dtype: "np.typing.DTypeLike") -> RowArray:
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if self._bytes.nbytes < size_bytes:
            self._bytes = np.empty(size_bytes, np.uint8)
        row: RowArray = self._bytes[:size_bytes].view(dtype).reshape(shape)
        return row


class EngineAlone:
    """The pipeline's engine in a closed loop: prepared rows, a number of calls at once."""

    def __init__(self, engine: Engine, network: Network, rows: Sequence[RowArray]) -> None:
        self._engine, self._network = engine, network
        self._rows = list(itertools.islice(itertools.cycle(rows), len(rows) + max(rows for rows, _ in LOADS)))
        self._changed = threading.Condition()
        self._answered = self._in_flight = self._next = 0
        self._error = ""

    def measure(self, load: EngineLoad, seconds: float) -> float:
        """Rows a second. Raises BadAnswer where one was not answered."""
        self._error, self._answered = "", 0
        until = time.monotonic() + seconds
        started = time.perf_counter()
        with self._asking(load, until):
            with self._changed:
                self._changed.wait_for(lambda: bool(self._error), seconds)
            elapsed_s, answered = time.perf_counter() - started, self._answered
        if self._error:
            raise BadAnswer(f"the engine did not answer {self._network.name}: {self._error}")
        return answered / elapsed_s

    @contextmanager
    def _asking(self, load: EngineLoad, until: float) -> Iterator[None]:
        for _ in range(load.calls):
            self._ask(load, until)
        yield
        with self._changed:
            if not self._changed.wait_for(lambda: self._in_flight == 0, LATE_S):
                raise BadAnswer(f"the engine did not answer {self._network.name} within {LATE_S:g} s")

    def _ask(self, load: EngineLoad, until: float) -> None:
        with self._changed:
            first = self._next
            self._next = (first + load.rows) % (len(self._rows) - load.rows)
            self._in_flight += 1

        def done(answer: RowsResult) -> None:
            with self._changed:
                self._answered += load.rows
                self._in_flight -= 1
                self._error = self._error or (str(answer.error) if answer.error is not None else "")
                is_over = bool(self._error) or time.monotonic() >= until
                self._changed.notify_all()
            if not is_over:
                self._ask(load, until)

        rows = self._rows[first : first + load.rows]
        deadline = time.monotonic() + DEADLINE_S
        self._engine.submit(self._network, rows, deadline=deadline, taken=_nothing, done=done)


def _nothing() -> None:
    """Does nothing: the rows are written already."""
