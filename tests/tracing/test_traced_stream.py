"""The traced relay over an answer in pieces: it ends what it began, whether or not anybody read it."""

import pytest

from penstock.gateway.tracing import TracedRelay, TraceHeaders, current_trace
from penstock.protocol.call import HttpCall
from penstock.testing import FakeEngine

CALL = HttpCall("POST", b"/v2/models/m/generate_stream", (), b"{}")


class Span:
    """An engine's span. ended: how, once."""

    def __init__(self) -> None:
        self.headers: TraceHeaders = (("traceparent", "00-ab"),)
        self.ended: list[tuple[int | None, bool]] = []

    def end(self, *, code: int | None = None, is_error: bool = False) -> None:
        self.ended.append((code, is_error))


class OneSpan:
    """A trace of one call to the engine."""

    def __init__(self) -> None:
        self.span = Span()

    def engine(self, name: str) -> Span:
        assert name == "engine"
        return self.span


@pytest.mark.parametrize(("is_read", "is_error"), [(True, False), (False, True)])
async def test_traced_stream_ends_with_its_span(is_read: bool, is_error: bool) -> None:
    """The last piece ends the span; so does closing a stream that was not read, and the engine's with it."""
    engine, trace = FakeEngine(), OneSpan()
    token = current_trace.set(trace)  # type: ignore[arg-type]
    try:
        stream = await TracedRelay(engine).stream(CALL, deadline=None)
    finally:
        current_trace.reset(token)
    if is_read:
        assert [piece async for piece in stream.chunks] == [b"{}"]
    await stream.chunks.aclose()
    assert trace.span.ended == [(200, is_error)]
    assert engine.http_calls[0].headers == ((b"traceparent", b"00-ab"),)
    assert engine.open_streams == 0
