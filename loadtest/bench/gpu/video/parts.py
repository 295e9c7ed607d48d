"""How each piece is measured. One stack stays up from piece to piece; video programs are started anew for each."""

import argparse
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtest.bench.gpu.programs import CHECKOUT, PenstockUp
from loadtest.bench.gpu.video.clips import CAMERAS, FPS, clip_path, make_rubbish
from loadtest.bench.gpu.video.fleet import Fleet, FleetSetup
from loadtest.bench.gpu.video.nvdec import SHAPES, best_of, decode_alone
from loadtest.bench.gpu.video.plan import MODEL, BenchPiece, Folder
from loadtest.bench.gpu.video.usage import CardMeter
from loadtest.bench.gpu.video.verdict import SustainedSearch, below
from loadtest.bench.gpu.video.windows import Pacing, judged, measure, read_results, run_faults, search, try_count
from loadtest.bench.wire import BadAnswer
from penstock.gateway.workers.running_stacks import RunningStack, running_stacks
from penstock.gpu.mps.control import PIPE_DIRECTORY
from penstock_video.cli.engine import joinable, place_of, share_card

SHARE_WANTED, MOST_OF_ALONE = 0.95, 1.03  # of NVDEC alone
HAND_OVERS = ("device", "host")
HAND_OVER_SHARE = 0.9  # of what is held
CORE_STREAMS = (5, 14)  # 720p streams of a core that are tried first, and at most
_EXPORT_S = 300.0
_MOST_STARTS = 2  # of a stack that does not become ready: each costs minutes of a lent card


