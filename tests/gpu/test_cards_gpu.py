"""On real cards: UUIDs and SMs as NVML has them, an MPS daemon of one card, and a stack with an engine for each card.

    PENSTOCK_ENGINE_ENVIRONMENT=DIR python -m pytest -p no:randomly -s tests/gpu/test_cards_gpu.py

With one card, the tests of several are skipped. None of these tests was run on a GPU yet; the one of an engine that
dies was run with stand-ins for NVML and MPS on a CPU.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from loadtest.bench.gpu.cuda_region import open_driver
from loadtest.bench.gpu.programs import PenstockUp
from penstock.engines.run_directory import ENGINE_ID_VARIABLE, reap
from penstock.engines.triton import launch as triton_launch
from penstock.gpu.mps.control import VISIBLE_CARDS, MpsOptions, find_program
from penstock.gpu.mps.daemon import DaemonProcess, OwnDaemon
from penstock.gpu.nvml import read_cards
from tests.gpu.test_mps_daemon_gpu import Client
from tests.gpu.test_mps_gpu import MODEL, environment, request_of_one_image
from tests.support.stack import CHECKOUT

pytestmark = pytest.mark.gpu
MARK = "fedcba987655"
SM_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
CALLERS, UP_S, BACK_S = 8, 90.0, 60.0


def test_cards_have_uuids_and_as_many_sms_as_cuda_says() -> None:
    """By them cards are named and compared."""
    cuda, count = open_driver(), ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(count), SM_COUNT, 0)
    cards = read_cards().cards
    sys.stdout.write(f"\n{[(card.index, card.uuid, card.name, card.sm_count) for card in cards]}\n")
    assert all(card.uuid.startswith("GPU-") for card in cards)
    assert count.value in {card.sm_count for card in cards}


async def test_client_that_names_the_daemons_card_by_uuid_is_served(tmp_path: Path) -> None:
    """The environment that each card's daemon and engine get: numbers would mean other cards under MPS."""
    program = find_program()
    if not program:
        pytest.skip("needs nvidia-cuda-mps-control on PATH")
    card = {VISIBLE_CARDS: read_cards().cards[-1].uuid}
    hold = DaemonProcess(
        program, bond=(sys.executable, "-I", "-S", triton_launch.__file__, str(os.getpid())),
        environ={**os.environ, **card, ENGINE_ID_VARIABLE: MARK}, clear=lambda child: reap(MARK, child_pid=child),
    )  # fmt: skip
    daemon = OwnDaemon(MpsOptions(tmp_path), hold, emit=lambda *_, **__: None)
    await daemon.start()
    client = Client(daemon.options.client_environ(card))
    try:
        assert client.write() == "0"
        assert (await daemon.status()).clients == {client.process.pid}
    finally:
        client.end()
        await daemon.stop()


class Callers:
    """Clients that send one image after the other, and count the answers by status or error."""

    def __init__(self, port: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = f"http://127.0.0.1:{port}/v2/models/{MODEL}/infer"
        self._body, self._head = request_of_one_image()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, daemon=True) for _ in range(CALLERS)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)

    def _call(self) -> None:
        while not self._stop.is_set():
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(self._url, self._body, self._head), timeout=30
                ) as got:
                    self.outcomes[str(got.status)] += 1
            except OSError as error:
                self.outcomes[str(error)] += 1


@pytest.fixture
def two_cards(tmp_path: Path) -> Iterator[tuple[PenstockUp, Path]]:
    """A stack with an engine, and an MPS daemon, for each of the first two cards."""
    cards = read_cards().cards
    if len(cards) < 2:
        pytest.skip(f"needs two NVIDIA GPUs, and this machine has {len(cards)}")
    pytest.importorskip("torch", reason="needs torch: make gpu")
    triton = environment()
    subprocess.run(
        [sys.executable, "-m", "deploy.models.resnet50_torch", "--home", tmp_path, "--instances", "2",
         "--max-batch", "8"],
        cwd=CHECKOUT, check=True, timeout=120, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # torch may be in another's packages
    )  # fmt: skip
    with PenstockUp(tmp_path, [MODEL], "--mps", "on", environment=triton, gpus="0,1") as up:
        up.wait(time.monotonic() + UP_S)
        yield up, tmp_path


def test_engine_of_one_card_that_dies_costs_no_request(two_cards: tuple[PenstockUp, Path]) -> None:
    """The other card's engine does its calls; it is named in the health details until it is back."""
    up, home = two_cards
    uuid = read_cards().cards[1].uuid
    (triton,) = [one for one in tritons(up) if one.environ().get(VISIBLE_CARDS) == uuid]
    with Callers(up.port) as callers:
        until(lambda: callers.outcomes["200"] > 200)
        triton.send_signal(signal.SIGKILL)
        until(lambda: "GPU 1" in str(health(up.port).get("details")))
        until(lambda: "details" not in health(up.port))
    sys.stdout.write(f"\n{callers.outcomes}; {re.findall('GPU 1.*', (home / 'up.log').read_text())[-3:]}\n")
    assert callers.outcomes.keys() == {"200"}
    assert len(tritons(up)) == 2


def tritons(up: PenstockUp) -> list[psutil.Process]:
    """The Tritons of the stack."""
    found = []
    for process in up.processes():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("tritonserver"):
                found.append(process)
    return found


def health(port: int) -> dict[str, object]:
    """The answer of the readiness check, which does not fail while one card serves."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=10) as answer:
        found: dict[str, object] = json.loads(answer.read())
    return found


def until(is_so: Callable[[], bool]) -> None:
    """Waits for it; fails after BACK_S."""
    end = time.monotonic() + BACK_S
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
