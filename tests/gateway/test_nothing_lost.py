"""Nothing is lost, whatever happens in whatever order: every accepted inference has one end, and callers agree.

`test_inference_counters` tells the ends one by one; here the whole data plane is before an engine that answers, fails,
hangs, answers rubbish, goes away and falls silent, as hypothesis likes.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import Mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2

from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway.admission import AdmissionControl
from penstock.gateway.batch_flow import BatchFlow
from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.dataplane import DataPlane, PlaneParts
from penstock.gateway.engine_slots import EngineSlots
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.metrics import Metrics
from penstock.protocol.call import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall, InferHead
from penstock.protocol.cancellation import CancelStage
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InferenceError
from penstock.protocol.identity import ANONYMOUS, Verb
from penstock.protocol.inference import BatchOwner, Datatype, InferRequest, Tensor, tensor_from_numpy
from penstock.testing import FakeEngine, FakeMode

OWNED, RELAYED = "owned", "relayed"
PLACES, QUEUE = 12, 5
OPTIONS = BatchOptions(owner=BatchOwner.GATEWAY, max_batch_size=4, instances=1, max_queue_size=QUEUE)
WATCH = WatchOptions(probe_interval_s=60, down_interval_s=0.001, canary_interval_s=60)
INFER = "/inference.GRPCInferenceService/ModelInfer"


class Watch(EngineWatch):
    """A watch that can report that calls in flight will not be answered."""

    def fall_silent(self) -> None:
        for cut in self._cuts:
            cut("reported")


@dataclass
class Plane:
    """A data plane over an engine that the test controls, and the clients so far."""

    plane: DataPlane
    engine: FakeEngine
    watch: Watch
    pool: BatcherPool
    admission: InFlightLimiter
    metrics: Metrics
    tasks: list["asyncio.Task[object]"] = field(default_factory=list)

    def counted(self) -> Counter[str]:
        """accepted, answered, failed/REASON, cancelled/STAGE."""
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(self.metrics.text().decode()):
            for sample in family.samples:
                name = re.fullmatch(r"penstock_inferences_(\w+)_total", sample.name)
                if name and sample.value:
                    found["/".join((name[1], *sample.labels.values()))] = int(sample.value)
        return found

    def is_busy(self) -> bool:
        """Whether a client waits, or an abandoned call is still at the engine."""
        queues = self.pool.statistics().values()
        return not all(task.done() for task in self.tasks) or any(queue.depth or queue.in_flight for queue in queues)

    async def over_http(self, model: str, deadline: float | None) -> HttpAnswer:
        body = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[7]}]}'
        call = HttpCall("POST", f"/v2/models/{model}/infer".encode(), (), body)
        return await self.plane.relay(Verb.INFER, InferHead(model), call, deadline=deadline)

    async def over_grpc(self, model: str, deadline: float | None) -> GrpcAnswer:
        request = service_pb2.ModelInferRequest(model_name=model)
        request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        request.raw_input_contents.append(bytes(4))
        call = GrpcCall(INFER, request.SerializeToString())
        return await self.plane.relay(Verb.INFER, InferHead(model), call, deadline=deadline)

    async def as_client_process(self, model: str, deadline: float | None) -> str:
        """The engine's own refusal is an answer, as over gRPC."""
        request = InferRequest(model, (tensor_from_numpy("x", np.zeros((1, 1), np.float32)),), deadline=deadline)
        await self.plane.infer_tensors(request, self.engine, client="process 1")
        return "answered"

    async def on_a_stream(self, model: str, _: float | None) -> str:
        with self.plane.stream_slot(InferHead(model), ANONYMOUS, 1):
            await asyncio.sleep(0.002)
        return "answered"


def answer(request: InferRequest) -> list[Tensor]:
    return [tensor_from_numpy("y", request.inputs[0].to_numpy() + np.float32(1))]


@asynccontextmanager
async def composed() -> AsyncIterator[Plane]:
    specs = ((TensorSpec("x", Datatype.FP32, (1,)),), (TensorSpec("y", Datatype.FP32, (1,)),))
    engine = FakeEngine([ModelConfig(name, "python", 4, *specs) for name in (OWNED, RELAYED)], answer=answer)
    watch, metrics = Watch(engine, WATCH), Metrics()
    admission = InFlightLimiter(InFlightLimits(max_requests=PLACES))
    pool = BatcherPool(engine, lambda name: OPTIONS if name == OWNED else None)
    batches = BatchFlow(
        batching=pool, relay=engine, watch=watch, max_rows_of=lambda _: OPTIONS.max_batch_size, max_body_bytes=1 << 20
    )
    plane = DataPlane(
        PlaneParts(
            relay=engine,
            watch=watch,
            images=Mock(ImageFlow),
            admission=AdmissionControl(watch=watch, admission=admission, metrics=metrics),
            metrics=metrics,
            slots=EngineSlots(engine, watch),
            batches=batches,
        )
    )
    watching = asyncio.create_task(watch.run())
    async with asyncio.timeout(30):
        await watch.first_ready.wait()
    yield Plane(plane, engine, watch, pool, admission, metrics)
    await pool.aclose()
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


