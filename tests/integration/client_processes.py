"""Local client processes for the tests: rows as a decode process makes them, and a client in its own process."""

import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.workers.running_stacks import RunningStack as Found
from penstock.gateway.workers.running_stacks import stack_at
from penstock.gateway.workers.shared_counters import MAX_PROCESSES, PAGE_NAME, CounterPage, CounterRow
from penstock.vision.decode import DecodedImage
from penstock.vision.preprocess import prepare
from penstock.vision.spec import ColorFormat
from penstock_video.infer.network import Network
from penstock_video.infer.options import EngineAddress
from penstock_video.types import ByteArray, RowArray
from tests.integration.test_slab import BRIGHTNESS, BRIGHTNESS_CONFIG
from tests.support.http import call
from tests.support.stack import CHECKOUT, RunningStack, start_stack
from tests.support.tiny_models import write_held, write_model

ENDS = ("inferences_answered_total", "inferences_failed_total", "inferences_cancelled_total")
CONSOLE = "https://console.example:8443"
DOZING = BRIGHTNESS.replace(
    "        answers = []\n", "        import time\n        time.sleep(0.5)\n        answers = []\n"
)
LAZY_CONFIG = BRIGHTNESS_CONFIG.replace("max_batch_size: 8", "max_batch_size: 4")
NOT_SLOW = BRIGHTNESS_CONFIG + 'parameters { key: "canary" value { string_value: "off" } }\n'
PLAIN_CONFIG = "".join(line for line in BRIGHTNESS_CONFIG.splitlines(keepends=True) if "batch_owner" not in line)
# A client that always has six calls in flight and prints when it has; the tests kill it.
CLIENT = """
import queue, sys, time
from pathlib import Path
import numpy as np
from penstock_video.infer.engine import Engine
from penstock_video.infer.options import EngineAddress

engine = Engine(EngineAddress(Path(sys.argv[1]), "http://127.0.0.1:1", "127.0.0.1:1"))
engine.start(20)
network = engine.network(sys.argv[2], 20)
rows = [np.zeros(tuple(map(int, sys.argv[3].split(","))), np.float32)] * 4
ended = queue.SimpleQueue()
def ask(taken=lambda: None):
    engine.submit(network, rows, deadline=time.monotonic() + 60, taken=taken, done=ended.put)
for _ in range(5):
    ask()
ask(lambda: print("taken", flush=True))
while True:
    ended.get(timeout=60)
    ask()
"""


def start_fronts(folder: Path) -> RunningStack:
    """Two fronts and their core, on which clients may share memory, and which CONSOLE's pages may use.

    brightness is quick, plain is not batched here, dozing and lazy take half a second a call; held answers while its
    gate is open, which it is.
    """
    models = folder / "models"
    write_model(models, "brightness", BRIGHTNESS, BRIGHTNESS_CONFIG)
    write_model(models, "plain", BRIGHTNESS, PLAIN_CONFIG)
    write_model(models, "dozing", DOZING, NOT_SLOW)
    write_model(models, "lazy", DOZING, LAZY_CONFIG)
    write_held(models, "held", BRIGHTNESS, BRIGHTNESS_CONFIG)
    words = ("--models", "brightness,plain,dozing,lazy,held", "--allow-client-shm", "--workers", "2")
    pages = ("--allowed-host", "gateway.example", "--cors-origin", CONSOLE)
    return start_stack(folder / "home", "--model-repository", str(models), *words, *pages)


def found(stack: RunningStack) -> Found:
    """As a program of this host finds it."""
    seen = stack_at(stack.http_url)
    assert seen is not None, "a stack that is ready is found"
    return seen


def local(stack: RunningStack) -> EngineAddress:
    seen = found(stack)
    return EngineAddress(seen.run_dir, seen.http_url, seen.grpc_address)


def remote(stack: RunningStack, api_key: str = "") -> EngineAddress:
    return EngineAddress(None, stack.http_url, stack.grpc_address, api_key)


def row_of(network: Network, picture: ByteArray) -> RowArray:
    """picture: (H, W, 3) uint8 BGR."""
    spec = network.prepare_spec
    pixels = picture if spec.color is ColorFormat.BGR else cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)
    row, _ = prepare(DecodedImage(np.asarray(pixels, np.uint8), picture.shape[1], picture.shape[0]), spec)
    return row


def client_process(run_dir: Path, model: str, shape: str = "3,128,128") -> subprocess.Popen[str]:
    """Runs when this returns, with its rows at the engine."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(run_dir), model, shape], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "taken\n" in iter(process.stdout.readline, "")  # behind lines of the log
    return process


def killed(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and nothing of it left here."""
    process.kill()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


def ended(more: dict[tuple[str, ...], float]) -> float:
    """Of what `grown` tells: inferences that have their end."""
    return sum(value for name, value in more.items() if name[0] in ENDS)


def figures(stack: RunningStack) -> dict[tuple[str, ...], float]:
    """What the metrics page says, by a series' name and its labels' values in the order of their names."""
    text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return {
        (sample.name.removeprefix("penstock_"), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def grown(stack: RunningStack, before: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """What is more on the page than it was, once the stack is at rest again; fails where it does not come to rest."""
    page = figures_at_rest(stack)
    return {name: value - before.get(name, 0.0) for name, value in page.items() if value > before.get(name, 0)}


def figures_at_rest(stack: RunningStack) -> dict[tuple[str, ...], float]:
    """As `figures`, once all that was accepted has its end there, of all that was asked before.

    Fails where that is not so within 20 s.
    """
    until = time.monotonic() + 20
    wait_until_fronts_wrote(stack, until)
    while True:
        page = figures(stack)
        accepted = page.get(("inferences_accepted_total",), 0)
        if not page["inflight_requests",] and accepted == ended(page):
            return page
        assert time.monotonic() < until, (accepted, ended(page))
        time.sleep(0.05)


def wait_until_fronts_wrote(stack: RunningStack, until: float) -> None:
    """A front writes its counts down at each beat: at its second from now, those of all that was asked before."""
    page = CounterPage(found(stack).run_dir / PAGE_NAME)
    began = {column: beats for column in range(1, MAX_PROCESSES) if (beats := page.read(CounterRow.BEATS, column))}
    while any(0 <= page.read(CounterRow.BEATS, column) - beats < 2 for column, beats in began.items()):
        assert time.monotonic() < until, "the fronts do not write their counts down"
        time.sleep(0.02)
    page.close()


def in_flight(stack: RunningStack) -> dict[tuple[str, ...], float]:
    """All that is of requests that are not over; empty when there are none."""
    words: tuple[str, ...] = ("inflight", "receiving", "batch_queue", "batch_calls", "key_inflight", "slab_leased")
    words = (*words, "guests")  # plain-english: ok
    return {name: value for name, value in figures(stack).items() if name[0].startswith(words) and value}


def png(picture: ByteArray) -> bytes:
    is_written, encoded = cv2.imencode(".png", picture)
    assert is_written
    return encoded.tobytes()
