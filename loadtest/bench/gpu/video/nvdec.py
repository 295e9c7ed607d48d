"""NVDEC alone: how many frames a second the card decodes if they are not used."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtest.bench.child import CHECKOUT
from loadtest.bench.gpu.video.machine import CardMeter
from loadtest.bench.wire import BadAnswer
from penstock.gpu.mps.control import PIPE_DIRECTORY

SHAPES = ((4, 4), (8, 4))  # processes, threads of each: an H200 decoded as much by six, within 0.6 %
READY_S, STOP_S, AHEAD_S = 60.0, 5.0, 0.3
Program = tuple[str, ...]
WORKER: Program = (sys.executable, "-m", "loadtest.bench.gpu.video.nvdec_worker")


def decode_alone(
    clip: Path,
    shape: tuple[int, int],
    seconds: float,
    card: CardMeter,
    program: Program = WORKER,
    mps: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """rate, cores, ready_s until all decoders were warm, and what the card said. mps: the environment of MPS' clients;
    None: without it.

    Raises BadAnswer with a worker's own last words.
    """
    processes, threads = shape
    command = [*program, str(clip), str(threads)]
    environ = dict(mps) if mps else {name: value for name, value in os.environ.items() if name != PIPE_DIRECTORY}
    asked_s = time.monotonic()
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(command, environ)) for _ in range(processes)]
        stack.callback(_end, workers)
        timer = threading.Timer(READY_S + seconds + STOP_S, _end, [workers])  # then a line is empty
        stack.callback(timer.cancel)
        timer.start()
        for worker in workers:
            if _line(worker) != "ready":
                raise BadAnswer(f"NVDEC alone: {_last_lines(worker)}")
        ready_s = time.monotonic() - asked_s
        begin_s = time.monotonic() + AHEAD_S
        end_s = begin_s + seconds
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{begin_s} {end_s}\n")
            worker.stdin.flush()
        time.sleep(AHEAD_S)
        load = card.during(seconds)
        found = [json.loads(_line(worker) or "{}") for worker in workers]
    if not all(found):
        raise BadAnswer("NVDEC alone: a process ended before its time")
    rate = sum(one["frames"] / one["seconds"] for one in found)
    cores = sum(one["cpu_s"] / one["seconds"] for one in found)
    figures = {"processes": processes, "threads": threads, "is_mps": mps is not None}
    return figures | {"rate": rate, "cores": cores, "ready_s": round(ready_s, 2), "card": load}


def best_of(tries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The one with the highest rate."""
    return max(tries, key=lambda one: float(one["rate"]))


def _worker(command: Sequence[str], environ: Mapping[str, str]) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=CHECKOUT, env=environ)


def _line(worker: "subprocess.Popen[str]") -> str:
    """The next line that is ours, empty at the end: the library writes to standard output, too."""
    assert worker.stdout is not None
    while line := worker.stdout.readline():
        if line.strip() == "ready" or line.startswith("{"):
            return line.strip()
    return ""


def _last_lines(worker: "subprocess.Popen[str]") -> str:
    worker.kill()
    _, words = worker.communicate()
    return words.strip()[-500:] or "a process said nothing"


def _end(workers: Sequence["subprocess.Popen[str]"]) -> None:
    for worker in workers:
        worker.kill()
