"""Driver processes as the rest of the load test sees them: what they send, what they report, how they end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from penstock_load.clients.client import Endpoint
from penstock_load.driver.processes import Drivers
from penstock_load.driver.protocol import DriverError, DriverSetup, PhasePlan
from penstock_load.results import Record, Side, Status
from penstock_load.scenario import Arrivals, Kind, RequestSpec, Shape, Unit
from tests.loadtest.driver_clients import CONNECT


@asynccontextmanager
async def drivers_of(
    *models: str, processes: int = 1, timeout_s: float = 5, max_in_flight: int = 1000
) -> AsyncIterator[Drivers]:
    """Drivers whose clients behave as the models are called; their answers' code is the request's number."""
    setup = DriverSetup(
        endpoints={side: Endpoint(http_url="http://127.0.0.1:9", grpc_address="") for side in Side},
        asks=tuple(RequestSpec(kind=Kind.IMAGE, model=model) for model in models),
        slo_p99_ms=2000,
        timeout_s=timeout_s,
        max_in_flight=max_in_flight,
        seed=1,
        epoch_s=time.monotonic(),
        connect=CONNECT,
    )
    drivers = await Drivers.start(setup, processes=processes)
    pids = drivers.pids
    try:
        yield drivers
    finally:
        await drivers.aclose()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


def at_rate(rate: float, seconds: float, *, shape: Shape = Shape.CONSTANT, side: Side = Side.TARGET) -> PhasePlan:
    """An open-loop phase."""
    return PhasePlan(round=1, phase="p", side=side, seconds=seconds, arrivals=Arrivals(shape=shape, rate=rate))


async def test_two_processes_hold_the_rate_within_a_percent_and_lose_nothing() -> None:
    """The schedule's requests are all there once, at their intended moments, sent within the second they are due."""
    records: list[Record] = []
    async with drivers_of("instant", "chatty", processes=2) as drivers:
        health = await drivers.run(at_rate(200, 2), records.extend)
    assert sorted(int(record.code) for record in records) == list(range(400))
    intended = sorted(record.intended_s for record in records)
    assert [at_s - intended[0] for at_s in intended] == pytest.approx([i / 200 for i in range(400)], abs=1e-6)
    assert (health.intended, health.sent, health.processes) == (400, 400, 2)
    assert health.sent_per_s == pytest.approx(200, rel=0.01)
    assert 0 < health.lag_p50_ms <= health.lag_p99_ms
    assert health.cpu > 0
    assert Counter(record.request for record in records)["image chatty"] == pytest.approx(200, abs=60)


async def test_same_round_has_the_same_arrivals_on_both_sides_and_another_round_others() -> None:
    """Two servers are compared under one schedule."""
    gaps = []
    async with drivers_of("instant", processes=2) as drivers:
        for round_number, side in ((1, Side.TARGET), (1, Side.BESIDE), (2, Side.TARGET)):
            records: list[Record] = []
            plan = PhasePlan(
                round=round_number, phase="p", side=side, seconds=0.3, arrivals=Arrivals(shape=Shape.POISSON, rate=100)
            )
            await drivers.run(plan, records.extend)
            intended = sorted(record.intended_s for record in records)
            gaps.append([round(at_s - intended[0], 6) for at_s in intended])
            assert {record.side for record in records} == {side}
    assert gaps[0] == gaps[1] != gaps[2]


async def test_callers_are_shared_by_the_processes() -> None:
    """Three callers of a server that never answers in time: three requests, each a timeout, waited for at the end."""
    records: list[Record] = []
    async with drivers_of("never", processes=2, timeout_s=0.5) as drivers:
        plan = PhasePlan(round=1, phase="p", side=Side.TARGET, seconds=0.2, callers=3)
        health = await drivers.run(plan, records.extend)
    assert [record.status for record in records] == [Status.TIMEOUT] * 3
    assert all(record.done_s - record.intended_s >= 0.49 for record in records)
    assert (health.intended, health.sent, health.complaint) == (3, 3, "")


async def test_recording_is_replayed_to_its_end(tmp_path: Path) -> None:
    """A phase without a length lasts as long as its recording."""
    recording, records = tmp_path / "times.txt", list[Record]()
    recording.write_text("7.0\n7.1\n7.3\n")
    arrivals = Arrivals(shape=Shape.REPLAY, file=str(recording), speed=2)
    async with drivers_of("instant", processes=2) as drivers:
        plan = PhasePlan(round=1, phase="p", side=Side.TARGET, seconds=0, arrivals=arrivals)
        health = await drivers.run(plan, records.extend)
        recording.write_text("7.0\n7.1\n7.3\nnever\n")
        with pytest.raises(DriverError, match=r"times\.txt:4: 'never' is neither a record nor a time"):
            await drivers.run(plan, records.extend)
    intended = sorted(record.intended_s for record in records)
    assert [at_s - intended[0] for at_s in intended] == pytest.approx([0, 0.05, 0.15], abs=1e-6)
    assert health.intended_per_s == pytest.approx(3 / 0.225)


