"""Rounds of the video bench, and the clips that they play."""

import logging
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import psutil
from av.video.stream import VideoStream

from deploy.models.street.clip import make_clip
from loadtest.bench.stages import StageRun
from loadtest.bench.video.figures import ModelRounds, StreamRounds
from loadtest.bench.video.limits import LOADS, THREADS, EngineAlone, EngineLoad, Preparing, decode_alone
from loadtest.bench.video.program import ProgramRun, VideoProgram
from loadtest.bench.wire import BadAnswer
from penstock.gateway.workers.running_stacks import UP_CHILD, RunningStack
from penstock_load.witness.process_cpu import CpuMeter
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import Network

SIZE, FPS = (1280, 720), 30
BITS_PER_S = 3_000_000
_SEED, _TIME_BASE = 4, Fraction(1, 90_000)
_OPTIONS = {"preset": "medium", "maxrate": str(BITS_PER_S * 3 // 2), "bufsize": str(BITS_PER_S * 2)}
_GOP = 60


def make_street(path: Path, seconds: float) -> None:
    """H.264 (high profile, B-frames, a keyframe every two seconds) of about 3 Mbit/s; the same pictures each time.

    The street is of the noisy lens, whose grain a codec has to carry, as a camera's at dusk. Raises OSError.
    """
    new = path.with_suffix(".new.mp4")
    clip = make_clip(_SEED, seconds, FPS, size=SIZE, scenario="noise")
    logging.getLogger("libav").setLevel(logging.ERROR)
    with av.open(str(new), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options=_OPTIONS)
        stream.width, stream.height = SIZE
        stream.pix_fmt, stream.bit_rate, stream.gop_size = "yuv420p", BITS_PER_S, _GOP
        for picture, _ in clip.frames():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "bgr24")))
        container.mux(stream.encode(None))
    new.replace(path)


def at_rate(path: Path, source: Path, fps: float) -> None:
    """The same packets, played at another rate: what a camera of that rate would send, at the same bits a picture."""
    with av.open(str(source)) as container, av.open(str(path), "w") as copy:
        stream = container.streams.video[0]
        template = copy.add_stream_from_template(stream)
        assert isinstance(template, VideoStream)
        template.time_base = _TIME_BASE
        for packet in container.demux(stream):
            if packet.pts is None or packet.dts is None or packet.time_base is None:
                continue  # the empty one at the end
            scale = packet.time_base * Fraction(FPS) / Fraction(fps).limit_denominator(1000) / _TIME_BASE
            packet.pts, packet.dts = round(packet.pts * scale), round(packet.dts * scale)
            packet.duration = round((packet.duration or 0) * scale)
            packet.stream, packet.time_base = template, _TIME_BASE
            copy.mux(packet)


def frames_of(path: Path) -> int:
    """How many pictures a clip says it has."""
    with av.open(str(path)) as container:
        return container.streams.video[0].frames


CALIBRATION_S, SETTLE_S, PEER_S = 1.0, 1.0, 60.0
ROWS = 16  # pictures that the engine alone is asked about
OVERLOAD = 1.5
PEERS = (("plain", 1), ("plain", 2), ("ahead", 1), ("ahead", 2))


@dataclass(frozen=True, slots=True)
class VideoBench:
    """What all rounds share. clip: frames long. folder: of the bench's own files. models: where each model lies.

    flags: of every `penstock video run`.
    """

    stack: RunningStack
    engine: Engine
    preparing: Preparing
    clip: Path
    frames: int
    seconds: float
    folder: Path
    models: dict[str, Path]
    flags: tuple[str, ...] = ()


