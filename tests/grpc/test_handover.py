"""Clients that ask for large answers and do not take them."""

import asyncio
import time

import h2.events
import h2.settings
import pytest

from penstock.gateway.grpc.server import GrpcLimits
from penstock.gateway.grpc.stream import StreamLimits
from tests.grpc.harness import SERVICE, infer_message, serving
from tests.integration.raw_http2 import HEADERS, RawHttp2

SIZE = 12_000  # floats


def ask_and_take_nothing(address: str, calls: int, seconds: float) -> set[int]:
    """The calls that the server ended."""
    message = infer_message("double", SIZE)
    headers = [(name, f"{SERVICE}ModelInfer" if name == ":path" else value) for name, value in HEADERS]
    with RawHttp2(address) as client:
        client.frames.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        client.flush()
        client.receive(0.2)
        for _ in range(calls):
            number = client.frames.get_next_available_stream_id()
            client.frames.send_headers(number, headers)
            body = b"\0" + len(message).to_bytes(4, "big") + message
            for start in range(0, len(body), 16_384):
                client.frames.send_data(number, body[start : start + 16_384], start + 16_384 >= len(body))
                client.flush()
                client.receive(0.02)
        ended = set[int]()
        until = time.monotonic() + seconds
        while len(ended) < calls and time.monotonic() < until:
            ended |= {event.stream_id for event in client.receive(0.2) if isinstance(event, h2.events.StreamEnded)}
        return ended


async def test_unread_responses_are_counted_and_cancelled(capfd: pytest.CaptureFixture[str]) -> None:
    """Unread responses stay in flight until their calls are cancelled; other clients are served."""
    limits = GrpcLimits(streams=StreamLimits(reader_timeout_s=2.0))
    async with serving(limits) as front, asyncio.timeout(60):
        client = asyncio.create_task(asyncio.to_thread(ask_and_take_nothing, front.address, 3, 20.0))
        while front.plane.admission.statistics().size_bytes < 3 * 2 * 4 * SIZE:
            await asyncio.sleep(0.02)
        await front.call("ModelInfer", infer_message("double", SIZE))
        assert len(await client) == 3
        while front.plane.admission.statistics().size_bytes:
            await asyncio.sleep(0.02)
        assert front.recorder.reasons == ["slow_reader"] * 3
    assert "Traceback" not in capfd.readouterr().err
