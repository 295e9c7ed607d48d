"""Client processes' inferences through the data plane: admitted, counted and refused as a gRPC client's are."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.grpc.status_codes import status_of
from penstock.gateway.workers import inference_calls
from penstock.gateway.workers.connection import Infer
from penstock.gateway.workers.inference_calls import PROTOCOL_LABEL, ClientProcessCalls
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from penstock.protocol.inference import Datatype, InferRequest, InferResponse, SlabAddress, tensor_from_numpy
from penstock.testing import FakeMode
from tests.gateway.test_nothing_lost import OWNED, PLACES, RELAYED, Plane, composed, fall_silent, release, take_turns

ROW = tensor_from_numpy("x", np.full((1, 1), 7, np.float32))
MODELS = pytest.mark.parametrize("model", [OWNED, RELAYED])


@dataclass
class CallingProcess:
    """A client process at a plane over a fake engine."""

    plane: Plane

    def __post_init__(self) -> None:
        core = self.plane
        self.calls = ClientProcessCalls(core.plane, core.engine, core.metrics, lambda error: status_of(error).code.name)

    def ask(self, model: str, within_s: float | None = 20.0, **changes: object) -> "asyncio.Task[InferResponse]":
        deadline = None if within_s is None else time.monotonic() + within_s
        request = replace(InferRequest(model, (ROW,), deadline=deadline), **changes)  # type: ignore[arg-type]
        work = self.calls.infer(Infer(1, request, "any", 0), peer=self, client="client-1")
        return asyncio.create_task(work)

    def done(self) -> dict[tuple[str, str], float]:
        """Requests of client processes, by model and code."""
        return self._counted("penstock_requests_total", ("model", "code"), protocol=PROTOCOL_LABEL)

    def rejected(self) -> dict[tuple[str, ...], float]:
        return self._counted("penstock_rejected_total", ("reason",))

    def _counted(self, name: str, labels: tuple[str, ...], **asked: str) -> dict[tuple[str, ...], float]:  # type: ignore[type-arg]
        families = text_string_to_metric_families(self.plane.metrics.text().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {
            tuple(sample.labels[label] for label in labels): sample.value
            for sample in samples
            if asked.items() <= sample.labels.items()
        }


@MODELS
async def test_answer_is_counted_as_a_grpc_clients(model: str) -> None:
    """Requests, their seconds, the engine's seconds and the slot in flight: every series counts the process's."""
    async with composed() as plane:
        process = CallingProcess(plane)
        plane.engine.mode = FakeMode.SLOW
        asked = process.ask(model)
        await take_turns(10, plane)
        assert (plane.admission.statistics().requests, plane.admission.statistics().size_bytes) == (1, 4)
        release(plane)
        assert (await asked).outputs[0].to_numpy().tolist() == [[8]]
        assert process.done() == {(model, "OK"): 1}
        text = plane.metrics.text().decode()
        assert f'penstock_request_seconds_count{{model="{model}",protocol="{PROTOCOL_LABEL}"}} 1.0' in text
        assert f'penstock_infer_seconds_count{{model="{model}"}} 1.0' in text
        assert plane.counted() == {"accepted": 1, "answered": 1}
        assert plane.admission.statistics().requests == 0


@MODELS
@pytest.mark.parametrize(
    ("mode", "kind", "code", "end"),
    [
        (FakeMode.ERROR, EngineFailed, "INTERNAL", "answered"),
        (FakeMode.UNAVAILABLE, EngineUnavailable, "UNAVAILABLE", "failed/engine_down"),
    ],
)
async def test_engines_own_refusal_is_an_answer_and_its_absence_is_not(
    model: str, mode: FakeMode, kind: type[InferenceError], code: str, end: str
) -> None:
    """As over gRPC: what the gateway fails itself is rejected by its reason, what the engine says is handed on."""
    async with composed() as plane:
        process = CallingProcess(plane)
        plane.engine.mode = mode
        with pytest.raises(kind):
            await process.ask(model)
        assert process.done() == {(model, code): 1}
        assert plane.counted() == {"accepted": 1, end: 1}
        assert process.rejected() == ({} if end == "answered" else {("engine_down",): 1})


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": (replace(ROW, shape=(2, 1)),)},
        {"inputs": (replace(ROW, name="z"),)},
        {"inputs": (tensor_from_numpy("x", np.zeros((1, 1), np.int32)),)},
        {"inputs": (replace(ROW, datatype=Datatype.BYTES, place=SlabAddress("slab", 1, 0)),)},
        {"outputs": ("nothing",)},
    ],
    ids=["too few", "another name", "another datatype", "words by place", "unknown output"],
)
async def test_request_that_the_model_does_not_take_spoils_nobodys_batch(changes: dict[str, object]) -> None:
    """It comes into none: its mates' rows would be taken for its own."""
    async with composed() as plane:
        process = CallingProcess(plane)
        mates = [process.ask(OWNED) for _ in range(2)]
        wrong = process.ask(OWNED, **changes)
        with pytest.raises(InvalidRequest):
            await wrong
        assert [(await mate).outputs[0].to_numpy().tolist() for mate in mates] == [[[8]], [[8]]]
        assert process.done() == {(OWNED, "OK"): 2, (OWNED, "INVALID_ARGUMENT"): 1}


