"""A batch has one call to the engine and many traces."""

import asyncio
from unittest.mock import Mock, call

from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.tracing import Trace, current_trace
from penstock.protocol.inference import BatchOwner, InferResponse
from tests.batching.echo_engine import EchoEngine, asking

PARENT = (("traceparent", "00-1-2-01"),)


def trace_of() -> Mock:
    trace = Mock(Trace)
    trace.engine.return_value.headers = PARENT
    return trace


def ask(pool: BatcherPool, number: float, trace: Trace | None) -> "asyncio.Task[InferResponse]":
    """A request of its own task, and so of its own trace."""

    async def traced() -> InferResponse:
        current_trace.set(trace)
        return await pool.infer(asking(number), client="one")

    return asyncio.create_task(traced())


async def test_first_traced_member_has_the_engines_call_and_the_others_its_duration() -> None:
    """The engine's own spans hang under one trace; none of the others lacks its time there."""
    engine = EchoEngine()
    pool = BatcherPool(engine, lambda _: BatchOptions(owner=BatchOwner.GATEWAY, max_batch_size=8, instances=1))
    first, second = trace_of(), trace_of()
    await asyncio.gather(ask(pool, 1.0, None), ask(pool, 2.0, first), ask(pool, 3.0, second))
    assert engine.calls == [[1.0, 2.0, 3.0]]
    assert engine.requests[0].metadata == PARENT
    first.engine.assert_called_once_with("engine")
    first.engine.return_value.end.assert_called_once_with(is_error=False)
    assert [[name for name, _ in one.args[0]] for one in first.stages.call_args_list] == [["queue"]]
    assert [[name for name, _ in one.args[0]] for one in second.stages.call_args_list] == [["queue", "engine"]]
    assert call.engine("engine") not in second.mock_calls
    await pool.aclose()
