"""On a real card: rows that lie there, read by the real Triton of `penstock up` without a visit to the host.

    PENSTOCK_ENGINE_ENVIRONMENT=DIR python -m pytest -p no:randomly -s tests/gpu/test_hand_over_gpu.py

A minute. Stated tolerance between rows of the card and of the host: 2 % of the largest number, since the batches that
Triton forms are not the same.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from loadtest.bench.gpu.programs import TRITON, PenstockUp
from penstock.gateway.workers.running_stacks import stack_at
from penstock_video.gpu.device import Device
from penstock_video.gpu.memory import CudaRing
from penstock_video.infer.calls import Row
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import Network
from penstock_video.infer.options import EngineAddress, RowMemory
from penstock_video.types import ByteArray, DeviceRow
from tests.deepstream_pipeline.infer.fake_core import Asked
from tests.gpu.test_mps_gpu import environment
from tests.support.stack import CHECKOUT
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MODEL, SHAPE, ROWS = "resnet50-torch-uint8-random", (3, 224, 224), 32
UP_S, BACK_S, GONE_S, TOLERANCE = 90.0, 60.0, 15.0, 0.02
# A program that shares memory of the card with the engine, says so, and is killed.
KILLED = """
import sys, time
from penstock_video.gpu.device import Device
from penstock_video.infer.engine import Engine
from penstock_video.infer.options import RowMemory
from penstock_video.infer.options import EngineAddress

engine = Engine(EngineAddress(None, sys.argv[1], sys.argv[2]), device=Device.open())
engine.start(20)
engine.hand_over(engine.network(sys.argv[3], 20), RowMemory.DEVICE)
print("shared", flush=True)
time.sleep(60)
"""
# A program whose rows are gathered from memory that it gave back.
STRAY = """
import numpy as np
from penstock_video.errors import GpuFailed
from penstock_video.gpu.device import Device
from penstock_video.gpu.memory import DeviceSlab
from penstock_video.types import DeviceRow

device = Device.open()
slab = DeviceSlab(device, 64 << 20, lambda *_: None)
block = device.allocate(1 << 20)
row = DeviceRow(block.address, (1 << 20,), np.dtype(np.uint8))
slab.gather([row], slab.lease(1 << 20))
block.close()
try:
    slab.gather([row], slab.lease(1 << 20))
except GpuFailed:
    print("refused")
