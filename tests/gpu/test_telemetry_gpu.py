"""On a real card: `util` and SM activity differ as they should, and a process is seen with its memory and time."""

import os
import shutil
import time
from typing import Any

import pytest

from loadtest.bench.gpu import telemetry as loads
from penstock.gpu.nvml import read_cards
from penstock.gpu.telemetry.messages import ActivitySource, CardLoad
from penstock.gpu.telemetry.sampler import Sampler, sample

pytestmark = pytest.mark.gpu
SECONDS = 1.5


@pytest.fixture
def torch() -> Any:
    """With a card whose activity NVML tells; else the test is skipped."""
    module = pytest.importorskip("torch", reason="needs torch")
    reading = read_cards()
    if not module.cuda.is_available():
        pytest.skip(f"needs an NVIDIA GPU: {reading.outcome}")
    if not reading.cards or reading.cards[0].capability < (9, 0):
        pytest.skip("needs a card with NVML's GPM: Hopper or later")
    return module


def busy(name: str) -> CardLoad:
    """The first card under that load."""
    with Sampler() as sampler:
        return sampler.mean(*loads.keep_busy(loads.LOADS[name], SECONDS))[0]


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


def test_mps_clients_are_seen_and_share_the_card(torch: Any) -> None:
    """Two of them, marked as clients; one that spins on one SM takes nothing from the one that multiplies."""
    if not shutil.which(loads.CONTROL):
        pytest.skip(f"needs {loads.CONTROL}")
    with Sampler() as sampler:
        card = loads.under_mps(sampler, SECONDS + 1)
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
