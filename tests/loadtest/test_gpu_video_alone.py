"""NVDEC alone, with stand-ins: of its worker processes, and of the library in a worker."""

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.bench.gpu.video import parts
from loadtest.bench.gpu.video.nvdec import best_of, decode_alone
from loadtest.bench.gpu.video.nvdec_worker import DecoderLane
from loadtest.bench.gpu.video.parts import environ_of_mps
from loadtest.bench.gpu.video.plan import BenchPiece, Folder, parse_arguments
from loadtest.bench.gpu.video.usage import CardMeter
from loadtest.bench.wire import BadAnswer
from penstock.gateway.workers.running_stacks import RunningStack
from penstock.gpu.mps.control import PIPE_DIRECTORY

WORKER = """
import json, sys
print("Decode Error occurred for picture 3")
print("ready", flush=True)
begin_s, end_s = map(float, sys.stdin.readline().split())
print(json.dumps({"frames": 50 * int(sys.argv[2]), "seconds": 0.5, "cpu_s": 0.05}), flush=True)
"""


def test_rate_is_that_of_all_processes(tmp_path: Path) -> None:
    """What the library says on standard output is passed over."""
    with CardMeter(is_gpu=False) as card:
        found = decode_alone(tmp_path / "c.mp4", (2, 3), 0.1, card, (sys.executable, "-c", WORKER))
    assert (found["rate"], found["cores"]) == (2 * 3 * 100.0, pytest.approx(0.2))
    assert 0 < found["ready_s"] < 60, "the start-up time on a rented card is reported"
    assert best_of([found, found | {"rate": 1.0}]) is found


def test_processes_are_clients_of_mps_only_where_they_are_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the bench itself is a client of."""
    monkeypatch.setenv(PIPE_DIRECTORY, "/another")
    says_it = WORKER.replace("50 * int(sys.argv[2])", f"len(os.environ.get('{PIPE_DIRECTORY}', ''))")
    program = (sys.executable, "-c", f"import os\n{says_it}")
    with CardMeter(is_gpu=False) as card:
        without = decode_alone(tmp_path / "c.mp4", (1, 1), 0.1, card, program)
        within = decode_alone(tmp_path / "c.mp4", (1, 1), 0.1, card, program, os.environ | {PIPE_DIRECTORY: "12345"})
    assert (without["is_mps"], without["rate"]) == (False, 0)
    assert (within["is_mps"], within["rate"]) == (True, 10)


def test_environment_of_mps_is_that_of_the_stack(tmp_path: Path) -> None:
    """As the video programs take it; none if the stack has no MPS, or there is no stack."""
    stack = RunningStack(tmp_path, "http://127.0.0.1:1", "127.0.0.1:2", 7, str(tmp_path / "mps"))
    environ = environ_of_mps(stack)
    assert environ is not None
    assert environ[PIPE_DIRECTORY].startswith(str(tmp_path / "mps"))
    assert environ_of_mps(replace(stack, mps_directory="")) is None
    assert environ_of_mps(None) is None


def test_stack_that_does_not_start_costs_nvdec_alone_nothing_and_is_tried_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lent card's minutes are not spent on waiting for it again and again."""
    starts = []

    class Stack:
        def __init__(self, *words: object, **_: object) -> None:
            starts.append(words)

        def __enter__(self) -> "Stack":
            return self

        def __exit__(self, *_: object) -> None: ...

        def wait(self, until_s: float) -> None:
            raise BadAnswer("cannot serve")

    monkeypatch.setattr(parts, "PenstockUp", Stack)
    monkeypatch.setattr(
        parts, "decode_alone", lambda *_, mps: {"processes": 1, "threads": 1, "rate": 9.0, "is_mps": mps}
    )
    options = parse_arguments("", ["--model", "street"])
    with CardMeter(is_gpu=False) as card:
        bench = parts.GpuVideoBench(options, tmp_path, Folder(tmp_path / "out"), card, tmp_path)
        for _ in range(3):
            assert bench.measure(BenchPiece("nvdec", "h264-720p", 1))["best"]["is_mps"] is None
    assert len(starts) == 2


def test_process_that_cannot_begin_gives_its_own_reason(tmp_path: Path) -> None:
    """Such as a card that is not there."""
    program = (sys.executable, "-c", "raise SystemExit('no CUDA-capable device is detected')")
    with CardMeter(is_gpu=False) as card, pytest.raises(BadAnswer, match="no CUDA-capable device is detected"):
        decode_alone(tmp_path / "c.mp4", (1, 1), 0.1, card, program)


class _Library:
    """As much of PyNvVideoCodec as a lane uses: each packet's picture comes out with it."""

    class cudaVideoCodec:
        H264, HEVC = "h264", "hevc"

    class DisplayDecodeLatencyType:
        LOW = "low"

    class VideoPacketFlag:
        ENDOFPICTURE = 1

    class PacketData:
        pass

    def __init__(self, until: int) -> None:
        self.seen: list[tuple[int, int]] = []
        self.until, self.is_done = until, threading.Event()

    def CreateDecoder(self, **_: Any) -> "_Library":
        return self

    def Decode(self, packet: Any) -> list[object]:
        self.seen.append((packet.bsl, packet.pts))
        if len(self.seen) >= self.until:
            self.is_done.set()
        return [object()]


def test_lane_goes_round_a_clip_with_one_decoder() -> None:
    """Packets by their numbers, on across the clip's end, until the end is requested."""
    library = _Library(until=5)
    lane = DecoderLane(library, "hevc", [np.zeros(size, np.uint8) for size in (7, 9)])
    thread = threading.Thread(target=lane.run)
    thread.start()
    assert lane.is_warm.wait(5.0)
    assert library.is_done.wait(5.0)
    lane.is_over = True
    thread.join(5.0)
    assert library.seen[:5] == [(7, 0), (9, 1), (7, 2), (9, 3), (7, 4)]
    assert lane.frames == len(library.seen)
