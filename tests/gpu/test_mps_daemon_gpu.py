"""NVIDIA's own MPS daemon on a real card, without Triton: limits, who is a client, and what a fault looks like.

python -m pytest -p no:randomly -s tests/gpu/test_mps_daemon_gpu.py        a quarter of a minute; -s shows what was said
"""

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from penstock.engines.run_directory import ENGINE_ID_VARIABLE, reap
from penstock.engines.triton import launch as triton_launch
from penstock.gpu.mps.control import DaemonStatus, MpsOptions, ServerState, find_program
from penstock.gpu.mps.daemon import DaemonProcess, OwnDaemon
from penstock.gpu.mps.supervisor import processes_using_gpu
from tests.support.stack import CHECKOUT

pytestmark = pytest.mark.gpu
MARK = "fedcba987654"
GIB = 1 << 30
OUT_OF_MEMORY = 2
# Says how many SMs it has and what the driver said to its memory; then, line by line, what it says to a write.
CLIENT = """
import ctypes, sys
from loadtest.bench.gpu.cuda_region import CudaError, open_driver
try:
    cuda = open_driver()
except CudaError as error:
    print(error, flush=True)
    raise SystemExit(1)
count, place = ctypes.c_int(), ctypes.c_uint64()
cuda.cuDeviceGetAttribute(ctypes.byref(count), 16, 0)
refused = cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(int(sys.argv[1])))
print(count.value, refused, flush=True)
for _ in sys.stdin:
    said = cuda.cuMemsetD8_v2(place, 1, ctypes.c_size_t(1 << 20)) or cuda.cuCtxSynchronize()
    print(said, flush=True)
"""


class Client:
    """A process with a CUDA context, a client where the environment says so."""

    def __init__(self, environ: dict[str, str], size_bytes: int = GIB) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(size_bytes)], text=True, cwd=CHECKOUT, env=os.environ | environ,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.began = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def write(self) -> str:
        """What the driver says to a write into its memory: 0 for done."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            return "it has ended"
        return self._line() or "it has ended"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Mps:
    """A daemon, and the clients that were started beside it."""

    def __init__(self, daemon: OwnDaemon, said: list[str]) -> None:
        self.daemon, self.said = daemon, said
        self.clients: list[Client] = []

    def client(self, size_bytes: int = GIB) -> Client:
        one = Client(self.daemon.options.env_vars(), size_bytes)
        self.clients.append(one)
        return one

    async def until(self, is_so: Callable[[DaemonStatus], bool], seconds: float = 15.0) -> float:
        """How long it took; -1 where it did not come."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if is_so(await self.daemon.status()):
                return time.monotonic() - began
        return -1.0


Start = Callable[..., Awaitable[Mps]]


def stray(environ: dict[str, str]) -> str:
    """What a client says that writes where it may not."""
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.bench.gpu.rogue"], input="now\n", text=True, cwd=CHECKOUT, timeout=30,
        env=os.environ | environ, capture_output=True, check=False,
    )  # fmt: skip
    return " ".join(done.stdout.split())


@pytest.fixture
async def start(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Start]:
    """Starts a daemon with these options; nothing of it is left."""
    program = find_program()
    if not program:
        pytest.skip("needs nvidia-cuda-mps-control on PATH")
    made: list[Mps] = []

    async def begin(**options: object) -> Mps:
        said: list[str] = []
        hold = DaemonProcess(
            program, bond=(sys.executable, "-I", "-S", triton_launch.__file__, str(os.getpid())),
            environ={**os.environ, ENGINE_ID_VARIABLE: MARK}, clear=lambda child: reap(MARK, child_pid=child),
        )  # fmt: skip
        daemon = OwnDaemon(
            MpsOptions(tmp_path_factory.mktemp("mps"), **options),  # type: ignore[arg-type]
            hold, emit=lambda level, event, **fields: said.append(f"{event} {fields.get('line', '')}"),
        )  # fmt: skip
        await daemon.start()
        made.append(Mps(daemon, said))
        return made[-1]

    yield begin
    for mps in made:
        for client in mps.clients:
            client.end()
        await mps.daemon.stop()
        sys.stdout.write("\n".join(["", "the daemon said:", *mps.said]) + "\n")


async def test_clients_are_listed_and_hold_the_card_by_cudas_file(start: Start) -> None:
    """What the proof of attachment rests on: the server's list has their process ids, /proc the open file."""
    mps = await start()
    clients = [mps.client(), mps.client()]
    pids = frozenset(client.process.pid for client in clients)
    status = await mps.daemon.status()
    raw = [await mps.daemon.control.ask(f"get_server_status {server.pid}") for server in status.servers]
    sys.stdout.write(f"\nstates {raw}; ps:\n{await mps.daemon.control.ask('ps')}\n")
    assert status.clients == pids
    assert [server.state for server in status.servers] == [ServerState.ACTIVE]
    beside = Client({})
    assert processes_using_gpu(frozenset({beside.process.pid}))
    sys.stdout.write(f"clients that hold /dev/nvidia-uvm: {sorted(processes_using_gpu(pids))} of {sorted(pids)}\n")
    beside.end()


async def test_client_over_its_memory_fails_alone_and_has_its_share_of_the_sms(start: Start) -> None:
    """FAULTS 70: 5 GiB of 4 are refused, one beside it goes on; at 50 % of the threads half of the SMs are seen."""
    whole = Client({})
    all_sms = int(whole.began.split()[0])
    whole.end()
    mps = await start(active_thread_percentage=50, pinned_memory="4G")
    modest, greedy = mps.client(GIB), mps.client(5 * GIB)
    assert [int(word) for word in modest.began.split()] == [all_sms // 2, 0]
    assert int(greedy.began.split()[1]) == OUT_OF_MEMORY
    assert modest.write() == "0"


async def test_fault_of_one_client_is_reported_and_others_start_when_all_have_gone(start: Start) -> None:
    """FAULTS 68, as the daemon reports it: which state, what the others get, when a new client is taken."""
    mps = await start()
    other = mps.client()
    said = stray(mps.daemon.options.env_vars())
    seen = await mps.until(lambda status: any(s.state is ServerState.FAULT for s in status.servers), 3.0)
    got = other.write()
    new = mps.client()
    sys.stdout.write(
        f"\nstray: {said}; FAULT seen after {seen:.2f} s; the other's write: CUDA {got}; "
        f"a new client meanwhile: {new.began}\n"
    )
    other.end()
    new.end()
    well = await mps.until(lambda status: all(s.state is not ServerState.FAULT for s in status.servers))
    again = mps.client()
    sys.stdout.write(f"well after {well:.2f} s without clients; a new client: {again.began}\n")
    assert well >= 0
    assert again.began.split()[1] == "0"
