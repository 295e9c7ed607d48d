"""Video on one GPU: what NVDEC alone decodes, and the number of streams that the product sustains.

    python -m loadtest.bench.gpu.video --out gpu-video                  # three rounds; measured pieces are not repeated
    python -m loadtest.bench.gpu.video --out gpu-video --only nvdec,streams --rounds 1
    python -m loadtest.bench.gpu.video.report gpu-video                 # gpu-video.md and .json, on any machine

nvdec      Processes and threads that only decode, in several shapes, as clients of the stack's MPS and without: the
           most frames a second.
streams    `penstock up --engine triton` with GoogLeNet, and video programs beside it whose cameras are a clip each,
           played in a loop at its own speed, tracker on, every frame inferred. The highest sustained number: of the
           due frames at most 0.1 % dropped and 99.5 to 100.5 % answered, no stream more than 3 frames behind, 99 % of
           the answers within 100 ms of the frame's capture, which is when its packet was due. A GPU makes a limited
           number of decoders, however small the pictures (an H200 at most 288). Then the streams that got one are
           counted, and the search continues below that number (--decoders).
detector   The same with 1080p30 H.264 and YOLOX-S (26.7 GFLOPs, random weights), every frame inferred; 95 % of the
           answers within 100 ms.
tracked    The same with every third frame inferred, and tracks between.

--short is one round of short windows: 0.95 of NVDEC alone, or the target; if that is missed, the target. About 60 s a
camera, and 25 s for the start of the stack.

--no-gpu tries the bench without a GPU: the CPU decodes, the engine embedded in the gateway answers.
"""

import argparse
import importlib.metadata
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtest.bench.child import CHECKOUT
from loadtest.bench.gpu.programs import PenstockUp, python_with_torch
from loadtest.bench.gpu.video.clips import CAMERAS, FPS, clip_path, facts_of, make_clips
from loadtest.bench.gpu.video.fleet import PUSH_TIMEOUT_US, Fleet, FleetSetup
from loadtest.bench.gpu.video.machine import CardMeter
from loadtest.bench.gpu.video.nvdec import SHAPES, best_of, decode_alone
from loadtest.bench.gpu.video.pieces import GOOGLENET, LOADS, PARTS, YOLOX, BenchPiece, Folder, pieces_of
from loadtest.bench.gpu.video.windows import Pacing, SustainedSearch, below, measure, search, try_count
from loadtest.bench.report import chosen_of, conditions
from loadtest.bench.wire import BadAnswer
from penstock.engines.triton.runtime import default_environment
from penstock.gateway.workers.running_stacks import RunningStack, running_stacks
from penstock.gpu.mps.control import PIPE_DIRECTORY
from penstock.gpu.nvml import read_cards
from penstock.gpu.telemetry.sampler import TelemetryUnavailable
from penstock_video.cli.engine import joinable, place_of, share_card

