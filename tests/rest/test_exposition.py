"""The metrics port's pages: the gateway's own are there whatever the engine does."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message

from penstock.gateway.rest.metrics_app import create_metrics_app
from penstock.gateway.rest.routes import RequestAuthentication
from penstock.protocol.identity import Role
from tests.auth.listeners import KEYS, STRANGER, door
from tests.rest.harness import Headers


async def page_of(app: Starlette, path: str) -> str:
    """The text of a GET."""
    return b"".join(message.get("body", b"") for message in await asked(app, path)).decode()


async def asked(app: ASGIApp, path: str, headers: Headers = ()) -> list[Message]:
    """The response to a GET."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers), "query_string": b""}
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize(("is_up", "expected"), [(True, "ours\nengine\n"), (False, "ours\n")])
async def test_metrics_of_an_engine_that_is_down_are_not_waited_for(is_up: bool, expected: str) -> None:
    """The page of both then has ours alone, at once; the engine's own page still asks it."""
    is_hanging = asyncio.Event()

    async def engine() -> bytes:
        if not is_up:
            is_hanging.set()
            await asyncio.Event().wait()
        return b"engine\n"

    app = create_metrics_app(lambda: b"ours\n", engine, lambda: is_up)
    assert await asyncio.wait_for(page_of(app, "/metrics"), 5) == expected
    assert not is_hanging.is_set()
    asking = asyncio.create_task(page_of(app, "/metrics/engine"))
    if is_up:
        assert await asking == "engine\n"
    else:
        await asyncio.wait_for(is_hanging.wait(), 5)
        asking.cancel()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 401),
        (((b"x-api-key", STRANGER.encode()),), 401),
        (((b"x-api-key", KEYS[Role.INFER].encode()),), 403),
        (((b"authorization", f"Bearer {KEYS[Role.READ]}".encode()),), 200),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/metrics/penstock", "/metrics/engine"])
async def test_metrics_that_require_a_key_are_shown_to_the_role_read_alone(
    path: str, headers: Headers, status: int
) -> None:
    """The role read of anonymous clients does not include metrics."""

    async def engine() -> bytes:
        return b"engine\n"

    gate = RequestAuthentication(door(Role.READ), needs_key=True)
    app = create_metrics_app(lambda: b"ours\n", engine, lambda: True, gate=gate)
    sent = await asked(app, path, headers)
    assert sent[0]["status"] == status
    assert (b"ours" in sent[1]["body"] or b"engine" in sent[1]["body"]) == (status == 200)
