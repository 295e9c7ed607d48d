"""Trace and log settings of the embedded engine: it has none, and says so over both protocols."""

from pathlib import Path

import pytest

from server.backends.embedded.engine import EmbeddedEngine
from server.backends.embedded.wire.relay import EmbeddedRelay
from server.core.relay import GrpcCall, HttpCall

SERVICE = "/inference.GRPCInferenceService/"
UNIMPLEMENTED = 12


@pytest.mark.parametrize(
    ("target", "method", "word"),
    [
        (b"/v2/trace/setting", "TraceSetting", "traces"),
        (b"/v2/models/m/trace/setting", "TraceSetting", "traces"),
        (b"/v2/logging", "LogSettings", "logs"),
    ],
)
async def test_embedded_engine_has_no_settings_and_says_what_to_do(
    tmp_path: Path, target: bytes, method: str, word: str
) -> None:
    """501 and UNIMPLEMENTED in the same sentence, to a read and to a change; neither is among its extensions."""
    relay = EmbeddedRelay(EmbeddedEngine((tmp_path,)))
    told = await relay.grpc(GrpcCall(SERVICE + method, b""), deadline=None)
    assert told.code == UNIMPLEMENTED
    assert word in told.details
    assert told.details.endswith("; start with --engine triton")
    for verb, body in (("GET", b""), ("POST", b"{}")):
        answer = await relay.http(HttpCall(verb, target, (), body), deadline=None)
        assert answer.status == 501
        assert told.details.encode() in answer.body
    extensions = (await relay.http(HttpCall("GET", b"/v2", (), b""), deadline=None)).body
    assert b'"trace"' not in extensions
    assert b'"logging"' not in extensions