NO_GPU = 2
_MINIATURE = "street"  # of --no-gpu: it needs no PyTorch
_EXPORTS = {
    GOOGLENET: ("deploy.models.googlenet_torch", "--max-batch", "64"),
    YOLOX: ("deploy.models.yolox_torch", "--top", "300", "--max-batch", "32"),
}
SHARE_WANTED, MOST_OF_ALONE = 0.95, 1.03  # of NVDEC alone
_VERSIONS_OF = ("cuda-bindings", "av", "torch", "nvidia-cudnn-cu13")
_BATCHING = "triton"
_SHORT = {"rounds": [1], "seconds": 5.0, "settle": 1.5, "tries": 2, "search_s": 1.0, "nvdec_seconds": 2.0}
_EXPORT_S, _LOAD_S, _CLIP_S = 300.0, 150.0, 8.0
_MOST_STARTS = 2  # of a stack that does not become ready: each costs minutes of a lent GPU


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Exits with a sentence if they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gpu.video", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    cameras = tuple(CAMERAS)
    parser.add_argument("--only", type=chosen_of(PARTS), metavar="PART,…", help=f"{', '.join(PARTS)} [all]")
    parser.add_argument(
        "--cameras", type=chosen_of(cameras), default=cameras, metavar="NAME,…", help=f"{', '.join(cameras)} [all]"
    )
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="their numbers [1 2 3]")
    parser.add_argument("--out", type=Path, default=Path("gpu-video"), metavar="DIR", help="for the files [gpu-video]")
    parser.add_argument("--seconds", type=float, default=7.0, help="of each window [7]")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before each window [2]")
    parser.add_argument("--start-s", type=float, default=60.0, help="until all streams must have answers [60]")
    parser.add_argument("--nvdec-seconds", type=float, default=3.0, help="of each shape of NVDEC alone [3]")
    parser.add_argument("--bound-ms", type=float, default=100.0, help="of the p99 [100]")
    parser.add_argument("--tries", type=int, default=6, help="numbers of streams tried in a search [6]")
    parser.add_argument(
        "--streams", type=int, nargs="+", metavar="N",
        help="to begin with [what an earlier round held and missed; else 0.95 of NVDEC alone, the target, NVDEC alone]",
    )  # fmt: skip
    parser.add_argument("--most", type=int, metavar="N", help="streams tried [1.03 of NVDEC alone]")
    parser.add_argument(
        "--decoders", type=int, metavar="N",
        help="that the GPU makes at once: no more streams are tried; 0: not known [what an earlier search met]",
    )  # fmt: skip
    parser.add_argument(
        "--search-s", type=float, default=75.0, metavar="S",
        help="try no further number after that, once one is sustained; 0: no limit [75]",
    )  # fmt: skip
    parser.add_argument("--programs", type=int, metavar="N", help="video programs [6; with YOLOX-S 3]")
    parser.add_argument("--cameras-per-process", type=int, default=24, metavar="N", help="of the video programs [24]")
    parser.add_argument(
        "--decoder-limit", type=float, default=1.0, metavar="SHARE",
        help="decoder utilization at which programs refuse streams [1: never]",
    )  # fmt: skip
    parser.add_argument("--model", help="that gets the frames [GoogLeNet or YOLOX-S, which is made]")
    parser.add_argument("--instances", type=int, default=4, metavar="N", help="of the model [4]")
    parser.add_argument("--mps", choices=("on", "off"), default="on", help="of penstock up [on]")
    parser.add_argument("--work", type=Path, metavar="DIR", help="for clips, models, logs; kept [a temporary one]")
    parser.add_argument("--short", action="store_true", help="short windows, at most two numbers of streams")
    parser.add_argument(
        "--no-gpu", dest="is_gpu", action="store_false",
        help="a miniature: the CPU decodes, model street, the embedded engine; no nvdec, no MPS",
    )  # fmt: skip
    environment = os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT") or default_environment(Path(sys.prefix))
    parser.add_argument("--engine-environment", type=Path, default=Path(environment), metavar="DIR", help="of Triton")
    if parser.parse_args(arguments).short:
        parser.set_defaults(**_SHORT)
    chosen = parser.parse_args(arguments)
    chosen.only = chosen.only or (PARTS if chosen.is_gpu else ("streams",))
    chosen.decoder = "nvdec" if chosen.is_gpu else "cpu"
    chosen.model = chosen.model or ("" if chosen.is_gpu else _MINIATURE)
    counts = (chosen.programs or 1, chosen.cameras_per_process, chosen.instances, chosen.tries, *chosen.rounds)
    limits = (chosen.decoders or 0, chosen.search_s)
    if min(*counts, *(chosen.streams or [1])) < 1 or chosen.seconds <= 0 or min(limits) < 0:
        parser.error("--seconds and every number must be above 0, --decoders and --search-s not below 0")
    return chosen


