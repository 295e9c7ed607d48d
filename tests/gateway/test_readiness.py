"""The gateway's readiness depends on its engine and on required models."""

import json
from types import SimpleNamespace

import pytest

from penstock.engines.model_health import Cause, KnownModel
from penstock.gateway.readiness import ALL_MODELS, as_served, readiness_of
from penstock.protocol.call import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall
from penstock.protocol.identity import Verb

SERVES, FAILED = KnownModel("a", True), KnownModel("f", False, "no such file")
HANGS, REFUSED = KnownModel("b", False, "it hangs", unavailable=Cause.HANG), KnownModel("b", False, "odd", None, True)


@pytest.mark.parametrize(
    ("models", "required", "reason"),
    [
        ([], None, ""),
        ([SERVES], None, ""),
        ([SERVES, HANGS], None, ""),
        ([SERVES, FAILED], None, ""),
        ([FAILED], None, ""),
        ([REFUSED], None, ""),
        ([HANGS], None, "model 'b' does not serve: it hangs"),
        ([HANGS, FAILED], None, "model 'b' does not serve: it hangs"),
        ([SERVES, HANGS], ("a",), ""),
        ([SERVES, HANGS], ("a", "b"), "model 'b' does not serve: it hangs"),
        ([SERVES, FAILED], ("f",), "model 'f' does not serve: no such file"),
        ([SERVES], ("c", "a"), "model 'c' does not serve: there is no such model"),
        ([], (), ""),
        ([SERVES], ALL_MODELS, ""),
        ([], ALL_MODELS, ""),
        ([SERVES, FAILED], ALL_MODELS, ""),
        ([SERVES, HANGS], ALL_MODELS, "model 'b' does not serve: it hangs"),
    ],
)
def test_gateway_is_ready_while_its_required_models_serve(
    models: list[KnownModel], required: tuple[str, ...] | None, reason: str
) -> None:
    """Required are the named models, or with `*` all loaded ones; without the setting, any model that serves."""
    engine = SimpleNamespace(is_up=True, reason="", models={known.name: known for known in models}, left_out={})
    readiness = readiness_of(engine, required)  # type: ignore[arg-type]  # what it looks at
    assert (readiness.is_ready, readiness.reason) == (not reason, reason)


def test_gateway_whose_engine_is_down_is_not_ready_whatever_is_required() -> None:
    """The reason is the engine's."""
    engine = SimpleNamespace(is_up=False, reason="the engine is starting", models={"a": SERVES})
    for required in (None, (), ("a",)):
        readiness = readiness_of(engine, required)  # type: ignore[arg-type]
        assert (readiness.is_ready, readiness.reason) == (False, "the engine is starting")


TRACED = (
    "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: TritonModelException: model 'm': no file"
    "\n\nAt:\n  /run/penstock/backends/onnxruntime/model.py(71): initialize\n;\nversion 2 is UNAVAILABLE: late;\n"
)
CLEAN = TRACED.replace("\n\nAt:\n  /run/penstock/backends/onnxruntime/model.py(71): initialize\n", "")


def test_failed_load_shows_clients_no_path_of_the_engine() -> None:
    """Triton appends the traceback of a Python backend to its reason; all else is relayed as it is."""

    def http(body: bytes, verb: Verb = Verb.LOAD) -> bytes:
        call = HttpCall("POST", b"/v2/repository/models/m/load", (), b"")
        return as_served(verb, "m", call, HttpAnswer(400, (), body), {}, "").body

    traced = json.dumps({"error": TRACED}).encode()
    assert json.loads(http(traced)) == {"error": CLEAN}
    assert "/run" not in CLEAN
    for other in (b'{"error": "no such model"}', b"not JSON", b"\xff"):
        assert http(other) == other
    assert http(traced, Verb.INFER) == traced
    call, answer = GrpcCall("/inference.GRPCInferenceService/RepositoryModelLoad", b""), GrpcAnswer(13, b"", TRACED)
    assert as_served(Verb.LOAD, "m", call, answer, {}, "").details == CLEAN
