"""Nothing is lost: what was accepted was answered, failed with a reason, or left by its caller."""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway import admission as admission_control
from penstock.gateway.admission import AdmissionControl
from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.metrics import Metrics
from penstock.protocol.call import InferHead
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, InferenceError, InvalidRequest, Overloaded
from penstock.protocol.identity import ANONYMOUS, Verb
from penstock.protocol.inference import BatchOwner, InferRequest, InferResponse
from penstock.testing import FakeEngine
from tests.batching.echo_engine import POISON, EchoEngine, asking

OWNED = BatchOptions(owner=BatchOwner.GATEWAY, max_batch_size=4, instances=1, max_queue_size=16)
PLACES = 24
WATCH = WatchOptions(probe_interval_s=60, down_interval_s=0.01, canary_interval_s=60)
HEAD = InferHead("m")
LATE = "had passed when the request arrived"  # where the machine stood still before a request with 10 ms began


@dataclass
class Rig:
    """An admission control before a batcher, and the counts."""

    admission_control: AdmissionControl
    engine: EchoEngine
    pool: BatcherPool
    metrics: Metrics

    def ask(self, request: InferRequest) -> "asyncio.Task[InferResponse]":
        async def pass_through() -> InferResponse:
            with self.admission_control.through(Verb.INFER, HEAD, ANONYMOUS, 1, request.deadline):
                return await self.pool.infer(request, client="one")

        return asyncio.create_task(pass_through())

    def counted(self) -> dict[str, float]:
        """The counters of inferences, by name or by name and label."""
        found = {}
        for family in text_string_to_metric_families(self.metrics.text().decode()):
            for sample in family.samples:
                name = re.fullmatch(r"penstock_inferences_(\w+)_total", sample.name)
                if name:
                    found["/".join((name[1], *sample.labels.values()))] = sample.value
        return found

    def ended(self) -> float:
        return sum(value for name, value in self.counted().items() if name != "accepted")


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    backend, metrics = FakeEngine(()), Metrics()
    watch = EngineWatch(backend, WATCH)
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(30):
        await watch.first_ready.wait()
    engine = EchoEngine()
    pool = BatcherPool(engine, lambda _: OWNED)
    admission = InFlightLimiter(InFlightLimits(max_requests=PLACES))
    yield Rig(AdmissionControl(watch=watch, admission=admission, metrics=metrics), engine, pool, metrics)
    assert admission.statistics().requests == 0
    await pool.aclose()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def settled(tasks: Sequence["asyncio.Task[InferResponse]"]) -> list[InferResponse | BaseException]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_answer_failure_and_refusal_are_counted_separately(rig: Rig) -> None:
    """An accepted request that fails has a reason; one that gets no place was never accepted."""
    rig.engine.refusals.append(EngineFailed("broken"))
    await settled([rig.ask(asking(1))])
    await settled([rig.ask(asking(2))])
    with pytest.raises(DeadlineExceeded):
        await rig.ask(asking(3, deadline=time.monotonic() - 1))
    assert rig.counted() == {"accepted": 2, "answered": 1, "failed/engine_failed": 1}


async def test_caller_that_leaves_is_counted_where_its_request_was(rig: Rig) -> None:
    """In the queue, and in a batch that runs: the one was never run, the other's batch-mates go on."""
    rig.engine.gate.clear()
    running = [rig.ask(asking(float(n))) for n in range(8)]
    await rig.engine.called(1)
    queued = rig.ask(asking(9))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    in_batch = next(task for n, task in enumerate(running) if float(n) in rig.engine.calls[0])
    for task in (in_batch, queued):
        task.cancel()
    await settled([in_batch, queued])
    assert {name: count for name, count in rig.counted().items() if count} == {
        "accepted": 9,
        "cancelled/batch": 1,
        "cancelled/queue": 1,
    }
    rig.engine.gate.set()
    await settled(running)
    assert rig.ended() == rig.counted()["accepted"] == 9