@pytest.mark.parametrize("changes", [{"parameters": {"sequence_id": 3}}, {"model_version": "01"}], ids=str)
async def test_request_that_is_in_no_batch_is_asked_alone(changes: dict[str, object]) -> None:
    """As a gRPC client's."""
    async with composed() as plane:
        assert (await CallingProcess(plane).ask(OWNED, **changes)).explanation is None
        assert (await CallingProcess(plane).ask(OWNED, parameters={"timeout": 5})).explanation is not None


@MODELS
@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": (replace(ROW, shape=(1 << 62,) * 50_000),)},
        {"inputs": (replace(ROW, shape=(1, 1 << 62), data=memoryview(b"")),)},
        {"inputs": (ROW,) * 20_000},
        {"outputs": ("y", "y")},
        {"model_name": "line\nbreak"},
    ],
    ids=["axes", "huge", "inputs", "output twice", "name of two lines"],
)
async def test_request_that_would_end_an_engine_or_hold_up_the_gateway_goes_no_further(
    model: str, changes: dict[str, object]
) -> None:
    """The bounds of the other transports; refused in a moment, however large it is."""
    async with composed() as plane:
        started = time.monotonic()
        with pytest.raises(InvalidRequest):
            await CallingProcess(plane).ask(model, **changes)
        assert time.monotonic() - started < 2
        assert plane.counted() == {}


async def test_refusals_are_counted_by_reason() -> None:
    """No place, no time, no such model, no number: each once, none of them accepted but the last model's."""
    async with composed() as plane:
        process = CallingProcess(plane)
        plane.engine.mode = FakeMode.SLOW
        running = [process.ask(RELAYED) for _ in range(PLACES)]
        await take_turns(10, plane)
        with pytest.raises(Overloaded):
            await process.ask(RELAYED)
        plane.engine.mode = FakeMode.NORMAL
        release(plane)
        await asyncio.gather(*running)
        for within_s, kind in [
            (-1.0, DeadlineExceeded),
            (float("-inf"), DeadlineExceeded),
            (float("nan"), InvalidRequest),
        ]:
            with pytest.raises(kind):
                await process.ask(RELAYED, within_s)
        assert (await process.ask(RELAYED, float("inf"))).model_name == RELAYED
        assert process.rejected() == {("full",): 1, ("deadline",): 2, ("invalid",): 1}
        assert process.done() == {
            (RELAYED, "OK"): PLACES + 1,
            (RELAYED, "UNAVAILABLE"): 1,
            (RELAYED, "DEADLINE_EXCEEDED"): 2,
            (RELAYED, "INVALID_ARGUMENT"): 1,
        }
        with pytest.raises(ModelNotFound):
            await process.ask("stranger " * 100)
        assert ("unknown", "NOT_FOUND") in process.done()


@MODELS
async def test_client_process_that_gives_up_is_counted_so(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its own deadline it is late; before that it left."""
    async with composed() as plane:
        process = CallingProcess(plane)
        plane.engine.mode = FakeMode.SLOW
        for within_s, slack_s in ((None, 0.0), (20.0, 0.0), (20.0, 30.0)):
            monkeypatch.setattr(inference_calls, "DEADLINE_SLACK_S", slack_s)
            asked = process.ask(model, within_s)
            await take_turns(10, plane)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        assert process.done() == {(model, "DEADLINE_EXCEEDED"): 1}
        assert f'penstock_cancelled_total{{protocol="{PROTOCOL_LABEL}"}} 2.0' in plane.metrics.text().decode()
        assert plane.admission.statistics().requests == 0


async def test_engine_that_falls_silent_ends_what_a_client_process_has_there() -> None:
    """At once, as everybody else's."""
    async with composed() as plane:
        process = CallingProcess(plane)
        plane.engine.mode = FakeMode.SLOW
        asked = [process.ask(model) for model in (OWNED, RELAYED)]
        await take_turns(10, plane)
        fall_silent(plane)
        for one in asked:
            with pytest.raises(EngineUnavailable, match="fell silent"):
                await one
        assert plane.counted() == {"accepted": 2, "failed/engine_down": 2}


async def test_client_process_is_one_client_to_the_queue_and_sends_no_metadata_to_the_engine() -> None:
    """Whatever it calls its callers, and whatever headers it would like to send with other people's rows."""
    async with composed() as plane:
        process, seen = CallingProcess(plane), []
        push: Callable[..., object] = plane.pool.infer

        async def infer(request: InferRequest, *, client: str, priority: int = 0) -> object:
            seen.append((client, request.metadata))
            return await push(request, client=client, priority=priority)  # type: ignore[misc]

        plane.plane._batches.batching.infer = infer  # type: ignore[method-assign,union-attr,assignment]
        await process.ask(OWNED, metadata=(("authorization", "x"),))
        assert seen == [("client-1", ())]
