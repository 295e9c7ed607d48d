"""How the data plane refuses an unavailable model, and which answers are evidence about a model."""

import asyncio

import pytest

from penstock.engines.model_health import Cause
from penstock.gateway import admission as admission_control
from penstock.protocol.call import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall, InferHead
from penstock.protocol.errors import ModelUnavailable
from penstock.protocol.identity import Verb
from tests.gateway.rig import CALL, Rig, picture


async def test_unavailable_model_is_refused_with_the_reason_and_others_are_served(rig: Rig) -> None:
    """It is refused before the engine, over every transport, with Retry-After."""
    rig.watch.mark_unavailable("plain", Cause.HANG, "it answered nothing for 30 s")
    before = len(rig.backend.calls)
    calls = (
        rig.plane.relay(Verb.INFER, InferHead("plain"), CALL),
        rig.plane.relay(Verb.INFER, InferHead("plain"), GrpcCall("ModelInfer", b"")),
    )
    for call in calls:
        with pytest.raises(ModelUnavailable, match="model 'plain' is unavailable: it answered nothing for 30 s"):
            await call
    assert len(rig.backend.calls) == before
    assert rig.watch.models["plain"].reason == "it answered nothing for 30 s"
    assert isinstance(rig.watch.models["plain"].error, ModelUnavailable)
    assert rig.plane.readiness().is_ready
    await rig.ask("boxes", picture(9))


@pytest.mark.parametrize(
    ("status", "code", "evidence"),
    [(200, 0, "served"), (500, 13, "failed"), (500, 2, "failed"), (400, 3, ""), (404, 5, ""), (503, 14, "")],
)
async def test_answer_of_the_engine_is_evidence_of_its_model(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, status: int, code: int, evidence: str
) -> None:
    """Client errors and lack of memory are no evidence about the model, over HTTP and gRPC."""
    noted: list[str] = []
    monkeypatch.setattr(rig.watch, "note_served", lambda name: noted.append(f"{name} served"))
    monkeypatch.setattr(rig.watch, "note_failed", lambda name: noted.append(f"{name} failed"))
    rig.backend.http_answer = HttpAnswer(status, (), b"{}")
    await rig.plane.relay(Verb.INFER, InferHead("plain"), CALL)

    async def answered(call: GrpcCall, *, deadline: float | None) -> GrpcAnswer:
        return GrpcAnswer(code)

    monkeypatch.setattr(rig.backend, "send", answered)
    await rig.plane.relay(Verb.INFER, InferHead("plain"), GrpcCall("ModelInfer", b""))
    assert noted == [f"plain {evidence}"] * 2 * bool(evidence)


@pytest.mark.parametrize("cause", [Cause.HANG, Cause.CANARY])
async def test_call_that_fails_because_the_models_process_is_replaced_is_503(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, cause: Cause
) -> None:
    """The engine answers 500 to the calls of a process that is killed, over HTTP and gRPC."""

    def fail() -> None:
        rig.watch.mark_unavailable("plain", cause, "it answered nothing for 30 s")

    async def send(call: HttpCall | GrpcCall, *, deadline: float | None) -> HttpAnswer | GrpcAnswer:
        fail()
        if isinstance(call, GrpcCall):
            return GrpcAnswer(13)
        return HttpAnswer(500, (), b'{"error":"Stub process is not healthy."}')

    monkeypatch.setattr(rig.backend, "send", send)
    with pytest.raises(ModelUnavailable, match="it answered nothing for 30 s"):
        await rig.plane.relay(Verb.INFER, InferHead("plain"), CALL)
    rig.watch.note_served("plain")
    with pytest.raises(ModelUnavailable, match="it answered nothing for 30 s"):
        await rig.plane.relay(Verb.INFER, InferHead("plain"), GrpcCall("ModelInfer", b""))


async def test_call_of_a_process_that_was_replaced_meanwhile_is_503(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new process can serve before the engine answers the old one's calls; a later call's error is its own."""
    monkeypatch.setattr(admission_control, "CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(admission_control, "LONG_WAIT_S", 0.0)
    looked = asyncio.Event()
    is_replaced = False

    async def send(call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        nonlocal is_replaced
        if not is_replaced:
            is_replaced = True
            rig.watch.mark_unavailable("plain", Cause.HANG, "it answered nothing for 30 s")
            monkeypatch.setattr(rig.watch, "note_late", lambda *_, **__: looked.set())
            await looked.wait()
            rig.watch.note_served("plain")
            assert rig.watch.models["plain"].unavailable is None
        return HttpAnswer(500, (), b'{"error":"Stub process is not healthy."}')

    monkeypatch.setattr(rig.backend, "send", send)
    with pytest.raises(ModelUnavailable, match="it answered nothing for 30 s"):
        await rig.plane.relay(Verb.INFER, InferHead("plain"), CALL)
    assert (await rig.plane.relay(Verb.INFER, InferHead("plain"), CALL)).status == 500


async def test_call_that_waits_long_is_reported_until_it_is_answered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of each model; a call without a deadline would otherwise never be noticed."""
    monkeypatch.setattr(admission_control, "CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(admission_control, "LONG_WAIT_S", 0.0)
    reported: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
    monkeypatch.setattr(
        rig.watch, "note_late", lambda name, waited_s, *, is_waiting=False: reported.put_nowait((name, is_waiting))
    )
    is_let_go = asyncio.Event()

    async def send(call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        await is_let_go.wait()
        return HttpAnswer(200, (), b"{}")

    monkeypatch.setattr(rig.backend, "send", send)
    calls = [asyncio.create_task(rig.plane.relay(Verb.INFER, InferHead("plain"), CALL)) for _ in range(2)]
    assert [await reported.get() for _ in range(3)] == [("plain", True)] * 3
    is_let_go.set()
    await asyncio.gather(*calls)
    while not reported.empty():
        reported.get_nowait()
    for _ in range(3):
        await asyncio.sleep(0.002)
    assert reported.empty()