class GpuVideoBench:
    """What every piece uses. Raises BadAnswer from whatever it is asked."""

    def __init__(
        self, options: argparse.Namespace, work: Path, folder: Folder, card: CardMeter, environment: Path
    ) -> None:
        self.folder = folder
        self._options, self._work, self._card, self._environment = options, work, card, environment
        self._pacing = Pacing(options.seconds, options.bound_ms, options.settle, options.start_s)
        self._up: PenstockUp | None = None
        self._failed_starts = 0  # in a row

    def measure(self, piece: BenchPiece) -> dict[str, Any]:
        """What the piece found."""
        return _PARTS[piece.part](self, piece)

    def close(self) -> None:
        """The stack ends."""
        up, self._up = self._up, None
        if up is not None:
            up.__exit__(None, None, None)

    @staticmethod
    def in_words(piece: BenchPiece, found: dict[str, Any]) -> str:
        """For people who wait."""
        if piece.part == "nvdec":
            ready = ", ".join(f"{one['ready_s']:.1f}" for one in found["tries"])
            return f"{found['best']['rate']:,.0f} frames/s; its workers were ready after {ready} s"
        if piece.part in ("streams", "cpu"):
            full = f", the card's decoders full at {found['full_at']}" if found["full_at"] else ""
            return f"{found['held']} streams held, {found['missed'] or 'none'} missed{full}"
        return "see its file"

    def nvdec(self, piece: BenchPiece) -> dict[str, Any]:
        """All shapes in the first round of a folder, as clients of MPS where the programs are, and the best without;
        then the one that was best."""
        earlier, clip, mps = self.folder.found("nvdec", piece.camera, piece.number), self._clip(piece), self._of_mps()

        def alone(processes: int, threads: int, *, is_mps: bool) -> dict[str, Any]:
            seconds, environ = self._options.nvdec_seconds, mps if is_mps else None
            return decode_alone(clip, (processes, threads), seconds, self._card, mps=environ)

        if earlier:
            best = best_of(earlier["tries"])
            tries = [alone(best["processes"], best["threads"], is_mps=bool(best.get("is_mps") and mps))]
        else:
            tries = [alone(*shape, is_mps=mps is not None) for shape in SHAPES]
            best = best_of(tries)
            tries += [alone(best["processes"], best["threads"], is_mps=False)] if mps else []
        return {"best": best_of(tries), "tries": tries}

    def _of_mps(self) -> dict[str, str] | None:
        """The environment of clients of the stack's MPS, in which the video programs decode, too; None without MPS
        or does not start: NVDEC alone needs none."""
        if not self._options.is_gpu or self._options.mps == "off":
            return None
        try:
            self._stack()
        except (BadAnswer, OSError, subprocess.SubprocessError) as error:
            self._tell(f"NVDEC alone is measured without MPS: {error}")
            self.close()
            return None
        return environ_of_mps(joinable(running_stacks()))

    def streams(self, piece: BenchPiece) -> dict[str, Any]:
        """The search, by NVDEC alone of the same round where that was measured."""
        alone = self.folder.found("nvdec", piece.camera, piece.number)
        streams_alone = alone["best"]["rate"] / FPS if alone else CAMERAS[piece.camera].goal / SHARE_WANTED
        firsts = self._options.streams or self._firsts(piece, streams_alone)
        most = self._options.most or max(math.ceil(MOST_OF_ALONE * streams_alone), *firsts)
        found = self._search(self._setup(piece, self._options.decoder), firsts, most, piece)
        is_of_round = alone is not None and self.folder.has(BenchPiece("nvdec", piece.camera, piece.number))
        return found | {"alone_per_s": alone["best"]["rate"] if alone and is_of_round else 0.0}

    def _firsts(self, piece: BenchPiece, streams_alone: float) -> list[int]:
        """What an earlier round held and missed; else what the targets ask for and what NVDEC alone decodes."""
        earlier, goal = self.folder.found("streams", piece.camera, piece.number), CAMERAS[piece.camera].goal
        wanted = math.ceil(SHARE_WANTED * streams_alone)
        if earlier and earlier["held"]:
            return [int(earlier["held"]), int(earlier["missed"]) or wanted]
        return [max(wanted, goal), goal, math.floor(streams_alone)]

    def cpu(self, piece: BenchPiece) -> dict[str, Any]:
        """Every stream by the CPU, in a decode process of its own."""
        cores = len(os.sched_getaffinity(0))
        earlier = self.folder.found("cpu", piece.camera, piece.number)
        known = [int(earlier["held"]), int(earlier["missed"])] if earlier else []
        firsts = self._options.streams or [*filter(None, known)] or [CORE_STREAMS[0] * cores]
        most = self._options.most or CORE_STREAMS[1] * cores
        return self._search(self._setup(piece, "cpu"), firsts, most, piece) | {"machine_cores": cores}

    def hand_over(self, piece: BenchPiece) -> dict[str, Any]:
        """Rows in either memory at the same load, in an order drawn. failed: the ways that did not begin, and why."""
        count = (self._options.streams or [self._load(piece, HAND_OVER_SHARE)])[0]
        ways = list(HAND_OVERS)
        random.Random(piece.number).shuffle(ways)
        tries: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for way in ways:
            setup = self._setup(piece, self._options.decoder, way)
            try:
                with self._fleet(setup, count, f"{piece.name}-{way}") as fleet:
                    tried = try_count(fleet, count, self._window(fleet), self._pacing)
                if "full_at" in tried:
                    raise BadAnswer(tried["complaint"])
                tries[way] = tried
            except (BadAnswer, OSError) as error:
                failed[way] = str(error)
                self._tell(f"{piece.name}, {way}: {error}")
        if not tries:
            raise BadAnswer("; ".join(f"{way}: {why}" for way, why in failed.items()))
        return {"streams": count, "ways": tries, "failed": failed}

    def faults(self, piece: BenchPiece) -> dict[str, Any]:
        """At half load, every result written."""
        count = (self._options.streams or [self._load(piece, 0.5)])[0]
        results = self._work / "results"
        shutil.rmtree(results, ignore_errors=True)
        setup = self._setup(piece, self._options.decoder, results=results)
        rubbish = make_rubbish(self._work, self._clip(piece))
        with self._fleet(setup, count, piece.name) as fleet:
            spans = run_faults(fleet, results, rubbish, self._pacing.start_s)
        frames = read_results(results)
        shutil.rmtree(results, ignore_errors=True)
        return {"streams": count, "faults": [judged(span, frames) for span in spans]}

    def _search(self, setup: FleetSetup, firsts: list[int], most: int, piece: BenchPiece) -> dict[str, Any]:
        """The programs run on from number to number; streams come and go. decoders: that the card is known to make at
        once, which bound the numbers; 0: not known."""
        decoders = self._decoders() if setup.decoder == "nvdec" else 0
        if decoders:
            firsts, most = [min(one, below(decoders)) for one in firsts], min(most, decoders)
        begin = next(count for count in [*firsts, 1] if count)
        with ExitStack() as stack:
            fleet = self._fleet(setup, min(begin, most), piece.name)
            stack.enter_context(fleet)

            def attempt(count: int) -> dict[str, Any]:
                found = try_count(fleet, count, self._window(fleet), self._pacing)
                p99 = f", p99 {found['p99_ms']:.0f}" if "p99_ms" in found else ""
                after = f"after {found['waited_s']:.0f} s{p99}"
                self._tell(f"{piece.name}: {count} streams {after}: {found['complaint'] or 'held'}")
                return found

            finding = SustainedSearch(firsts, most, self._options.tries)
            found = search(finding, attempt, self._options.search_s or math.inf)
        found |= {
            "first_streams_after_s": found["tries"][0]["waited_s"],
            "decoder": setup.decoder,
            "decoders": decoders,
        }
        return found

    def _decoders(self) -> int:
        """By the command line, else by a search of this folder; 0 if numbers of streams are given."""
        if self._options.decoders is not None:
            return int(self._options.decoders)
        return 0 if self._options.streams else self.folder.full_at()

    def _window(self, fleet: Fleet) -> Callable[[], dict[str, Any]]:
        up = self._stack()
        return lambda: measure(fleet, up, self._card, self._pacing)

    def _load(self, piece: BenchPiece, share: float) -> int:
        """Of what was held, else of the target; no more than the card is known to have decoders for."""
        streams = self.folder.found("streams", piece.camera, piece.number)
        held = int(streams["held"]) if streams else 0
        load = max(1, math.floor(share * (held or CAMERAS[piece.camera].goal)))
        decoders = self._decoders() if self._options.decoder == "nvdec" else 0
        return min(load, below(decoders)) if decoders else load

    def _setup(self, piece: BenchPiece, decoder: str, hand_over: str = "", results: Path | None = None) -> FleetSetup:
        options = self._options
        mux = {"batch-size": options.batch_size, "batched-push-timeout": options.push_timeout_us}
        said = {key: value for key, value in mux.items() if value is not None}
        return FleetSetup(
            model=options.model,
            clip=self._clip(piece),
            decoder=decoder,
            programs=options.programs,
            hand_over=hand_over or options.hand_over,
            cameras_per_process=options.cameras_per_process,
            has_pinned_processes=options.pin_processes,
            sections={"streammux": said} if said else {},
            results=results,
        )

    def _fleet(self, setup: FleetSetup, count: int, name: str) -> Fleet:
        self._stack()
        return Fleet(setup, self._work / "logs" / name, count)

    def _clip(self, piece: BenchPiece) -> Path:
        return clip_path(self._work, CAMERAS[piece.camera])

    def _stack(self) -> PenstockUp:
        """`penstock up`, started where it does not run."""
        if self._up is not None and self._up.process.poll() is None:
            return self._up
        self.close()
        if self._failed_starts >= _MOST_STARTS:
            raise BadAnswer(f"penstock up did not become ready {_MOST_STARTS} times, and is not started again")
        self._failed_starts += 1
        options, home = self._options, self._work / "home"
        if options.model == MODEL:
            self._export(home)
        of_card = ("--mps", options.mps, "--allow-client-shm")  # rows in the card's memory are read by the engine
        flags = of_card if options.is_gpu else ("--engine", "embedded")
        up = PenstockUp(home, [options.model], *flags, *options.up_flags, environment=self._environment)
        self._up = up.__enter__()
        began_s = time.monotonic()
        up.wait(began_s + options.load_s)
        self._failed_starts = 0
        self._tell(f"penstock up is ready after {time.monotonic() - began_s:.0f} s")
        return up

    def _export(self, home: Path) -> None:
        """The model, by an interpreter that has torch; what lies there stays."""
        options = self._options
        if (home / "models" / MODEL / "config.pbtxt").is_file():
            return
        python = options.torch_python or _with_torch(self._environment)
        words = ["--home", str(home), "--instances", str(options.instances)]
        words += ["--batching", str(options.batching), "--max-batch", str(options.max_batch)]
        command = [python, "-m", "deploy.models.googlenet_torch", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, timeout=_EXPORT_S)
        if done.returncode:
            raise BadAnswer(f"{' '.join(command[1:])} made no model: {done.stderr.strip()[-500:]}")

    @staticmethod
    def _tell(sentence: str) -> None:
        print(f"gpu.video: {sentence}", file=sys.stderr, flush=True)


_PARTS: dict[str, Callable[[GpuVideoBench, BenchPiece], dict[str, Any]]] = {
    "nvdec": GpuVideoBench.nvdec,
    "streams": GpuVideoBench.streams,
    "hand-over": GpuVideoBench.hand_over,
    "cpu": GpuVideoBench.cpu,
    "faults": GpuVideoBench.faults,
}


def environ_of_mps(stack: RunningStack | None) -> dict[str, str] | None:
    """The environment of a client of that stack's MPS; None without MPS."""
    if stack is None or not stack.mps_directory:
        return None
    environ = {name: value for name, value in os.environ.items() if name != PIPE_DIRECTORY}
    share_card(place_of(stack, ""), environ)
    return environ


def _with_torch(environment: Path) -> str:
    """The first interpreter that has it; this one where none has, which then says so."""
    for python in (sys.executable, str(environment / "bin" / "python")):
        try:
            done = subprocess.run([python, "-c", "import torch"], capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return sys.executable