class GpuVideoBench:
    """One stack for all pieces; video programs are started anew for each. Methods raise BadAnswer."""

    def __init__(self, options: argparse.Namespace, work: Path, card: CardMeter) -> None:
        self.folder = Folder(options.out)
        self._options, self._work, self._card = options, work, card
        self._up: PenstockUp | None = None
        self._failed_starts = 0  # in a row

    def measure(self, piece: BenchPiece) -> dict[str, Any]:
        """What the piece found."""
        return self.nvdec(piece) if piece.part == "nvdec" else self.streams(piece)

    def close(self) -> None:
        """Ends the stack."""
        up, self._up = self._up, None
        if up is not None:
            up.__exit__(None, None, None)

    def nvdec(self, piece: BenchPiece) -> dict[str, Any]:
        """All shapes in a folder's first round, as clients of MPS as the programs are, and the best without; then the
        best one only."""
        earlier, mps = self.folder.found("nvdec", piece.camera, piece.number), self._mps_environ()

        def alone(processes: int, threads: int, *, is_mps: bool) -> dict[str, Any]:
            shape, seconds = (processes, threads), self._options.nvdec_seconds
            return decode_alone(self._clip(piece), shape, seconds, self._card, mps=mps if is_mps else None)

        if earlier:
            best = best_of(earlier["tries"])
            tries = [alone(best["processes"], best["threads"], is_mps=bool(best.get("is_mps") and mps))]
        else:
            shapes = SHAPES[-1:] if self._options.short else SHAPES
            tries = [alone(*shape, is_mps=mps is not None) for shape in shapes]
            best = best_of(tries)
            tries += [alone(best["processes"], best["threads"], is_mps=False)] if mps and len(shapes) > 1 else []
        return {"best": best_of(tries), "tries": tries}

    def _mps_environ(self) -> dict[str, str] | None:
        """The environment of clients of the stack's MPS; None without MPS or if the stack does not start."""
        if not self._options.is_gpu or self._options.mps == "off":
            return None
        try:
            self._stack()
        except (BadAnswer, OSError, subprocess.SubprocessError) as error:
            _say(f"NVDEC alone is measured without MPS: {error}")
            self.close()
            return None
        return environ_of_mps(joinable(running_stacks()))

    def streams(self, piece: BenchPiece) -> dict[str, Any]:
        """The search, against NVDEC alone of the same round if that was measured. The programs run on from number to
        number; streams come and go."""
        alone = self.folder.found("nvdec", piece.camera, piece.number)
        load, options = LOADS[piece.part], self._options
        goal = load.goal or CAMERAS[piece.camera].goal
        streams_alone = alone["best"]["rate"] / FPS if alone else goal / SHARE_WANTED
        earlier = self.folder.found(piece.part, piece.camera, piece.number)
        wanted = goal if load.goal else math.ceil(SHARE_WANTED * streams_alone)
        firsts = options.streams or [max(wanted, goal), goal, math.floor(streams_alone)]
        if earlier and earlier["held"] and not options.streams:
            firsts = [int(earlier["held"]), int(earlier["missed"]) or wanted]
        most = options.most or max(math.ceil(MOST_OF_ALONE * streams_alone), *firsts)
        decoders = self._decoders()
        if decoders:
            firsts, most = [min(one, below(decoders)) for one in firsts], min(most, decoders)
        setup = FleetSetup(
            options.model or load.model, self._clip(piece), options.decoder, options.programs or load.programs,
            options.cameras_per_process, load.interval, options.decoder_limit,
        )  # fmt: skip
        pacing = Pacing(
            options.seconds, options.bound_ms, options.settle, options.start_s, load.in_time, FPS / (load.interval + 1)
        )
        up = self._stack()
        with Fleet(setup, self._work / "logs" / piece.name, min(firsts[0], most)) as fleet:

            def attempt(count: int) -> dict[str, Any]:
                window = lambda: measure(fleet, up, self._card, pacing)  # noqa: E731
                found = try_count(fleet, count, window, pacing)
                _say(f"{piece.name}: {count} streams after {found['waited_s']:.0f} s: {found['complaint'] or 'held'}")
                return found

            found = search(SustainedSearch(firsts, most, options.tries), attempt, options.search_s or math.inf)
        of_round = alone if alone and self.folder.has(BenchPiece("nvdec", piece.camera, piece.number)) else None
        facts = {"decoder": options.decoder, "decoders": decoders}
        return found | facts | {"alone_per_s": of_round["best"]["rate"] if of_round else 0.0}

    def _decoders(self) -> int:
        """That the GPU makes: by the command line, else by a search of this folder; 0 if not known."""
        if self._options.decoder != "nvdec":
            return 0
        if self._options.decoders is not None:
            return int(self._options.decoders)
        return 0 if self._options.streams else self.folder.full_at()

    def _clip(self, piece: BenchPiece) -> Path:
        return clip_path(self._work, CAMERAS[piece.camera])

    def _stack(self) -> PenstockUp:
        """`penstock up`, started if it does not run."""
        if self._up is not None and self._up.process.poll() is None:
            return self._up
        self.close()
        if self._failed_starts >= _MOST_STARTS:
            raise BadAnswer(f"penstock up did not become ready {_MOST_STARTS} times, and is not started again")
        self._failed_starts += 1
        options, home = self._options, self._work / "home"
        loads = [LOADS[part].model for part in LOADS if part in options.only]
        models = [options.model] if options.model else list(dict.fromkeys(loads)) or [GOOGLENET]
        for model in models:
            if model in _EXPORTS:
                self._export(model, home)
        of_gpu = ("--mps", options.mps, "--allow-client-shm")  # the engine reads rows in the GPU's memory
        flags = of_gpu if options.is_gpu else ("--engine", "embedded")
        up = PenstockUp(home, models, *flags, environment=options.engine_environment)
        self._up = up.__enter__()
        began_s = time.monotonic()
        up.wait(began_s + _LOAD_S)
        self._failed_starts = 0
        _say(f"penstock up is ready after {time.monotonic() - began_s:.0f} s")
        return up

    def _export(self, model: str, home: Path) -> None:
        """Makes the model, if it is missing, by an interpreter that has torch."""
        if (home / "models" / model / "config.pbtxt").is_file():
            return
        command = [
            *(python_with_torch(self._options.engine_environment), "-m", *_EXPORTS[model]),
            *("--home", str(home), "--instances", str(self._options.instances), "--batching", _BATCHING),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, timeout=_EXPORT_S)
        if done.returncode:
            raise BadAnswer(f"{' '.join(command[1:])} made no model: {done.stderr.strip()[-500:]}")


