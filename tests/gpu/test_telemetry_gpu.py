"""On a real card: `util` and SM activity differ as they should, and a process is seen with its memory and time."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.gpu.programs import MpsDaemon
from penstock.gpu.mps.control import PROGRAM as CONTROL
from penstock.gpu.nvml import read_cards
from penstock.gpu.telemetry.messages import ActivitySource, CardLoad
from penstock.gpu.telemetry.sampler import Sampler, sample

pytestmark = pytest.mark.gpu
SECONDS = 1.5
SPIN_CYCLES = 200_000_000  # a tenth of a second at 2 GHz, on one thread
SETTLE_S = 1.2  # `util` is of the driver's last sampling period, up to a second
CLIENT = "from tests.gpu.test_telemetry_gpu import mps_client; mps_client({name!r}, {seconds})"


def spin(torch: Any) -> None:
    """A tenth of a second of one thread on one SM."""
    torch.cuda._sleep(SPIN_CYCLES)


def multiply(torch: Any) -> None:
    """Some milliseconds of tensor cores."""
    left, right = (torch.ones((8192, 8192), device="cuda", dtype=torch.float16) for _ in range(2))
    for _ in range(20):
        left @ right


def copy(torch: Any) -> None:
    """Some milliseconds of the device's memory."""
    here = torch.empty(2 << 30, device="cuda", dtype=torch.uint8)
    there = torch.empty_like(here)
    for _ in range(10):
        there.copy_(here)


LOADS: dict[str, Callable[[Any], None]] = {
    "one SM spins": spin,
    "FP16 matrix products": multiply,
    "copies in memory": copy,
}


def keep_busy(load: Callable[[Any], None], seconds: float) -> tuple[float, float]:
    """Repeats the load; returns begin and end by time.monotonic(), without the time in which it settled."""
    import torch

    begin_s = time.monotonic()
    while time.monotonic() - begin_s < SETTLE_S + seconds:
        load(torch)
        torch.cuda.synchronize()
    return begin_s + SETTLE_S, time.monotonic()


def mps_client(name: str, seconds: float) -> None:
    """Main of a client process: prints "ready", waits for a line, works."""
    import torch

    torch.zeros(64 << 20, device="cuda", dtype=torch.uint8)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    keep_busy(LOADS[name], seconds)


def under_mps(sampler: Sampler, seconds: float, folder: Path) -> CardLoad:
    """The first card under two clients at once: one spins on one SM, one multiplies."""
    with contextlib.ExitStack() as stack:
        environment = os.environ | stack.enter_context(MpsDaemon(folder)).environ
        clients = []
        for name in ("one SM spins", "FP16 matrix products"):
            command = [sys.executable, "-c", CLIENT.format(name=name, seconds=seconds + SETTLE_S)]
            pipe = subprocess.PIPE
            clients.append(stack.enter_context(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe)))
        for one in clients:
            assert one.stdout is not None
            assert one.stdout.readline() == b"ready\n", "an MPS client did not start"
        for one in clients:
            assert one.stdin is not None
            one.stdin.write(b"go\n")
            one.stdin.flush()
        begin_s = time.monotonic() + SETTLE_S
        return sampler.mean(begin_s, begin_s + seconds - SETTLE_S / 2)[0]


@pytest.fixture
def torch() -> Any:
    """With a card whose activity NVML tells; else the test is skipped."""
    module = pytest.importorskip("torch", reason="needs torch")
    reading = read_cards()
    if not module.cuda.is_available():
        pytest.skip(f"needs an NVIDIA GPU: {reading.outcome}")
    if not reading.cards or reading.cards[0].capability < (9, 0):
        pytest.skip("needs a GPU with NVML's GPM: Hopper or later")
    return module


def busy(name: str) -> CardLoad:
    """The first card under that load."""
    with Sampler() as sampler:
        return sampler.mean(*keep_busy(LOADS[name], SECONDS))[0]


def test_kernel_on_one_sm_is_all_of_util_and_hardly_any_of_the_card(torch: Any) -> None:
    """What the project is about: `util` 100 %, SM activity one SM of all."""
    card = busy("one SM spins")
    one_sm = 1 / torch.cuda.get_device_properties(0).multi_processor_count
    assert card.source is ActivitySource.GPM
    assert card.kernel_running is not None
    assert card.kernel_running >= 0.95
    assert card.activity.graphics_engine is not None
    assert card.activity.graphics_engine >= 0.9
    assert card.activity.sm == pytest.approx(one_sm, rel=0.5)


def test_matrix_products_use_the_sms_and_the_tensor_pipe(torch: Any) -> None:
    """The same `util`, and the card is really used."""
    card = busy("FP16 matrix products")
    assert card.activity.sm is not None
    assert card.activity.sm >= 0.8
    assert card.activity.tensor is not None
    assert card.activity.tensor >= 0.3


def test_copies_use_the_memory_bandwidth(torch: Any) -> None:
    """And no tensor pipe."""
    card = busy("copies in memory")
    assert card.activity.memory_bandwidth is not None
    assert card.activity.memory_bandwidth >= 0.4
    assert card.activity.tensor is not None
    assert card.activity.tensor <= 0.05


def test_process_is_seen_with_its_memory_and_its_time(torch: Any) -> None:
    """This one, by its id where the ids are the host's."""
    held = torch.zeros(512 << 20, device="cuda", dtype=torch.uint8)
    card = busy("one SM spins")
    own = [one for one in card.processes if one.pid == os.getpid()]
    if card.processes and not own:
        pytest.skip("NVML shows the host's process ids here, which are not ours")
    assert (own[0].memory_bytes or 0) >= held.nbytes
    assert own[0].time_share is None or own[0].time_share >= 0.5


def test_mps_clients_are_seen_and_share_the_card(torch: Any, tmp_path: Path) -> None:
    """Two of them, marked as clients; one that spins on one SM takes nothing from the one that multiplies."""
    if not shutil.which(CONTROL):
        pytest.skip(f"needs {CONTROL}")
    with Sampler() as sampler:
        card = under_mps(sampler, SECONDS + 1, tmp_path)
    assert card.activity.sm is not None
    assert card.activity.sm >= 0.7
    assert len([one for one in card.processes if one.is_mps_client]) in (0, 2), card.processes


def test_sample_of_an_idle_moment_takes_the_given_time(torch: Any) -> None:
    """And finds the card quiet once what ran has ended."""
    torch.cuda.synchronize()
    begin_s = time.monotonic()
    card = sample(1.0)[0]
    assert 1.0 <= time.monotonic() - begin_s < 10
    assert card.activity.sm is not None
    assert card.activity.sm < 0.2
