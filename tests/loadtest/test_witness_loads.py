"""What the machines are busy with: the server's family of processes, all cores, GPUs."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock_load.clients.client import Endpoint
from penstock_load.witness.loads import GpuReader, Loads, LoadSample, Readers, load_between, open_loads
from penstock_load.witness.process_cpu import NotListening, Usage, meter_of_server

FRONT = """
import os, socket, sys
while not os.times().user:  # counted in steps of 10 ms
    pass
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
SUPERVISOR = """
import subprocess, sys
python, front = sys.argv[1:]
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "a sibling"])
sys.exit(subprocess.call([python, "-c", front], start_new_session=True))
"""


@pytest.fixture
def supervised(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """(process id, port) of a supervisor whose front listens; a front of another interpreter where asked."""
    python = sys.executable
    if getattr(request, "param", "") == "another interpreter":
        python = str(tmp_path / "python")
        os.symlink(sys.executable, python)
    supervisor = [sys.executable, "-c", SUPERVISOR, python, FRONT]
    with subprocess.Popen(supervisor, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())


def test_family_of_a_port_is_the_supervisor_with_all_its_children_and_not_this_test(
    supervised: tuple[int, int],
) -> None:
    """The front has a session of its own, as the gateway has; its sibling, which listens on nothing, belongs to it."""
    pid, port = supervised
    meter = meter_of_server("127.0.0.1", port)
    family = {process.pid for process in meter.processes()}
    assert (meter.root.pid, len(family)) == (pid, 3)
    assert os.getpid() not in family
    assert meter.read().rss_bytes > 10 << 20


STARTER = """
import os, subprocess, sys
while not os.times().user:
    pass
arguments = [sys.executable, "-c", sys.argv[1], str(os.getpid())]
subprocess.run(arguments, start_new_session=True)
"""
STARTED = """
import os, subprocess, sys
from penstock_load.witness.process_cpu import meter_of_starter
with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as driver:
    meter = meter_of_starter(int(sys.argv[1]))
    found = {process.pid for process in meter.processes()}
    used_s = meter.read_s()
    print(int(sys.argv[1]) in found, meter.root.pid, os.getpid() in found, driver.pid in found, used_s > 0)
    driver.stdin.close()
"""


def test_load_test_that_the_server_starts_counts_the_server_without_itself(tmp_path: Path) -> None:
    """A child of a server's child: its supervisor and it are counted, the load test and its driver are not."""
    python = tmp_path / "python"  # a program of its own, so that this test is not its parent
    python.symlink_to(sys.executable)
    supervisor = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [python, "-c", supervisor, STARTER, STARTED], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        out, _ = process.communicate(timeout=60)
    assert out.split() == ["True", str(process.pid), "False", "False", "True"]


@pytest.mark.parametrize("supervised", ["another interpreter"], indirect=True)
def test_family_of_another_interpreters_child_is_that_child_alone(supervised: tuple[int, int]) -> None:
    """Triton asked by its own port is not the gateway's supervisor."""
    pid, port = supervised
    meter = meter_of_server("127.0.0.1", port)
    assert meter.root.ppid() == pid
    assert len(meter.processes()) == 1


def test_port_that_this_process_itself_serves_has_no_meter() -> None:
    """A server inside the load generator cannot be measured apart from it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(NotListening, match=f"127.0.0.1:{port} is served by this process itself"):
            meter_of_server("127.0.0.1", port)
    with pytest.raises(NotListening, match=f"no process .* listens on 127.0.0.1:{port}"):
        meter_of_server("127.0.0.1", port)


def test_server_of_another_machine_has_no_meter() -> None:
    """By its address; nothing is sent there."""
    with pytest.raises(NotListening, match=r"192\.0\.2\.1:80 is another machine"):
        meter_of_server("192.0.2.1", 80)


def test_load_between_two_moments_is_cores_and_shares_at_their_middle() -> None:
    """3 CPU seconds in 2 s are 1.5 cores; 6 of 8 seconds busy are 75 %."""
    earlier = LoadSample(10.0, Usage(5.0, 0), 100.0, 200.0, None)
    later = LoadSample(12.0, Usage(8.0, 3 << 20), 106.0, 208.0, 0.5, 0.01)
    load = load_between(earlier, later)
    assert (load.at_s, load.server_cpu, load.machine_cpu, load.gpu, load.rss_mib) == (11.0, 1.5, 0.75, 0.5, 3.0)
    assert load.gpu_sm == 0.01


def test_cpu_of_a_server_that_was_started_again_is_unknown_for_a_moment() -> None:
    """Not negative."""
    earlier, later = (LoadSample(at_s, Usage(cpu_s, 1), at_s, at_s, None) for at_s, cpu_s in ((1.0, 50.0), (2.0, 0.1)))
    assert load_between(earlier, later).server_cpu is None
    assert load_between(earlier._replace(usage=None), later).server_cpu is None


async def test_loads_are_sampled_from_start_to_end_on_the_runs_clock() -> None:
    """A reader whose server uses two cores on a clock that the test moves: two cores in every sample."""
    now = 1000.0

    class Usages:
        async def read(self) -> Usage:
            nonlocal now
            now += 1.0
            return Usage(now * 2, 1 << 20)

    async with Loads(Readers(usage=Usages()), began_s=1000.0, interval_s=0.0, clock=lambda: now) as loads:
        while len(loads.between(0.0, 10.0)) < 5:
            await asyncio.sleep(0)
    samples = loads.between(2.0, 5.0)
    assert [sample.at_s for sample in samples] == [2.5, 3.5, 4.5]
    assert {sample.server_cpu for sample in samples} == {2.0}


async def test_open_loads_reads_a_real_process_and_says_where_no_gpu_is(supervised: tuple[int, int]) -> None:
    """Its CPU time and memory; None for a card that is not there, with the reason."""
    _, port = supervised
    endpoint = Endpoint(http_url=f"http://127.0.0.1:{port}", grpc_address="127.0.0.1:1")
    async with await open_loads(endpoint, began_s=0.0, interval_s=0.05) as loads:
        while not (samples := loads.between(0.0, float("inf"))):
            await asyncio.sleep(0.01)
        assert (await loads.server_cpu_s() or 0) > 0
    assert (samples[0].rss_mib or 0) > 10
    assert samples[0].server_cpu is not None
    assert (samples[0].gpu is None) == any(note.startswith("no GPU: ") for note in loads.notes)


async def test_loads_of_an_unreadable_server_are_none_and_say_why() -> None:
    """A remote server without a metrics page."""
    endpoint = Endpoint(http_url="http://192.0.2.1:80", grpc_address="192.0.2.1:81")
    page = "http://127.0.0.1:9/metrics"
    async with await open_loads(endpoint, began_s=0.0, metrics_url=page, timeout_s=1) as loads:
        assert await loads.server_cpu_s() is None
    assert loads.notes == (
        "no CPU of the server: 192.0.2.1:80 is another machine, whose processes cannot be seen from here, and it does "
        "not say process_cpu_seconds_total",
        "no GPU: the server is on another machine",
    )


async def test_gpu_share_is_what_its_process_said_last_and_not_what_it_said_long_ago() -> None:
    """After three seconds of silence the load is unknown."""
    now = 0.0
    program = 'import sys; print(\'{"busiest":0.25,"sm_activity":0.01}\', flush=True); sys.stdin.read()'
    reader = GpuReader((sys.executable, "-c", program), clock=lambda: now)
    await reader.start()
    assert (reader.share(), reader.sm_activity(), reader.why) == (0.25, 0.01, "")
    now = 3.5
    assert (reader.share(), reader.sm_activity()) == (None, None)
    await reader.stop()


async def test_gpu_process_that_hangs_or_dies_is_ended_and_named() -> None:
    """It ignores that its input closed, as one does that waits for a driver; the other says nothing at all."""
    program = 'import time; print(\'{"why":"the driver sleeps"}\', flush=True); time.sleep(600)'
    hanging = GpuReader((sys.executable, "-c", program))
    await hanging.start()
    children = psutil.Process().children()
    await hanging.stop()
    assert (hanging.why, hanging.share()) == ("the driver sleeps", None)
    assert not any(child.is_running() and "time.sleep(600)" in str(child.cmdline()) for child in children)
    dead = GpuReader((sys.executable, "-c", ""))
    await dead.start()
    assert dead.why == "the process that asks NVML ended without a word"
    await dead.stop()
