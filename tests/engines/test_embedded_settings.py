"""Trace and log settings of the embedded engine: it has none, and says so over both protocols."""

from pathlib import Path

import pytest

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.protocol.call import GrpcCall, HttpCall

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
    relay = EmbeddedEngine((tmp_path,))
    refused = await relay.send(GrpcCall(SERVICE + method, b""), deadline=None)
    assert refused.code == UNIMPLEMENTED
    assert word in refused.details
    assert refused.details.endswith("; start with --engine triton")
    for verb, body in (("GET", b""), ("POST", b"{}")):
        answer = await relay.send(HttpCall(verb, target, (), body), deadline=None)
        assert answer.status == 501
        assert refused.details.encode() in answer.body
    extensions = (await relay.send(HttpCall("GET", b"/v2", (), b""), deadline=None)).body
    assert b'"name":"penstock-embedded"' in extensions
    assert b'"trace"' not in extensions
    assert b'"logging"' not in extensions
