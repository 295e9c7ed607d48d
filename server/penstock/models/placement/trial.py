"""Tries a model folder on CPU and GPU in a bounded child process: results are compared, rates measured."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, cycle
from pathlib import Path
from typing import BinaryIO

import msgspec

from penstock.engines.ort_serving.placement import Precision
from penstock.engines.ort_serving.threads import available_cores
from penstock.models.check.answers import Rivals, compare_answers
from penstock.models.inspect.picture_views import Picture, part_views, whole_views
from penstock.models.inspect.trial import read_pictures
from penstock.models.inspect.trial_session import TrialFailed
from penstock.models.placement.choice import ON_CPU, Device, ModelPlacement, PlacementTrial
from penstock.models.placement.placed_model import PlacedModel, PreparedPicture, open_placed
from penstock.process_limits import end_with_parent, limit_process
from penstock.protocol.errors import InferenceError
from penstock.protocol.vision_results import VisionResult

MEMORY_BYTES, CPU_S, WALL_S = 16 << 30, 600, 90.0  # of the child; CUDA's libraries and contexts take gigabytes
RESULTS_S, RATE_S = 4.0, 0.4  # time for the CPU's results, and for each rate
PARTS = 4  # of each picture, besides the whole
ROWS_TRIED = (1, 2, 4, 8)
_REPLY_BYTES = 1 << 20
_LONGEST_REASON = 300


class TrialRequest(msgspec.Struct, frozen=True):
    """The message to the child process. pictures: paths; empty for the packaged ones. placements: besides the CPU."""

    folder: str
    pictures: tuple[str, ...]
    placements: tuple[tuple[Device, Precision], ...]
    rows: int  # pictures a call on the CPU


def try_placements(
    folder: Path, placements: Sequence[ModelPlacement], *, pictures: Sequence[Path], rows: int, wall_s: float = WALL_S
) -> list[PlacementTrial]:
    """The CPU's trial in FP32, then one of each placement; what did not run has its reason. Blocks for wall_s at most.

    folder: of the model, with config.pbtxt. rows: pictures a call on the CPU. If the child process ends early, the
    placements that it did not reach have its end as their problem.
    """
    request = TrialRequest(
        str(folder), tuple(map(str, pictures)), tuple((one.device, one.precision) for one in placements), rows
    )
    command = [sys.executable, "-P", "-m", "penstock.models.placement.trial", str(os.getpid())]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(request), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=wall_s, check=False,
        )  # fmt: skip
        output, end = done.stdout, f"the process that tried it ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"its trial took more than {wall_s:g} s; it was stopped"
    found = read_replies(output)
    missing = [ON_CPU, *placements][len(found) :]
    return [*found, *(PlacementTrial(device=one.device, precision=one.precision, problem=end) for one in missing)]


def read_replies(output: bytes) -> list[PlacementTrial]:
    """The trials of complete lines; those before the first that is none."""
    found = []
    for line in output[:_REPLY_BYTES].splitlines():
        try:
            found.append(msgspec.json.decode(line, type=PlacementTrial))
        except msgspec.DecodeError:
            break
    return found


def run_trials(
    folder: Path, pictures: Sequence[Picture], placements: Sequence[ModelPlacement], *, rows: int
) -> Iterator[PlacementTrial]:
    """As try_placements, in this process, one after the other."""
    try:
        reference = PlacedModel(folder, ON_CPU, threads=1)
        prepared, expected, rivals = _reference_results(reference, pictures)
    except (TrialFailed, InferenceError) as error:
        yield PlacementTrial(device=Device.CPU, precision=Precision.FP32, problem=_reason(error))
        return
    threshold = reference.card.layout_options.lowest_threshold()
    rates = _rates(reference, prepared[0], (rows,), callers=available_cores())
    yield PlacementTrial(device=Device.CPU, precision=Precision.FP32, rows_per_s=rates, is_compared=True)
    for placement in placements:
        try:
            with open_placed(folder, placement) as model:
                agreement = compare_answers(
                    expected, results_by_rows(model, prepared), threshold=threshold, rivals=rivals
                )
                yield PlacementTrial(
                    device=placement.device,
                    precision=placement.precision,
                    rows_per_s=_rates(model, prepared[0], _rows_of(model), callers=1),
                    agreement=str(agreement),
                    disagreement=agreement.disagreement,
                    is_compared=bool(agreement.compared or agreement.overlaps or agreement.likeness),
                    graphs=model.version.facts.graph_batch_sizes,
                    is_checked=model.is_checked,
                )
        except (TrialFailed, InferenceError) as error:
            yield PlacementTrial(device=placement.device, precision=placement.precision, problem=_reason(error))


def _reference_results(
    model: PlacedModel, pictures: Sequence[Picture]
) -> tuple[list[PreparedPicture], list[VisionResult], list[Rivals]]:
    """Whole pictures, mirrored ones and parts, as many as the CPU runs in RESULTS_S."""
    color = model.card.prepare_spec.color
    views = chain(
        (view for picture in pictures for view in whole_views(picture, color, is_mirrored=True)),
        (view for picture in pictures for view in part_views(picture, color, PARTS)),
    )
    prepared, results, rivals = list[PreparedPicture](), list[VisionResult](), list[Rivals]()
    until = time.monotonic() + RESULTS_S
    for view in views:
        prepared.append(model.prepare(view))
        ((result, near),) = model.results_with_rivals(prepared[-1:])
        results.append(result)
        rivals.append(near)
        if time.monotonic() > until:
            break
    return prepared, results, rivals


def results_by_rows(model: PlacedModel, prepared: Sequence[PreparedPicture]) -> list[VisionResult]:
    """Results of calls with each number of rows in turn: each has a graph of its own. Raises TrialFailed."""
    found: list[VisionResult] = []
    for rows in cycle(_rows_of(model)):
        if len(found) >= len(prepared):
            return found
        found += model.results(prepared[len(found) : len(found) + rows])
    return found


def _rows_of(model: PlacedModel) -> tuple[int, ...]:
    return tuple(rows for rows in ROWS_TRIED if rows <= max(model.config.max_batch_size, 1))


def _rates(
    model: PlacedModel, picture: PreparedPicture, sizes: Sequence[int], *, callers: int
) -> tuple[tuple[int, float], ...]:
    """(rows a call, pictures a second of the network) by that many threads, each for RATE_S after one warm-up call."""
    found = []
    with ThreadPoolExecutor(callers) as pool:
        for rows in sizes:
            call = model.call_of([picture] * rows)
            call()
            until = time.perf_counter() + RATE_S
            counts = list(pool.map(lambda _: _calls_until(call, until), range(callers)))  # noqa: B023 - waits here
            took_s = time.perf_counter() - until + RATE_S
            found.append((rows, sum(counts) * rows / took_s))
    return tuple(found)


def _calls_until(call: Callable[[], object], until: float) -> int:
    """At least one."""
    count = 0
    while not count or time.perf_counter() < until:
        call()
        count += 1
    return count


def _reason(error: Exception) -> str:
    text = error.message if isinstance(error, InferenceError) else str(error)
    return " ".join(text.split())[:_LONGEST_REASON]


def main(arguments: Sequence[str], replies: BinaryIO) -> None:
    """Answers one request of standard input: a line for each trial as soon as it is done."""
    end_with_parent(int(arguments[0]))
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
    limit_process(MEMORY_BYTES, cpu_s=CPU_S)  # CUDA writes caches
    try:
        pictures = read_pictures(request.pictures)
    except TrialFailed as error:
        trial = PlacementTrial(device=Device.CPU, precision=Precision.FP32, problem=str(error))
        replies.write(msgspec.json.encode(trial) + b"\n")
        return
    placements = [ModelPlacement(device, precision) for device, precision in request.placements]
    for trial in run_trials(Path(request.folder), pictures, placements, rows=request.rows):
        replies.write(msgspec.json.encode(trial) + b"\n")
        replies.flush()


if __name__ == "__main__":
    reply_file = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    with os.fdopen(reply_file, "wb") as opened:
        main(sys.argv[1:], opened)
