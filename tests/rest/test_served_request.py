"""How an answer is written: whole in one write, or in pieces as they come."""

import asyncio
import logging
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.gateway.rest.served_request import ServedRequest

OK_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: 5\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written, a call each."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.writes.append(b"".join(list_of_data))

    def close(self) -> None:
        self.is_closed = True


def served(*, method: str = "POST", keep_alive: bool = True) -> tuple[ServedRequest, Transport, RequestResponseCycle]:
    """A request whose answer goes to the transport."""
    transport = Transport()
    logger = logging.getLogger(__name__)
    cycle = RequestResponseCycle(
        scope=cast(Any, {"type": "http", "method": method}),
        transport=transport,
        flow=FlowControl(transport),
        logger=logger,
        access_logger=logger,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )
    return ServedRequest(cycle), transport, cycle


def start(*headers: tuple[bytes, bytes], length: int | None = 5, status: int = 200) -> dict[str, Any]:
    declared = [] if length is None else [(b"content-length", b"%d" % length)]
    every = [(b"content-type", b"a/b"), *declared, *headers]
    return {"type": "http.response.start", "status": status, "headers": every}


def body(content: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def sent(request: ServedRequest, *messages: dict[str, Any]) -> None:
    for message in messages:
        await request.send(message)


async def test_whole_answer_is_one_write() -> None:
    """An answer of a known length costs one system call, and ends the request."""
    request, transport, cycle = served()
    await sent(request, start())
    assert (transport.writes, request.has_begun) == ([], False)
    await sent(request, body(b"12345"))
    assert transport.writes == [OK_HEAD + b"\r\n12345"]
    assert (cycle.response_complete, transport.is_closed) == (True, False)


@pytest.mark.parametrize("length", [None, 10], ids=["no length", "more to come"])
async def test_answer_in_pieces_is_written_as_it_comes(length: int | None) -> None:
    """A stream's head and pieces are not withheld."""
    request, transport, cycle = served()
    await sent(request, start(length=length), body(b"12345", more=True))
    assert b"".join(transport.writes).count(b"12345") == 1
    await sent(request, body(b"67890"))
    assert b"67890" in transport.writes[-1]
    assert cycle.response_complete


async def test_head_without_a_length_is_sent_at_once() -> None:
    """The client of a stream sees the status before the first event."""
    request, transport, _ = served()
    await sent(request, start(length=None))
    assert transport.writes[0].startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("POST", 204)])
async def test_answer_without_a_body_has_none(method: str, status: int) -> None:
    """An answer to HEAD and a 204 end with their head."""
    request, transport, cycle = served(method=method)
    await sent(request, start(length=0 if status == 204 else 5, status=status), body(b""))
    assert b"".join(transport.writes).endswith(b"\r\n\r\n")
    assert cycle.response_complete


@pytest.mark.parametrize("by_app", [True, False], ids=["by the app", "by the client"])
async def test_last_answer_closes_its_connection(by_app: bool) -> None:
    """`connection: close` is said once, and done."""
    request, transport, _ = served(keep_alive=by_app)
    await sent(request, start(*([(b"connection", b"close")] if by_app else [])), body(b"12345"))
    assert transport.writes == [OK_HEAD + b"connection: close\r\n\r\n12345"]
    assert transport.is_closed


async def test_second_head_replaces_one_that_was_not_sent() -> None:
    """An error after the head is still answered with its own status."""
    request, transport, _ = served()
    await sent(request, start(), start(status=503), body(b"12345"))
    assert [one[:12] for one in transport.writes] == [b"HTTP/1.1 503"]


async def test_header_with_a_line_break_is_an_error() -> None:
    """No header can end the head."""
    request, transport, _ = served()
    with pytest.raises(RuntimeError, match="line break"):
        await sent(request, start((b"x", b"1\r\ny: 2")), body(b"12345"))
    assert transport.writes == []


async def test_client_that_left_is_sent_nothing() -> None:
    """Its connection is closed already."""
    request, transport, cycle = served()
    cycle.disconnected = True
    await sent(request, start(), body(b"12345"))
    assert transport.writes == []
