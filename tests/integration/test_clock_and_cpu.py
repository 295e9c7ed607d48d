"""When the wall clock jumps or the CPU is busy, the gateway continues to serve and restarts nothing."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import jwt
import psutil
import pytest

from tests.integration.embedded_stack import is_serving, look_up, own_metrics, start_embedded, write_models
from tests.integration.living import family
from tests.support.http import call, post_json
from tests.support.stack import RunningStack, stop_stack
from tests.support.waiting import wait_for

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
HOUR_S = 3600
SECRET = "a secret of more than thirty-two bytes, for tests alone"
ACCESS = """[tokens]
audience = "penstock"
secret_file = "secret"
algorithms = ["HS256"]
roles = ["infer", "read"]
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with the models `lookup` and `slow`."""
    write_models(tmp_path / "models")
    return tmp_path


class Clock:
    """The wall clock that a stack sees: the machine's plus an offset from a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.move(0)

    def move(self, offset_s: int) -> None:
        """Sets the offset in seconds; programs see it when they next read the clock."""
        part = self._file.with_suffix(".part")
        part.write_text(f"{offset_s:+d}\n")
        part.replace(self._file)

    @property
    def environ(self) -> dict[str, str]:
        """The environment for programs that use this clock; their monotonic clock is not changed."""
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "PENSTOCK_CANARY_INTERVAL_S": "0.2",
        }


def token(now: float) -> dict[str, str]:
    """The header of a token that is valid for a minute from `now`."""
    claims = {"sub": "camera", "aud": "penstock", "exp": now + 60, "nbf": now - 1}
    return {"authorization": f"Bearer {jwt.encode(claims, SECRET, algorithm='HS256')}"}


def infer(stack: RunningStack, headers: dict[str, str], model: str = "lookup", value: int = 3) -> int:
    name = "index" if model == "lookup" else "trips"
    body = {"inputs": [{"name": name, "shape": [1, 1], "datatype": "INT64", "data": [value]}]}
    return post_json(f"{stack.http_url}/v2/models/{model}/infer", body, **headers).status


@pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime is not here: apt install faketime")
def test_wall_clock_that_jumps_an_hour_changes_no_deadline_and_no_readiness(models: Path) -> None:
    """Deadlines, canaries and quotas run on the monotonic clock; only a token's expiry follows the wall clock."""
    (models / "access.toml").write_text(ACCESS)
    (models / "secret").write_text(SECRET)
    (models / "secret").chmod(0o600)
    clock = Clock(models / "clock")
    clock.move(HOUR_S)
    stack = start_embedded(models, "--access-file", str(models / "access.toml"),
                           **clock.environ)  # fmt: skip
    try:
        assert infer(stack, token(time.time() + HOUR_S)) == 200
        jump_until_served(stack, clock, 0, from_s=HOUR_S)
        jump_until_served(stack, clock, HOUR_S, from_s=0)
        lines = [line for line in stack.log if "draining" in line or "restart" in line]
        assert not lines
        stamp = datetime.now(UTC).timestamp() + HOUR_S
        assert stop_stack(stack) == 0
        last = next(line for line in reversed(stack.log) if "drained" in line)
        shown = datetime.fromisoformat(last.split()[0]).timestamp()
        assert abs(shown - stamp) < 120, "log lines show the wall clock"
    finally:
        if stack.process.poll() is None:
            stop_stack(stack)


def jump_until_served(stack: RunningStack, clock: Clock, to_s: int, *, from_s: int) -> None:
    """The stack's clock jumps between two offsets while a request runs; the request and the next ones are answered."""
    running: list[int] = []
    headers = token(time.time() + from_s) | {"x-request-timeout-ms": "20000"}
    thread = threading.Thread(target=lambda: running.append(infer(stack, headers, "slow", 700)))
    thread.start()
    wait_for(lambda: "penstock_inflight_requests 1.0" in own_metrics(stack), 10, "one request runs")
    clock.move(to_s)
    thread.join(30)
    assert running == [200], "a request in flight keeps its deadline"
    for _ in range(5):
        assert infer(stack, token(time.time() + to_s) | {"x-request-timeout-ms": "5000"}) == 200
        assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200
    assert infer(stack, token(time.time() + from_s)) == 401, "the token is of another hour"


@contextmanager
def busy_core(stack: RunningStack, hogs: int) -> Iterator[None]:
    """Within the block, all processes of the stack share one core with this many busy processes."""
    core = min(os.sched_getaffinity(0))
    for process in (psutil.Process(stack.process.pid), *family(stack)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(hogs)]
    try:
        yield
    finally:
        for one in processes:
            one.kill()
        for one in processes:
            one.wait()


@pytest.mark.long
def test_stack_without_cpu_is_live_and_restarts_nothing(models: Path) -> None:
    """With sixteen busy processes on its only core, the stack answers slowly, and restarts nothing."""
    stack = start_embedded(models, "--workers", "2", PENSTOCK_CANARY_INTERVAL_S="0.5")
    try:
        wait_for(lambda: is_serving(stack), 30, "it serves")
        before = {process.pid for process in family(stack)}
        began = time.monotonic()
        with busy_core(stack, 16):
            while time.monotonic() - began < 12:  # longer than a worker may be silent
                assert call("GET", f"{stack.http_url}/v2/health/live").status == 200
                assert look_up(stack).status == 200
        assert {process.pid for process in family(stack)} == before, "no process was replaced"
        assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200
        assert not stack.logged("hang|restart|not ready")
    finally:
        assert stop_stack(stack) == 0
