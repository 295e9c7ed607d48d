"""Which requests are retried, after what delay, and within which deadline."""

import asyncio
import math
import time
from typing import Any

import pytest

from penstock import AsyncClient, Client
from penstock.client import deadlines, operations
from penstock.client.exchange import Exchange
from penstock.client.operations import TIMEOUT_HEADER, Operation
from penstock.client.options import read_options
from penstock.protocol.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    EngineUnavailable,
    GatewayUnreachable,
    InferenceError,
    InvalidRequest,
    ModelUnavailable,
    Overloaded,
    QuotaExceeded,
)
from tests.client.conftest import PICTURE, Make, answer_with, http_answer, raw_server

INFER = operations.post_picture("m", PICTURE)
LOAD = operations.load_model("m")
BROKEN = ConnectionFailed("broke", is_transient=True)
FULL = http_answer(503, b'{"error": "full"}', "Retry-After: 1")
DONE = http_answer(200, b'[{"name": "ppe"}]')


def exchange_of(operation: Operation[Any], *, deadline: float = math.inf, retries: int = 2) -> Exchange[Any]:
    """An exchange that starts at 100 s of a fake clock."""
    return Exchange(operation, read_options("http://a", "key", retries=retries), now=100.0, deadline=deadline)


@pytest.mark.parametrize(
    ("operation", "error", "is_retried"),
    [
        (INFER, BROKEN, True),
        (INFER, GatewayUnreachable("nothing answers"), True),
        (INFER, Overloaded("full", retry_after_s=1.0), True),
        (INFER, EngineUnavailable("down", retry_after_s=1.0), True),
        (INFER, ModelUnavailable("its trial failed", retry_after_s=None), False),  # waiting does not help
        (INFER, QuotaExceeded("too many", retry_after_s=1.0), False),
        (INFER, InvalidRequest("no"), False),
        (INFER, DeadlineExceeded("late"), False),
        (INFER, ConnectionFailed("the certificate is not trusted"), False),
        (LOAD, BROKEN, False),  # it may have been loaded
        (LOAD, Overloaded("full", retry_after_s=1.0), False),
        (LOAD, GatewayUnreachable("nothing answers"), True),  # it was not sent
    ],
)
def test_only_idempotent_requests_and_transient_errors_are_retried(
    operation: Operation[Any], error: InferenceError, is_retried: bool
) -> None:
    """All other errors are raised immediately."""
    exchange = exchange_of(operation)
    if is_retried:
        assert exchange.delay_s(error, 100.0) > 0
        return
    with pytest.raises(type(error)) as caught:
        exchange.delay_s(error, 100.0)
    assert caught.value is error


def test_backoff_grows_and_honours_retry_after() -> None:
    """Backoff is exponential with jitter and at least Retry-After; attempts are limited."""
    delays = [exchange_of(INFER).delay_s(BROKEN, 100.0) for _ in range(50)]
    assert 0.05 <= min(delays) < max(delays) <= 0.1
    assert exchange_of(INFER).delay_s(Overloaded("full", retry_after_s=3.0), 100.0) == 3.0
    exchange = exchange_of(INFER)
    exchange.delay_s(BROKEN, 100.0)
    assert 0.1 <= exchange.delay_s(BROKEN, 100.0) <= 0.2
    with pytest.raises(ConnectionFailed):
        exchange.delay_s(BROKEN, 100.0)


def test_retry_that_would_miss_the_deadline_raises_immediately() -> None:
    """The error is raised immediately, not at the deadline."""
    with pytest.raises(Overloaded):
        exchange_of(INFER, deadline=102.0).delay_s(Overloaded("full", retry_after_s=3.0), 100.0)
    with pytest.raises(DeadlineExceeded, match="the deadline expired"):
        exchange_of(INFER, deadline=102.0).attempt(102.5)


def test_remaining_time_is_sent_to_the_gateway() -> None:
    """The header has the remaining milliseconds of each attempt; without a deadline it is absent."""
    exchange = exchange_of(INFER, deadline=102.0)
    assert exchange.attempt(100.5).headers[TIMEOUT_HEADER] == "1500.000"
    assert exchange.attempt(101.0).headers[TIMEOUT_HEADER] == "1000.000"
    attempt = exchange_of(INFER).attempt(100.0)
    assert (TIMEOUT_HEADER in attempt.headers, attempt.timeout_s) == (False, 60.0)
    assert "key" not in repr(attempt)


def test_nested_deadlines_only_shrink() -> None:
    """An inner block cannot extend the deadline, and the outer deadline applies again after it."""
    with Client("http://127.0.0.1:9").deadline(10.0):
        outer = deadlines.current_deadline()
        with deadlines.deadline(1.0):
            assert deadlines.current_deadline() < outer - 8
        with deadlines.deadline(100.0):
            assert deadlines.current_deadline() == outer
        assert deadlines.current_deadline() == outer
    assert deadlines.current_deadline() == math.inf
    for wrong in (0, -1, math.nan):
        with pytest.raises(InvalidRequest, match="positive"), deadlines.deadline(wrong):
            pass


async def test_deadline_of_a_task_is_not_another_tasks() -> None:
    """Tasks that start in the block have its deadline; others have none."""

    async def seen() -> float:
        return deadlines.current_deadline()

    async with AsyncClient("http://127.0.0.1:9") as client:
        outside = asyncio.create_task(seen())
        with client.deadline(5.0):
            inside = asyncio.create_task(seen())
        assert (await outside, await inside < math.inf) == (math.inf, True)


def test_broken_connection_and_503_are_retried(make: Make) -> None:
    """The second attempt succeeds after a closed connection and after 503 with Retry-After."""
    with raw_server(answer_with(b"", DONE)) as url, make(url, retries=1) as client:
        (row,) = client.run(operations.repository_index())
        assert row.name == "ppe"
    with raw_server(answer_with(FULL, DONE)) as url, make(url, retries=1) as client:
        begin = time.monotonic()
        assert client.run(operations.repository_index())
        assert time.monotonic() - begin >= 1.0


def test_connection_is_reused(make: Make) -> None:
    """Two requests use one connection, also after an error response."""
    error = http_answer(400, b'{"error": "no"}')
    with raw_server(answer_with(DONE, error, DONE)) as url, make(url, retries=0) as client:
        client.run(operations.repository_index())
        with pytest.raises(InvalidRequest):
            client.run(operations.repository_index())
        assert client.run(operations.repository_index())
