"""Ten minutes of everything at once, with deaths: nothing is lost, nothing grows, nothing is left behind.

Two fronts over one core, pictures, tensors of models that the gateway owns and of models that it relays, streams,
callers that leave, deadlines; now and then the engine, a decoder or a front is killed. MIXED_LOAD_S says how long.
"""

import asyncio
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tests.integration.ledger import Ledgers, ended, inferences, open_request, page_of, rows_tensor, write_ledger
from tests.integration.living import SLOW_CONFIG, SharedMemory, family, inflight
from tests.long.crowd import Crowd, Work
from tests.support.http import call, post_json
from tests.support.stack import CHECKOUT, RunningStack, start_stack
from tests.support.tiny_models import CONFIG, IDENTITY, SLOW, write_model
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

DURATION_S = float(os.environ.get("MIXED_LOAD_S", "600"))
KILL_EVERY_S = max(DURATION_S / 20, 15.0)
MIB = 1 << 20
MAX_GROWTH_MIB = 96.0  # of all processes together, from a quarter of the time to its end
REFUSED = {"499", "503", "504", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}


@pytest.fixture
def ledgers(tmp_path: Path, triton_environment: Path) -> Iterator[Ledgers]:
    """Two fronts over: naps (owned), identity (relayed), slow (relayed), and street where the checkout has it."""
    models = tmp_path / "models"
    write_ledger(tmp_path, "naps")
    write_model(models, "identity", IDENTITY, CONFIG.format(max_batch_size=8, data_type="TYPE_FP32", count=1))
    write_model(models, "slow", SLOW, SLOW_CONFIG)
    shutil.copytree(CHECKOUT / "model_repository" / "street", models / "street")
    stack = start_stack(tmp_path / "home", "--model-repository", str(models), "--workers", "2")
    yield Ledgers(stack, tmp_path)
    if stack.process.poll() is None:
        stack.process.kill()


class Load(Crowd):
    """Callers of every kind; who is refused waits a moment. said: the last words of each refusal."""

    def __init__(self, ledgers: Ledgers) -> None:
        self.wrong: list[str] = []
        self.said: dict[str, str] = {}
        self._ledgers, self._stack = ledgers, ledgers.stack
        self._picture = picture()
        works = (self.picture, self.owned, self.owned, self.owned_grpc, self.relayed, self.stream, self.hasty)
        super().__init__((*works, self.leave))

    def outcome_of(self, work: Work) -> str:
        """A front that was killed, or that does not listen yet, breaks a connection."""
        try:
            return work()
        except InferenceServerException as error:
            outcome = (error.status() or "broken").removeprefix("StatusCode.")
            self.said[outcome] = error.message()
            return outcome
        except Exception as error:  # noqa: BLE001 - whatever happens is an outcome, and fails the test by its name
            return f"broken {type(error).__name__}"

    def is_fine(self, outcome: str) -> bool:
        """Answered, or left by itself."""
        return outcome.startswith(("200", "left"))

    def _own(self, got: float, wanted: float, work: str) -> str:
        if got != wanted:
            self.wrong.append(f"{work}: {got} for {wanted}")
        return "200"

    def picture(self) -> str:
        url = f"{self._stack.http_url}/v2/models/street/image"
        return str(call("POST", url, self._picture, {"content-type": "image/jpeg"}).status)

    def owned(self) -> str:
        value = float(random.randrange(1 << 20))
        answer = self._ledgers.post("naps", [[value, 2.0]])
        return (
            self._own(answer.json["outputs"][0]["data"][0], value, "owned")
            if answer.status == 200
            else str(answer.status)
        )

    def owned_grpc(self) -> str:
        """Four callers at once, of whom one leaves at times."""
        return asyncio.run(self._four())

    async def _four(self) -> str:
        values = [float(random.randrange(1 << 20)) for _ in range(4)]
        async with tritonclient.grpc.aio.InferenceServerClient(self._stack.grpc_address) as client:
            asked = [asyncio.create_task(client.infer("naps", [rows_tensor([value, 5.0])])) for value in values]
            if random.random() < 0.3:
                await asyncio.sleep(random.random() / 100)
                asked[0].cancel()
            ends = await asyncio.gather(*asked, return_exceptions=True)
        for end, value in zip(ends, values, strict=True):
            if isinstance(end, InferenceServerException):
                raise end
            if not isinstance(end, BaseException):
                self._own(float(end.as_numpy("y")[0, 0]), value, "owned_grpc")
        return "200"

    def relayed(self) -> str:
        body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [5]}]}
        return str(post_json(f"{self._stack.http_url}/v2/models/identity/infer", body).status)

    def stream(self) -> str:
        """Five requests on one stream."""
        answers: list[InferenceServerException | None] = []
        is_done = threading.Event()

        def take(result: object, error: InferenceServerException | None) -> None:
            assert result is not None or error is not None
            answers.append(error)
            if len(answers) == 5 or error is not None:
                is_done.set()

        with tritonclient.grpc.InferenceServerClient(self._stack.grpc_address) as client:
            client.start_stream(take)
            tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
            for _ in range(5):
                client.async_stream_infer("identity", [tensor])
            is_answered = is_done.wait(30)
            failed = next((error for error in answers if error is not None), None)
            client.stop_stream(cancel_requests=True)
        if failed is not None:
            raise failed
        return "200" if is_answered else "hangs"

    def hasty(self) -> str:
        """More sleep than its deadline allows, at times."""
        milliseconds = random.choice((1.0, 1.0, 60.0))
        return str(self._ledgers.post("naps", [[1.0, milliseconds]], **{"x-request-timeout-ms": "40"}).status)

    def leave(self) -> str:
        """Sends a request and hangs up, of an owned or a relayed model."""
        with open_request(self._stack, "naps", [2.0, 30.0]):
            time.sleep(random.random() / 20)
        return "left"