async def test_caller_that_leaves_a_call_of_its_own_leaves_the_engine(rig: Rig) -> None:
    """A relayed request was in no queue of ours."""

    async def relayed() -> None:
        with rig.admission_control.through(Verb.INFER, HEAD, ANONYMOUS, 1, None):
            await asyncio.Event().wait()

    task = asyncio.create_task(relayed())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.counted() == {"accepted": 1, "answered": 0, "cancelled/engine": 1}


@pytest.mark.parametrize(("slack_s", "end"), [(60.0, "failed/deadline"), (1.0, "cancelled/batch")])
async def test_caller_that_gives_up_at_its_own_deadline_was_failed_by_us(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, slack_s: float, end: str
) -> None:
    """A gRPC client that leaves just before its deadline counts as a missed deadline; earlier, as cancelled.

    The moment is a minute here, so that a machine that stands still makes no difference.
    """
    monkeypatch.setattr(admission_control, "DEADLINE_SLACK_S", slack_s)
    rig.engine.gate.clear()
    task = rig.ask(asking(1, deadline=time.monotonic() + 30.0))
    await rig.engine.called(1)
    task.cancel()
    await settled([task])
    assert rig.counted() == {"accepted": 1, "answered": 0, end: 1}


async def test_request_on_a_stream_ends_once_too(rig: Rig) -> None:
    """Answered, failed, or left on its stream."""
    with rig.admission_control.stream_slot(HEAD, ANONYMOUS, 1):
        pass
    with suppress(InvalidRequest), rig.admission_control.stream_slot(HEAD, ANONYMOUS, 1):
        raise InvalidRequest("bad")
    with suppress(asyncio.CancelledError), rig.admission_control.stream_slot(HEAD, ANONYMOUS, 1):
        raise asyncio.CancelledError
    assert rig.counted() == {"accepted": 3, "answered": 1, "failed/invalid": 1, "cancelled/stream": 1}


@pytest.mark.parametrize("seed", range(4))
async def test_accepted_is_answered_failed_and_cancelled_together(rig: Rig, seed: int) -> None:
    """Under answers, refusals, bad batches, missing rows, deadlines and callers that leave at any time."""
    chance = random.Random(seed)
    rig.engine.poison_error = InvalidRequest("poison")
    tasks: list[asyncio.Task[InferResponse]] = []
    for _ in range(300):
        deadline = time.monotonic() + chance.uniform(0, 0.01) if chance.random() < 0.2 else None
        tasks.append(rig.ask(asking(POISON if chance.random() < 0.05 else chance.random(), deadline=deadline)))
        if chance.random() < 0.2:
            chance.choice(tasks).cancel()
        if chance.random() < 0.05:
            rig.engine.refusals.append(chance.choice((EngineFailed("broken"), Overloaded("full"))))
        rig.engine.missing_rows = int(chance.random() < 0.05)
        (rig.engine.gate.set if chance.random() < 0.6 else rig.engine.gate.clear)()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    rig.engine.gate.set()
    ends = await settled(tasks)
    counted = rig.counted()
    refused = [end for end in ends if isinstance(end, Overloaded) and "in flight (limit" in end.message]
    unbegun = [task for task in tasks if task.cancelled()]
    assert all(isinstance(end, InferResponse | InferenceError | asyncio.CancelledError) for end in ends)
    assert counted["accepted"] == rig.ended()
    assert counted["answered"] == sum(isinstance(end, InferResponse) for end in ends)
    late = [end for end in ends if isinstance(end, DeadlineExceeded) and LATE in end.message]
    assert len(tasks) - len(refused) - len(late) - len(unbegun) <= counted["accepted"]
    assert counted["accepted"] <= len(tasks) - len(refused) - len(late)
    assert sum(count for name, count in counted.items() if name.startswith("cancelled/")) <= len(unbegun)