class ModelBench:
    """One stream of one model, beside its limit and the peer."""

    def __init__(self, bench: VideoBench, model: str) -> None:
        """Finds how the engine and the decoder are asked best. Raises BadAnswer, InferFailed, ModelUnusable."""
        self.model, self.rounds = model, ModelRounds()
        self._bench = bench
        self._network: Network = bench.engine.network(model, 30.0)
        rows = bench.preparing.rows(self._network.spec, ROWS)
        self._alone = EngineAlone(bench.engine, self._network, rows)
        loads = [EngineLoad(*load) for load in LOADS if load[0] <= max(self._network.max_batch_size, 1)]
        self.load = max(loads, key=lambda load: self._alone.measure(load, min(CALIBRATION_S, bench.seconds)))
        self._times = 1
        best = max((self._decode(threads) for threads in THREADS), key=lambda found: found[1].rate)
        self._threads = best[0]
        self._times = max(round(best[1].rate * bench.seconds / bench.frames), 1)

    @property
    def load_text(self) -> str:
        """For people."""
        return f"{self.load.calls} calls of {self.load.rows} at once"

    def run_round(self) -> None:
        """Everything once."""
        bench, rounds = self._bench, self.rounds
        turns: list[Callable[[], object]] = [
            lambda: rounds.decode.append(self._decode(self._threads)[1]),
            lambda: rounds.prepare.append(bench.preparing.alone(self._network.spec, bench.seconds)),
            lambda: rounds.engine.append(self._alone.measure(self.load, bench.seconds)),
            lambda: rounds.ours.append(_stretch(bench, self.model, [bench.clip], "--loop")),
            *(lambda way=way, threads=threads: self._peer(way, threads) for way, threads in PEERS),
        ]
        random.shuffle(turns)
        for turn in turns:
            turn()

    def _decode(self, threads: int) -> tuple[int, StageRun]:
        return threads, decode_alone(self._bench.clip, self._bench.frames, threads, self._times)

    def _peer(self, way: str, threads: int) -> None:
        bench = self._bench
        arguments = [str(bench.clip), str(bench.models[self.model]), str(bench.seconds), str(threads), way]
        command = [sys.executable, "-m", "loadtest.bench.video.peer", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_S + bench.seconds)
        if done.returncode:
            raise BadAnswer(f"the peer failed: {done.stderr.strip()[-500:]}")
        rate, cpu_ms = map(float, done.stdout.split())
        name = f"{way}, {threads} thread{'s' * (threads > 1)}"
        self.rounds.peers.setdefault(name, []).append(StageRun(rate, cpu_ms))


class StreamsBench:
    """Files that wait, one to many, then as many cameras as files at more than what the files had."""

    def __init__(self, bench: VideoBench, model: str, counts: Sequence[int]) -> None:
        self.model, self.rounds = model, StreamRounds()
        self._bench, self._counts = bench, tuple(counts)

    def run_round(self, *, with_overload: bool) -> None:
        """Every number of streams once, the cameras behind the files that say what they can be."""
        counts = list(self._counts)
        random.shuffle(counts)
        for count in counts:
            self._files(count)
        if with_overload:
            self._cameras(max(self._counts))

    def _files(self, count: int) -> None:
        bench = self._bench
        with _program(bench, self.model, [bench.clip] * count, "--loop") as program:
            self.rounds.streams.setdefault(count, []).append(_settled(program, bench.seconds))
            if count == max(self._counts):
                self.rounds.memory.append(program.memory())

    def _cameras(self, count: int) -> None:
        bench = self._bench
        files = self.rounds.streams[count][-1]
        clip = bench.folder / "camera.mp4"
        at_rate(clip, bench.clip, OVERLOAD * files.rate / count)
        overloaded = _stretch(bench, self.model, [clip] * count, "--loop", "--realtime")
        self.rounds.capacity.append(files)
        self.rounds.offered.append(OVERLOAD * files.rate)
        self.rounds.overload.append(overloaded)


def _stretch(bench: VideoBench, model: str, sources: Sequence[Path], *flags: str) -> ProgramRun:
    with _program(bench, model, sources, *flags) as program:
        return _settled(program, bench.seconds)


def _settled(program: VideoProgram, seconds: float) -> ProgramRun:
    with suppress(ValueError):
        program.measure(min(SETTLE_S, seconds))
    return program.measure(seconds)


def _program(bench: VideoBench, model: str, sources: Sequence[Path], *flags: str) -> VideoProgram:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meter = CpuMeter(psutil.Process(bench.stack.process_id))
    bond = [sys.executable, "-m", UP_CHILD, str(os.getpid())]  # it ends with the bench, however that ends
    return VideoProgram(bond, meter, model, sources, port, *bench.flags, *flags)