block = device.allocate(1 << 20)
slab.gather([DeviceRow(block.address, (1 << 20,), row.dtype)], slab.lease(1 << 20))
print("served")
"""


class Served:
    """The stack with the real Triton on the card, and what it says of itself."""

    def __init__(self, up: PenstockUp, home: Path) -> None:
        self.up = up
        text = (home / "up.log").read_text()
        (found,) = re.findall(r"ready: REST (\S+)  gRPC (\S+)  metrics (\S+)", text)
        self.http_url, self.grpc_address, self.metrics_url = found

    def remote(self) -> EngineAddress:
        return EngineAddress(None, self.http_url, self.grpc_address)

    def local(self) -> EngineAddress:
        seen = stack_at(self.http_url)
        assert seen is not None
        return EngineAddress(seen.run_dir, seen.http_url, seen.grpc_address)

    def regions(self) -> float:
        """Of the card's and the system's memory that clients share with the engine."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            found = re.search(r"^penstock_shared_memory_regions (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def triton(self) -> psutil.Process:
        return next(process for process in self.up.processes() if process.name().startswith(TRITON))


@pytest.fixture(scope="module")
def device() -> Device:
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings: make gpu")
    return Device.open()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Iterator[Served]:
    """A stack on which clients may share memory, with a network of pixels in FP16."""
    pytest.importorskip("torch", reason="needs torch: make gpu")
    triton = environment()
    home = tmp_path_factory.mktemp("hand_over")
    subprocess.run(
        [sys.executable, "-m", "deploy.models.resnet50_torch", "--home", home, "--input", "uint8"],
        cwd=CHECKOUT, check=True, timeout=120, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # torch may be in another's packages
    )  # fmt: skip
    with PenstockUp(home, [MODEL], "--allow-client-shm", environment=triton) as up:
        up.wait(time.monotonic() + UP_S)
        yield Served(up, home)


class Rig:
    """The engine, with rows that lie in the host and the same in a ring on the card."""

    def __init__(self, device: Device, place: EngineAddress) -> None:
        self.engine = Engine(place, device=device)
        self.engine.start(30)
        self.network: Network = self.engine.network(MODEL, 60)
        self.ring = CudaRing(device, ROWS, self.network.row_bytes)
        noise = np.random.default_rng(5)
        self.in_host: list[ByteArray] = [noise.integers(0, 256, SHAPE, np.uint8) for _ in range(ROWS)]
        self.on_card: list[DeviceRow] = [self.ring.row(slot, SHAPE, np.uint8) for slot in range(ROWS)]
        stream = device.new_stream()
        for pixels, row in zip(self.in_host, self.on_card, strict=True):
            device.copy(row.address, pixels.ctypes.data, pixels.nbytes, stream.handle)
        stream.synchronize()
        stream.close()

    def ask(self, rows: Sequence[Row], within_s: float = 30.0) -> Asked:
        asked = Asked()
        deadline = time.monotonic() + within_s
        self.engine.submit(self.network, rows, deadline=deadline, taken=asked.taken, done=asked.done)
        return asked

    def outputs(self, rows: Sequence[Row]) -> Any:
        """(rows, classes)."""
        answer = self.ask(rows).answer(40)
        assert answer.error is None, answer.error
        found = [answer.row(index) for index in range(len(rows))]
        return np.stack([response.outputs[0].to_numpy()[place or 0] for response, place in found])

    def close(self) -> None:
        self.engine.close(10)
        self.ring.close()


@pytest.fixture(params=["local", "remote"])
def rig(request: pytest.FixtureRequest, served: Served, device: Device) -> Iterator[Rig]:
    """As a client process of the stack, and by its ports; in the end the engine has no region of it."""
    rig = Rig(device, served.local() if request.param == "local" else served.remote())
    yield rig
    rig.close()
    assert served.regions() == 0


def assert_near(answer: Any, expected: Any) -> None:
    assert answer.shape == expected.shape
    assert float(abs(answer - expected).max()) <= TOLERANCE * float(abs(expected).max())


def test_rows_on_the_card_are_answered_as_those_in_the_host(rig: Rig, served: Served) -> None:
    """Of one row the same numbers but for the batches' rounding; rows of both memories may be submitted together."""
    began = time.monotonic()
    assert rig.engine.hand_over(rig.network, RowMemory.DEVICE).is_on_card
    sys.stdout.write(f"\nthe trial took {time.monotonic() - began:.3f} s\n")
    assert served.regions() == 1
    expected = rig.outputs(rig.in_host)
    assert_near(rig.outputs(rig.on_card), expected)
    assert_near(rig.outputs(rig.on_card[:1]), expected[:1])
    mixed: list[Row] = [
        card if index % 2 else host for index, (host, card) in enumerate(zip(rig.in_host, rig.on_card, strict=True))
    ]
    assert_near(rig.outputs(mixed), expected)


def test_many_batches_at_once_keep_their_own_rows(rig: Rig) -> None:
    """Sixteen batches in flight, each a part of the rows in another order."""
    rig.engine.hand_over(rig.network, RowMemory.DEVICE)
    expected, order = rig.outputs(rig.in_host), np.random.default_rng(7)
    for _ in range(10):
        picks = [order.permutation(ROWS)[: 1 + number] for number in range(16)]
        asked = [rig.ask([rig.on_card[index] for index in pick]) for pick in picks]
        for pick, one in zip(picks, asked, strict=True):
            answer = one.answer(40)
            assert answer.error is None, answer.error
            found = [answer.row(index) for index in range(len(pick))]
            assert_near(
                np.stack([response.outputs[0].to_numpy()[place or 0] for response, place in found]), expected[pick]
            )


def test_memory_is_registered_again_after_the_engine_was_killed(rig: Rig, served: Served) -> None:
    """The gateway starts Triton again; rows on the card are answered as before, without a word from anybody."""
    rig.engine.hand_over(rig.network, RowMemory.DEVICE)
    expected = rig.outputs(rig.on_card[:4])
    killed = served.triton()
    killed.send_signal(signal.SIGKILL)
    killed.wait(10)

    def is_answered() -> bool:
        return rig.ask(rig.on_card[:4], within_s=5).answer(40).error is None

    seconds = wait_for(is_answered, BACK_S, "rows on the card are answered again")
    sys.stdout.write(f"\nanswered again {seconds:.2f} s after Triton was killed\n")
    assert_near(rig.outputs(rig.on_card[:4]), expected)
    assert served.regions() == 1


def test_program_that_is_killed_leaves_no_region(served: Served, device: Device) -> None:
    """Its connection is gone, and seconds later so is what it shared; another program is served meanwhile."""
    program = subprocess.Popen(
        [sys.executable, "-c", KILLED, served.http_url, served.grpc_address, MODEL],
        cwd=CHECKOUT, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert program.stdout is not None
    assert "shared\n" in iter(program.stdout.readline, "")
    assert served.regions() == 1
    program.kill()
    program.wait(10)
    program.stdout.close()
    wait_for(lambda: served.regions() == 0, GONE_S, "the gateway takes the region back")
    rig = Rig(device, served.remote())
    assert rig.engine.hand_over(rig.network, RowMemory.DEVICE).is_on_card
    assert_near(rig.outputs(rig.on_card), rig.outputs(rig.in_host))
    rig.close()


def test_row_of_memory_that_was_given_back_is_an_error_and_no_crash(device: Device) -> None:
    """In a program of its own, which would die of it: the card refuses the copy, and makes others afterwards."""
    ended = subprocess.run(
        [sys.executable, "-c", STRAY], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "refused\nserved\n"), ended.stderr[-1000:]
