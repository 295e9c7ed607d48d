"""The race's promises on the real gateway: real sockets, a real Triton, the V100's profile replayed ten times slower.

The model sleeps 19.8 + 1.475 b ms for b rows, so that what two cores add, which the callers share, is small beside it.
It wants a machine that does nothing else: what others take from the cores is late here.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from penstock.planning.bounds import nexus_rate
from penstock.planning.profile import linear_profile
from penstock.planning.simulation import PATTERNS
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import CONFIG, write_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SLOW_V100 = linear_profile("v100 slowed ten times", alpha_s=19.8e-3, beta_s=1.475e-3, max_batch_size=512)
REPLAY = '''"""Takes as long as ten V100s would in a row."""
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            time.sleep(0.0198 + 0.001475 * len(array))
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]))
        return answers
'''
OWNED = """parameters {{ key: "batch_owner" value {{ string_value: "gateway" }} }}
parameters {{ key: "slo_p99_ms" value {{ string_value: "{slo_ms:g}" }} }}
"""
SLOS_MS = (70.0, 150.0, 500.0)
WAY_MS = 20.0  # of the SLO, allowed to client, sockets and two shared cores
WARM_UP_S, MEASURED_S = 4.0, 12.0
INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(slots=True)
class Found:
    """What the callers saw of the requests after the warm-up."""

    offered: int
    seconds: float
    in_time: int
    fates: Counter[str]

    @property
    def goodput(self) -> float:
        """Requests a second that were answered inside the SLO and what the way is allowed."""
        return self.in_time / self.seconds


@pytest.fixture(scope="module")
def slow_stack(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack whose replayed models differ by their SLO alone."""
    home = tmp_path_factory.mktemp("replay")
    for slo_ms in SLOS_MS:
        config = CONFIG.format(max_batch_size=512, data_type="TYPE_FP32", count=1) + OWNED.format(slo_ms=slo_ms)
        write_model(home / "models", f"replay_{slo_ms:g}", REPLAY, config)
    stack = start_stack(home)
    yield stack
    assert stop_stack(stack) == 0


def body_of(model: str) -> bytes:
    """One row of four numbers."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(np.arange(4, dtype=np.float32).tobytes())
    return request.SerializeToString()


async def offer(address: str, model: str, times: tuple[float, ...], slo_s: float) -> Found:
    """Open loop: every call starts at its time, whatever became of the others."""
    body, fates, in_time, began = body_of(model), Counter[str](), 0, time.perf_counter()

    async with grpc.aio.insecure_channel(address) as channel:
        infer = channel.unary_unary(INFER)

        async def ask(at: float) -> None:
            nonlocal in_time
            await asyncio.sleep(began + at - time.perf_counter())
            sent = time.perf_counter()
            try:
                await asyncio.wait_for(infer(body), 30.0)  # a gRPC timeout would be the request's deadline
                fate = "answered"
            except grpc.aio.AioRpcError as error:
                fate = error.code().name
            if at >= WARM_UP_S:
                fates[fate] += 1
                in_time += fate == "answered" and time.perf_counter() - sent <= slo_s + WAY_MS / 1e3

        await asyncio.gather(*(ask(at) for at in times))
    return Found(sum(at >= WARM_UP_S for at in times), times[-1] - WARM_UP_S, in_time, fates)


def replay(stack: RunningStack, slo_ms: float, rate: float, pattern: str = "poisson") -> Found:
    """At that rate, after a warm-up at the same."""
    times = PATTERNS[pattern](rate, int(rate * (WARM_UP_S + MEASURED_S)), 11).times
    found = asyncio.run(offer(stack.grpc_address, f"replay_{slo_ms:g}", times, slo_ms / 1e3))
    print(f"{slo_ms:g} ms, {rate:.0f}/s {pattern}: in time {found.in_time / found.offered:.4f}, {found}")  # noqa: T201
    return found


@pytest.mark.parametrize("pattern", ["poisson", "periodic"])
@pytest.mark.parametrize(("slo_ms", "share_of_nexus"), [(70.0, 0.60), (150.0, 0.80), (500.0, 0.90)])
def test_requests_at_a_rate_that_the_replay_promises_are_answered_in_time(
    slow_stack: RunningStack, slo_ms: float, share_of_nexus: float, pattern: str
) -> None:
    """A tenth below the rate of the replay, for the way: 99 % are inside the SLO."""
    rate = share_of_nexus * nexus_rate(SLOW_V100, slo_ms / 1e3)
    found = replay(slow_stack, slo_ms, rate, pattern)
    assert found.in_time >= 0.99 * found.offered


@pytest.mark.parametrize(("slo_ms", "times_nexus"), [(70.0, 1.5), (150.0, 1.5), (500.0, 1.5), (70.0, 3.0)])
def test_overload_costs_the_real_gateway_no_goodput_and_the_rest_is_refused(
    slow_stack: RunningStack, slo_ms: float, times_nexus: float
) -> None:
    """At least 0.90 of Nexus' bound is answered in time; what is not was refused (503), not left to time out (504)."""
    nexus = nexus_rate(SLOW_V100, slo_ms / 1e3)
    found = replay(slow_stack, slo_ms, times_nexus * nexus)
    assert found.goodput >= 0.90 * nexus
    assert set(found.fates) <= {"answered", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
    assert found.fates["DEADLINE_EXCEEDED"] <= 0.02 * found.offered