async def test_server_that_never_answers_fills_what_may_be_in_flight_and_the_health_complains() -> None:
    """What could not be sent is recorded and named: with room for 10 in two processes, 90 of 100 are not sent."""
    records: list[Record] = []
    async with drivers_of("never", processes=2, max_in_flight=10, timeout_s=3) as drivers:
        health = await drivers.run(at_rate(100, 1), records.extend)
    assert Counter(record.status for record in records) == {Status.TIMEOUT: 10, Status.NOT_SENT: 90}
    assert {record.error for record in records if record.status is Status.NOT_SENT} == {
        "5 requests in flight (limit 5)"
    }
    assert (health.intended, health.sent) == (100, 10)
    assert "it sent 10.0% of the 100 intended requests in time, 90 not at all" in health.complaint


async def test_client_that_burns_the_processor_is_noticed() -> None:
    """4 ms of work a request cannot make 400 a second: the complaint says that the generator was the bottleneck."""
    records: list[Record] = []
    async with drivers_of("burner", max_in_flight=100_000) as drivers:
        health = await drivers.run(at_rate(400, 1), records.extend)
    assert len(records) == 400
    assert health.sent_per_s < 396
    assert health.lag_p99_ms > 200
    assert health.complaint.startswith("the load generator was the bottleneck: it sent ")


async def test_killed_process_ends_the_phase_at_once_with_one_sentence() -> None:
    """SIGKILL in the middle of a long phase: DriverError, no hang, and no process is left."""
    async with drivers_of("instant", processes=2) as drivers:
        assert os.getsid(0) not in {os.getsid(pid) for pid in drivers.pids}, "Ctrl-C is the parent's to decide on"
        running = asyncio.create_task(drivers.run(at_rate(100, 600), lambda records: None))
        await asyncio.sleep(0.6)
        os.kill(drivers.pids[1], signal.SIGKILL)
        with pytest.raises(DriverError, match=r"driver process 1 ended during phase 'p' \(SIGKILL\)"):
            await asyncio.wait_for(running, 30)
        with pytest.raises(DriverError, match="stopped in the middle of another"):
            await drivers.run(at_rate(100, 1), lambda records: None)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("exits", r"driver process 0 ended during phase 'p' \(exit code 3\): out of memory, say"),
        (
            "raises",
            r"driver process 0 ended during phase 'p' \(exit code 1\): ZeroDivisionError: a mistake in a client",
        ),
    ],
)
async def test_process_that_ends_by_itself_is_quoted(model: str, words: str) -> None:
    """The error holds the end of what the process wrote to stderr."""
    async with drivers_of(model) as drivers:
        with pytest.raises(DriverError, match=words):
            await drivers.run(at_rate(100, 600), lambda records: None)


async def test_target_that_cannot_be_asked_is_said_in_its_own_words() -> None:
    """What connect says of the target reaches the caller, and no process is left."""
    with pytest.raises(DriverError, match=r"^nothing listens at http://127\.0\.0\.1:9$"):
        async with drivers_of("unreachable"):
            pass
    assert not [child for child in psutil.Process().children() if "penstock_load.driver.child" in child.cmdline()]


async def test_caller_that_fails_over_the_records_gets_its_own_error() -> None:
    """A disk that is full while records are written ends the phase with that error; a schedule that cannot be had is a
    sentence, and the drivers are as good as before."""

    def full(records: object) -> None:
        raise OSError(28, "No space left on device")

    arrivals = Arrivals(shape=Shape.CONSTANT, unit=Unit.OF_CAPACITY, rate=0.5)
    plan = PhasePlan(round=1, phase="p", side=Side.TARGET, seconds=1, arrivals=arrivals)
    async with drivers_of("instant") as drivers:
        with pytest.raises(DriverError, match="of_capacity needs a capacity, and it is None"):
            await drivers.run(plan, lambda records: None)
        assert (await drivers.run(at_rate(20, 0.2), lambda records: None)).sent == 4
        with pytest.raises(OSError, match="No space left"):
            await drivers.run(at_rate(100, 600), full)


def test_process_whose_parent_is_gone_ends() -> None:
    """When stdin is closed the process ends by itself, in the middle of a phase too."""
    setup = {
        "endpoints": {"target": {"http_url": "http://127.0.0.1:9", "grpc_address": ""}},
        "asks": [{"kind": "image", "model": "never"}],
        "slo_p99_ms": 100, "timeout_s": 600, "max_in_flight": 10, "seed": 1, "epoch_s": 0, "connect": CONNECT,
    }  # fmt: skip
    plan = {"round": 1, "phase": "p", "side": "target", "seconds": 600, "callers": 2}
    lines = [
        {"type": "Begin", "setup": setup, "part": 0, "parts": 1},
        {"type": "Go", "plan": plan, "begin_s": time.monotonic()},
    ]
    command = [sys.executable, "-m", "penstock_load.driver.child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        process.stdin.flush()
        first = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [line["type"] for line in first] == ["Ready", "Batch"]
        process.stdin.close()
        assert process.wait(30) == 0
