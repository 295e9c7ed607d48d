"""kill -9 of one process of a model under the real Triton: the others go on, and its place is filled again."""

import json
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from loadtest.bench.gpu.programs import PenstockUp
from penstock.engines.triton.instances import OLD_GOES_S
from tests.support.stack import CHECKOUT

pytestmark = pytest.mark.long
INSTANCES, UP_S, HEALED_S = 3, 60.0, 15.0
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}).encode()


def model(home: Path) -> str:
    """The shipped identity with several instances; its name."""
    folder = home / "models" / "several"
    shutil.copytree(CHECKOUT / "model_repository" / "identity_fp32", folder)
    (folder / "golden.json").unlink(missing_ok=True)
    config = folder / "config.pbtxt"
    text = config.read_text().replace('"identity_fp32"', '"several"')
    assert "count: 1" in text
    config.write_text(text.replace("count: 1", f"count: {INSTANCES}"))
    return folder.name


def living(up: PenstockUp) -> set[int]:
    """The model's processes that live."""
    found = set()
    for process in up.processes():
        try:
            if process.name().startswith("triton_python_b") and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


class Callers:
    """Ask on; each answer with its moment, and what was wrong with it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[tuple[float, str]] = []
        self.stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(4)]
        for thread in self._threads:
            thread.start()

    def _ask_on(self) -> None:
        while not self.stop.is_set():
            self.answers.append((time.monotonic(), self._ask()))

    def _ask(self) -> str:
        try:
            urllib.request.urlopen(urllib.request.Request(self.url, BODY), timeout=10).read()
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"
        return ""

    def end(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()


def test_model_process_that_is_killed_costs_its_own_requests_and_is_replaced(
    tmp_path: Path, triton_environment: Path
) -> None:
    """A few requests fail, within seconds none any more; the instances are as many as before, all of them new."""
    name = model(tmp_path)
    with PenstockUp(tmp_path, [name], environment=triton_environment) as up:
        up.wait(time.monotonic() + UP_S)
        before = living(up)
        assert len(before) == INSTANCES
        callers = Callers(f"http://127.0.0.1:{up.port}/v2/models/{name}/infer")
        try:
            time.sleep(1.0)
            killed = time.monotonic()
            os.kill(min(before), 9)
            until = killed + HEALED_S
            while len(living(up) - before) < INSTANCES and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(2.0)
            healed = time.monotonic()
            until = healed + OLD_GOES_S + 10.0
            while living(up) & before and time.monotonic() < until:
                time.sleep(0.5)
            time.sleep(2.0)
        finally:
            callers.end()
        failed = [(moment, why) for moment, why in callers.answers if why]
        assert len(living(up) - before) == len(living(up)) == INSTANCES, "none of the old ones stays"
        assert all("is not healthy" in why for _, why in failed)
        assert len(failed) < 0.05 * len(callers.answers)
        assert [why for moment, why in failed if moment > healed] == []
