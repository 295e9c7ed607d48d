"""`penstock video run` as a child of the bench: what it answered in a stretch, and what that cost."""

import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import psutil

from loadtest.bench.child import Child
from penstock_load.measure.buckets import Buckets, latency_in
from penstock_load.witness.process_cpu import CpuMeter

START_S, STOP_S, ASK_S, LOOK_S = 120.0, 20.0, 5.0, 0.1
WARM_FRAMES = 16  # of each source, before anything is measured
_DECODING = "penstock_video_decode_seconds_sum"


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """Of a running program. inferred, drops: by source, by reason. latency: of frames, their packets' coming to sinks.

    program_ms, decode_ms, stack_ms: of CPU a frame, of the program itself, its decode processes, and the stack.
    decoding_ms: of decode_ms, what the processes say that decoding took.
    """

    seconds: float
    inferred: tuple[int, ...]
    drops: Mapping[str, int]
    latency: Buckets
    program_ms: float
    decode_ms: float
    stack_ms: float
    decoding_ms: float
    frames: int = 0  # of all sources, also those that were not inferred

    @property
    def cpu_ms(self) -> float:
        """Of all a frame."""
        return self.program_ms + self.decode_ms + self.stack_ms

    @property
    def rate(self) -> float:
        """Frames a second of all sources."""
        return sum(self.inferred) / self.seconds


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB of a program with its decode processes. pss: what processes share counts once in all. uss: theirs alone."""

    pss_mib: float
    uss_mib: float
    processes: int


class _ProgramStream(msgspec.Struct):
    """What the control API says of a source, as far as it is used here."""

    inferred: int
    drops: dict[str, int]
    frames: int = 0


class _ProgramStreams(msgspec.Struct):
    streams: tuple[_ProgramStream, ...]


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    inferred: tuple[int, ...]
    frames: int
    drops: Mapping[str, int]
    latency: Buckets
    cpu_s: tuple[float, float, float, float]


class VideoProgram:
    """A context: the program without sinks, its control API on a port of its own. Raises BadAnswer."""

    def __init__(
        self, program: Sequence[str], stack: CpuMeter, model: str, sources: Sequence[Path], port: int, *flags: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """program: the command `penstock`. stack: that it joins. environ: this process's by default."""
        named = [word for path in sources for word in ("--source", str(path))]
        command = [*program, "video", "run", "--model", model, *named, *flags]
        self._command = [*command, "--api-port", str(port), "--no-progress", "--log-level", "error"]
        self._url, self._count, self._stack, self._environ = f"http://127.0.0.1:{port}", len(sources), stack, environ
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-video-log-")

    def __enter__(self) -> Self:
        """Returns when every source is under way."""
        log = Path(self._folder.name) / "video.log"
        self._child = Child("penstock video run", self._command, log, self._environ)
        try:
            self._child.wait(self._is_warm, time.monotonic() + START_S, LOOK_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end(STOP_S)
        self._folder.cleanup()

    def measure(self, seconds: float) -> ProgramRun:
        """What comes of so many seconds."""
        before = self._look()
        time.sleep(seconds)
        after = self._look()
        inferred = tuple(b - a for a, b in zip(before.inferred, after.inferred, strict=True))
        drops = {reason: count - before.drops.get(reason, 0) for reason, count in after.drops.items()}
        per_frame = 1000 / max(sum(inferred), 1)
        own, decode, stack, decoding = ((b - a) * per_frame for a, b in zip(before.cpu_s, after.cpu_s, strict=True))
        latency = after.latency.since(before.latency)
        frames = after.frames - before.frames
        return ProgramRun(after.at - before.at, inferred, drops, latency, own, decode, stack, decoding, frames)

    def memory(self) -> Memory:
        """As it is now."""
        return memory_of(CpuMeter(self._root))

    @property
    def _root(self) -> psutil.Process:
        return psutil.Process(self._child.process.pid)

    def _look(self) -> _Look:
        streams = self._streams()
        page = self._ask("/metrics")
        drops: dict[str, int] = {}
        for stream in streams:
            for reason, count in stream.drops.items():
                drops[reason] = drops.get(reason, 0) + count
        root = self._root
        own = root.cpu_times()
        whole_s, own_s = CpuMeter(root).read_s(), own.user + own.system
        return _Look(
            at=time.monotonic(),
            inferred=tuple(stream.inferred for stream in streams),
            frames=sum(stream.frames for stream in streams),
            drops=drops,
            latency=latency_in(page),
            cpu_s=(own_s, whole_s - own_s, self._stack.read_s(), _decoding_s(page)),
        )

    def _streams(self) -> tuple[_ProgramStream, ...]:
        return msgspec.json.decode(self._ask("/v1/streams"), type=_ProgramStreams).streams

    def _is_warm(self) -> bool:
        try:
            streams = self._streams()
        except OSError:  # it does not listen yet
            return False
        return len(streams) == self._count and all(stream.inferred >= WARM_FRAMES for stream in streams)

    def _ask(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=ASK_S) as answer:
            page: bytes = answer.read()
        return page.decode()


def memory_of(program: CpuMeter) -> Memory:
    """Of its processes, as they are now."""
    found = []
    for process in program.processes():
        with suppress(psutil.NoSuchProcess):
            found.append(process.memory_full_info())
    return Memory(sum(one.pss for one in found) / 2**20, sum(one.uss for one in found) / 2**20, len(found))


def _decoding_s(page: str) -> float:
    """CPU seconds of decoding over all sources, as their processes reported so far."""
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(_DECODING))