def environ_of_mps(stack: RunningStack | None) -> dict[str, str] | None:
    """The environment of a client of that stack's MPS; None without MPS."""
    if stack is None or not stack.mps_directory:
        return None
    environ = {name: value for name, value in os.environ.items() if name != PIPE_DIRECTORY}
    share_card(place_of(stack, ""), environ)
    return environ


def run(options: argparse.Namespace, stack: ExitStack) -> int:
    """0 if every piece is measured; else 1."""
    todo = Folder(options.out).left_of(pieces_of(options.only, options.cameras, options.rounds))
    work = (
        options.work.resolve()
        if options.work
        else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-video-")))
    )
    work.mkdir(parents=True, exist_ok=True)
    _say(f"{len(todo)} pieces to do, work in {work}")
    card = stack.enter_context(CardMeter(is_gpu=options.is_gpu))  # first: without a GPU it ends here
    make_clips(work, tuple(CAMERAS[name] for name in dict.fromkeys(piece.camera for piece in todo)), _CLIP_S)
    bench = GpuVideoBench(options, work, card)
    stack.callback(bench.close)
    is_measured = [_measure(bench, piece, _conditions(options, piece) | _clip_facts(work, piece)) for piece in todo]
    return 0 if all(is_measured) else 1


def _measure(bench: GpuVideoBench, piece: BenchPiece, facts: dict[str, str]) -> bool:
    """Whether it was measured."""
    began_s = time.monotonic()
    try:
        found = bench.measure(piece)
    except (BadAnswer, OSError, subprocess.SubprocessError) as error:
        _say(f"{piece.name} was not measured: {error}")
    except Exception:  # noqa: BLE001  the root of a piece: the GPU is lent for minutes, the other pieces go on
        traceback.print_exc()
    else:
        took_s = time.monotonic() - began_s
        bench.folder.write(piece, found | {"took_s": round(took_s, 1)}, facts)
        figure = found["best"]["rate"] if piece.part == "nvdec" else found["held"]
        _say(f"{piece.name}: {figure:,.0f} {'frames/s' if piece.part == 'nvdec' else 'streams'} after {took_s:.0f} s")
        return True
    bench.close()  # whatever is wrong with the stack, the next piece gets another one
    return False


def _clip_facts(work: Path, piece: BenchPiece) -> dict[str, str]:
    facts = facts_of(clip_path(work, CAMERAS[piece.camera]))
    return {"clip": f"{facts['frames']} frames, {facts['bits_per_s'] / 1e6:.1f} Mbit/s, no B-frames"}


def _conditions(options: argparse.Namespace, piece: BenchPiece) -> dict[str, str]:
    facts = conditions() | {"slo_p99_ms": f"{options.bound_ms:g}"}
    reading = read_cards()
    driver = f"driver {reading.driver}" if reading.cards else "no GPU"
    facts["gpu versions"] = ", ".join([driver, *filter(None, map(_version, _VERSIONS_OF))])
    model = options.model or LOADS[piece.part if piece.part in LOADS else "streams"].model
    if model in _EXPORTS:
        model += f" ({options.instances} instances, batching {_BATCHING}, at most {_EXPORTS[model][-1]})"
    facts["model"] = model
    decoding = f"{options.cameras_per_process} cameras a decode process, MPS {options.mps}"
    decoding = decoding if options.is_gpu else "a decode process a camera, the CPU alone"
    programs = options.programs or "6 (3 with YOLOX-S)"
    facts["programs"] = f"{programs}, {decoding}, batched-push-timeout {PUSH_TIMEOUT_US} µs"
    return facts


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _say(sentence: str) -> None:
    print(f"gpu.video: {sentence}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything was measured, 1 if something was not, 2 without a GPU."""
    options = parse_arguments(arguments)
    try:
        with ExitStack() as stack:
            return run(options, stack)
    except TelemetryUnavailable as error:
        _say(f"no GPU to measure ({error}); --no-gpu tries the bench on the CPU")
        return NO_GPU
    except (BadAnswer, OSError) as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("stopped; what was measured is in the folder, and nothing is left running")
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended then, too
    raise SystemExit(main())
