"""How the data plane refuses an unavailable model, and which answers are evidence about a model."""

import pytest

from server.backends.model_health import Cause
from server.core.errors import ModelUnavailable
from server.core.relay import GrpcAnswer, GrpcCall, HttpAnswer, InferHead
from server.dataplane import Verb
from tests.gateway.rig import CALL, Rig, picture


async def test_unavailable_model_is_refused_with_the_reason_and_others_are_served(rig: Rig) -> None:
    """It is refused before the engine, over every transport, with Retry-After."""
    rig.watch.mark_unavailable("plain", Cause.HANG, "it answered nothing for 30 s")
    before = len(rig.backend.calls)
    calls = (
        rig.plane.relay_http(Verb.INFER, InferHead("plain"), CALL),
        rig.plane.relay_grpc(Verb.INFER, InferHead("plain"), GrpcCall("ModelInfer", b"")),
    )
    for call in calls:
        with pytest.raises(ModelUnavailable, match="model 'plain' is unavailable: it answered nothing for 30 s"):
            await call
    assert len(rig.backend.calls) == before
    assert rig.plane.refusals()["plain"] == "it answered nothing for 30 s"
    assert isinstance(rig.plane.why_withheld("plain"), ModelUnavailable)
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
    await rig.plane.relay_http(Verb.INFER, InferHead("plain"), CALL)

    async def answered(call: GrpcCall, *, deadline: float | None) -> GrpcAnswer:
        return GrpcAnswer(code)

    monkeypatch.setattr(rig.backend, "grpc", answered)
    await rig.plane.relay_grpc(Verb.INFER, InferHead("plain"), GrpcCall("ModelInfer", b""))
    assert noted == [f"plain {evidence}"] * 2 * bool(evidence)