def picture() -> bytes:
    noise = np.random.default_rng(1).integers(0, 255, (288, 512, 3), np.uint8)
    is_written, encoded = cv2.imencode(".jpg", noise)
    assert is_written
    return encoded.tobytes()


def parts(stack: RunningStack) -> dict[str, psutil.Process]:
    """Who may be killed, by name: triton, front-1, front-2, decoder. Some may just be gone."""
    found = {}
    for child in family(stack):
        with suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            if child.name().startswith("tritonserver"):
                found["triton"] = child
            elif words[-1:] and words[-1].startswith("front-"):
                found[words[-1]] = child
            elif "penstock.vision.decoder_worker" in words:
                found["decoder"] = child
    return found


def memory_mib(stack: RunningStack) -> float:
    """Of the gateway's processes, without Triton's."""
    total = 0
    for child in family(stack):
        with suppress(psutil.NoSuchProcess):
            total += 0 if "triton" in child.name() else child.memory_info().rss
    return total / MIB


def is_accounted(found: Counter[str]) -> bool:
    """Whether all that was accepted has an end."""
    return found["accepted"] == ended(found) > 0


def test_mixed_load_with_deaths_loses_nothing_and_leaves_nothing(
    ledgers: Ledgers, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every caller gets its own row or a refusal in the table's words, and the counters add up after all deaths."""
    stack = ledgers.stack
    memory = SharedMemory(stack)
    deaths: Counter[str] = Counter()
    sizes: list[float] = []
    with Load(ledgers) as load:
        began, killed_at = time.monotonic(), time.monotonic()
        while (now := time.monotonic()) - began < DURATION_S:
            time.sleep(1)
            if now - began > DURATION_S / 4:
                sizes.append(memory_mib(stack))
            if now - killed_at > KILL_EVERY_S and now - began < DURATION_S - 20:
                killed_at = now
                name, process = min(parts(stack).items(), key=lambda part: (deaths[part[0]], part[0]))
                process.send_signal(signal.SIGKILL)
                deaths[name] += 1
            if int(now - began) % 10 == 0:
                with capsys.disabled():
                    print(f"{now - began:.0f} s: {load.outcomes.total()} done, deaths {dict(deaths)}")  # noqa: T201
    summary = f"{dict(load.outcomes)}\n{load.said}\ndeaths {dict(deaths)}\nmemory {sizes[0]:.0f} to {sizes[-1]:.0f} MiB"
    with capsys.disabled():
        print(summary)  # noqa: T201
    assert not stack.logged("unexpectedly"), stack.logged("unexpectedly")[0]
    assert not load.wrong, load.wrong[:5]
    assert {name.split()[0] for name in load.outcomes if name.endswith((" 200", " left"))} == {
        *("picture", "owned", "owned_grpc", "relayed", "stream", "hasty", "leave")
    }, summary
    strange = [name for name in load.outcomes if name.split()[1] not in {"200", "left", "broken", *REFUSED}]
    assert not strange, summary
    wait_for(lambda: inflight(stack) == 0, 30, "nothing in flight")
    # A front writes down once a second what it counted.
    wait_for(lambda: is_accounted(inferences(page_of(stack))), 10, f"{inferences(page_of(stack))} adds up")
    assert float(np.mean(sizes[-5:])) - float(np.mean(sizes[:5])) < MAX_GROWTH_MIB, summary
    everyone = family(stack)
    with Load(ledgers):
        time.sleep(2)
        stack.process.terminate()
        time.sleep(1)
    assert stack.process.wait(60) == 0, "".join(stack.log[-30:])
    assert not [child for child in everyone if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not memory.regions()