Step = Callable[[Plane], object]
Ask = Callable[[Plane, str, float | None], object]


def ask(way: Ask, model: str, within_ms: float | None, callers: int, plane: Plane) -> None:
    """So many callers at once."""
    deadline = None if within_ms is None else time.monotonic() + within_ms / 1e3
    for _ in range(callers):
        work = way(plane, model, deadline)
        assert asyncio.iscoroutine(work)
        plane.tasks.append(asyncio.create_task(work))


async def leave(number: int, plane: Plane) -> None:
    """One of those who still wait, after they had a while to come to where they wait."""
    await take_turns(6, plane)
    waiting = [task for task in plane.tasks if not task.done()]
    if waiting:
        waiting[number % len(waiting)].cancel()


def behave(mode: FakeMode, plane: Plane) -> None:
    plane.engine.mode = mode
    release(plane)


def release(plane: Plane) -> None:
    """What hung until now is answered; what comes next hangs again."""
    plane.engine.release.set()
    plane.engine.release = asyncio.Event()


def fall_silent(plane: Plane) -> None:
    plane.watch.fall_silent()


async def take_turns(number: int, _: Plane) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def let_time_pass(_: Plane) -> None:
    await asyncio.sleep(0.003)


ASKS: st.SearchStrategy[Step] = st.builds(
    lambda way, model, within_ms, callers: partial(ask, way, model, within_ms, callers),
    st.sampled_from(
        [Plane.over_http, Plane.over_grpc, Plane.as_client_process, Plane.as_client_process, Plane.on_a_stream]
    ),
    st.sampled_from([OWNED, OWNED, OWNED, RELAYED]),
    st.sampled_from([None, None, None, -1.0, 0.5, 2.0, 50.0]),
    st.integers(1, 7),
)
STEPS: st.SearchStrategy[Step] = st.one_of(
    ASKS,
    ASKS.map(lambda step: step),
    ASKS.map(lambda step: step),
    st.builds(lambda number: partial(leave, number), st.integers(0, 40)),
    st.builds(
        lambda mode: partial(behave, mode),
        st.sampled_from([FakeMode.NORMAL, FakeMode.SLOW, FakeMode.SLOW, FakeMode.SLOW, *FakeMode]),
    ),
    st.builds(lambda number: partial(take_turns, number), st.integers(1, 6)),
    st.sampled_from([release, fall_silent, let_time_pass]),
)


async def play(steps: Sequence[Step], is_closed_at_last: bool) -> tuple[Counter[str], Counter[str], int]:
    """What was counted, what the callers saw, and how many there were."""
    async with composed() as plane:
        plane.engine.mode = FakeMode.SLOW
        for step in steps:
            done = step(plane)
            if asyncio.iscoroutine(done):
                await done
        if is_closed_at_last:  # the engine hangs still: the drain is over
            await take_turns(8, plane)
            await plane.pool.aclose()
            fall_silent(plane)
        async with asyncio.timeout(30):
            while plane.is_busy():
                behave(FakeMode.NORMAL, plane)
                await let_time_pass(plane)
        ends = await asyncio.gather(*plane.tasks, return_exceptions=True)
        assert plane.admission.statistics().requests == 0
        return plane.counted(), Counter(map(kind_of, ends)), len(ends)


def kind_of(end: object) -> str:
    if isinstance(end, BaseException):
        assert isinstance(end, InferenceError | asyncio.CancelledError), repr(end)
        return "refused" if isinstance(end, InferenceError) else "left"
    return "answered"


@given(st.lists(STEPS, min_size=5, max_size=60), st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_accepted_inference_has_one_end_and_its_caller_saw_it(steps: list[Step], is_closed_at_last: bool) -> None:
    """accepted = answered + failed + cancelled, each where it was; answered are those that callers had answers to."""
    counted, seen, callers = asyncio.run(play(steps, is_closed_at_last))
    received = f"{counted} {seen}"
    failed = sum(count for name, count in counted.items() if name.startswith("failed/"))
    cancelled = sum(count for name, count in counted.items() if name.startswith("cancelled/"))
    assert counted["accepted"] == counted["answered"] + failed + cancelled, received
    assert counted["answered"] == seen["answered"], received
    assert failed <= seen["refused"] + seen["left"], received
    assert cancelled <= seen["left"], received
    assert callers - counted["accepted"] == seen["refused"] + seen["left"] - failed - cancelled, received
    assert {name.partition("/")[2] for name in counted if name.startswith("cancelled/")} <= set(CancelStage), received
