"""Video on one GPU, measured in pieces: NVDEC alone, the streams that the product holds, copies, CPU, faults.

    python -m loadtest.bench.gpu.video --out gpu-video                  # three rounds; what is there is not done again
    python -m loadtest.bench.gpu.video --out gpu-video --only nvdec,streams --rounds 1 --budget-s 480
    python -m loadtest.bench.gpu.video.report gpu-video                 # gpu-video.md, .json and .png, on any machine

nvdec      Processes and threads that only decode, in several shapes, as clients of the stack's MPS and without: the
           most frames a second.
streams    `penstock up --engine triton` with GoogLeNet, and video programs beside it whose cameras are a clip each,
           played in a loop at its own speed, tracker on, every frame inferred. The highest number that is held: of the
           due frames at most 0.1 % dropped and 99.5 to 100.5 % answered, no stream more than 3 frames behind, 99 % of
           the answers within 100 ms of the frame's capture, which is when its packet was due. A card makes so many
           decoders at once, however small the pictures (an H200 at most 288): where it has no more, the streams that
           got one are counted, the search goes on below that number, and no later one tries more (--decoders).
hand-over  The same streams with rows in the card's memory, and with rows copied to the host.
cpu        The highest number of the same streams that the CPU decodes, with the same engine.
faults     At half load: a decode process is killed, cameras send rubbish.

--no-gpu tries the bench without a card: the CPU decodes, the engine embedded in the gateway answers.
"""

import argparse
import importlib.metadata
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from loadtest.bench.gpu.video.clips import CAMERAS, clip_path, facts_of, make_clips
from loadtest.bench.gpu.video.parts import GpuVideoBench
from loadtest.bench.gpu.video.plan import MODEL, BenchPiece, Folder, left_of, parse_arguments, pieces_of
from loadtest.bench.gpu.video.usage import CardMeter
from loadtest.bench.report import conditions
from loadtest.bench.wire import BadAnswer
from penstock.engines.triton.runtime import default_environment
from penstock.gpu.nvml import read_cards
from penstock.gpu.telemetry.sampler import TelemetryUnavailable
from penstock_load.hardware import describe, read_machine

NO_GPU = 2
_VERSIONS_OF = ("PyNvVideoCodec", "cuda-bindings", "av", "torch", "nvidia-cudnn-cu13")


def run(options: argparse.Namespace, stack: ExitStack) -> int:
    """0 when every piece was measured or is there; else 1."""
    folder, began_s = Folder(options.out), time.monotonic()
    pieces = list(pieces_of(options.only, options.cameras, options.rounds))
    todo = pieces if options.again else left_of(pieces, folder)
    work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-video-")))
    work.mkdir(parents=True, exist_ok=True)
    _tell(f"{len(todo)} pieces to do, work in {work}")
    card = stack.enter_context(CardMeter(is_gpu=options.is_gpu))  # first: without a card it ends here
    cameras = tuple(CAMERAS[name] for name in dict.fromkeys(piece.camera for piece in todo))
    make_clips(work, cameras, options.clip_seconds)
    _tell(f"clips are there after {time.monotonic() - began_s:.0f} s")
    bench = GpuVideoBench(options, work, folder, card, _environment_of(options))
    stack.callback(bench.close)
    facts, failed = _conditions(options), 0
    for piece in todo:
        if options.budget_s and time.monotonic() - began_s > options.budget_s:
            _tell(f"{piece.name} and what follows is left for another run: --budget-s {options.budget_s:g} is over")
            return 1
        failed += not _measure(bench, piece, facts | _facts(work, piece))
    return 1 if failed else 0


def _measure(bench: GpuVideoBench, piece: BenchPiece, facts: dict[str, str]) -> bool:
    """Whether it is in its file now."""
    began_s = time.monotonic()
    try:
        found = bench.measure(piece)
    except (BadAnswer, OSError, subprocess.SubprocessError) as error:
        _tell(f"{piece.name} was not measured: {error}")
        bench.close()  # whatever is wrong with the stack, the next piece gets another one
        return False
    except Exception:  # noqa: BLE001  the root of a piece: the card is lent for minutes, the other pieces go on
        traceback.print_exc()
        bench.close()
        return False
    bench.folder.write(piece, found | {"took_s": round(time.monotonic() - began_s, 1)}, facts)
    _tell(f"{piece.name} done after {time.monotonic() - began_s:.0f} s: {bench.in_words(piece, found)}")
    return True


def _facts(work: Path, piece: BenchPiece) -> dict[str, str]:
    facts = facts_of(clip_path(work, CAMERAS[piece.camera]))
    return {"clip": f"{facts['frames']} frames, {facts['bits_per_s'] / 1e6:.1f} Mbit/s, no B-frames"}


def _conditions(options: argparse.Namespace) -> dict[str, str]:
    facts = conditions() | {"machine": describe(read_machine()), "slo_p99_ms": f"{options.bound_ms:g}"}
    facts["at"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    reading = read_cards()
    driver = f"driver {reading.driver}" if reading.cards else "no GPU"
    facts["gpu versions"] = ", ".join([driver, *filter(None, map(_version, _VERSIONS_OF))])
    model = f"{options.instances} instances, batching {options.batching}, at most {options.max_batch}"
    facts["model"] = f"{options.model}{f' ({model})' if options.model == MODEL else ''}"
    core = "on a core of its own where one is free" if options.pin_processes else "not pinned"
    shared = f"{options.cameras_per_process} cameras a decode process, {core}, MPS {options.mps}"
    facts["programs"] = (
        f"{options.programs}, {shared if options.is_gpu else 'a decode process a camera, the CPU alone'}"
    )
    facts["programs"] += f", batched-push-timeout {options.push_timeout_us} µs"
    return facts


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _environment_of(options: argparse.Namespace) -> Path:
    return options.engine_environment or default_environment(Path(sys.prefix))


def _tell(sentence: str) -> None:
    print(f"gpu.video: {sentence}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when everything was measured, 1 when something was not, 2 without a GPU."""
    options = parse_arguments(__doc__, arguments)
    try:
        with ExitStack() as stack:
            return run(options, stack)
    except TelemetryUnavailable as error:
        _tell(f"no GPU to measure ({error}); --no-gpu tries the bench on the CPU")
        return NO_GPU
    except (BadAnswer, OSError) as error:
        _tell(str(error))
        return 1
    except KeyboardInterrupt:
        _tell("stopped; what was measured is in the folder, and nothing is left running")
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended then, too
    raise SystemExit(main())
