"""Any mixture of requests, clients that leave, deadlines and failures: every request ends once, nothing stays."""

import asyncio
import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.options import BatchOptions
from penstock.protocol.errors import EngineFailed, EngineUnavailable, InferenceError, OutOfMemory
from penstock.protocol.inference import BatchOwner, InferResponse
from tests.batching.echo_engine import EchoEngine, asking, rows_in

FAILURES: dict[str, type[InferenceError]] = {
    "fails": EngineFailed,
    "is gone": EngineUnavailable,
    "is out of memory": OutOfMemory,
}
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 5)),
        st.tuples(st.just("ask with a deadline"), st.integers(-1, 3)),
        st.tuples(st.just("leave"), st.integers(0, 40)),
        st.tuples(st.sampled_from(sorted(FAILURES)), st.just(0)),
        st.tuples(st.sampled_from(["hold", "let go", "turn"]), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 8), st.integers(1, 3), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_with_its_own_rows_or_a_reason(
    steps: list[tuple[str, int]], max_batch_size: int, instances: int, max_queue_size: int
) -> None:
    """Asked for is answered, failed with a reason or left by its client; the queue and the engine are empty then."""
    options = BatchOptions(BatchOwner.GATEWAY, max_batch_size, instances, max_queue_size=max_queue_size)
    asyncio.run(asyncio.wait_for(play(steps, options), 20))


async def play(steps: list[tuple[str, int]], options: BatchOptions) -> None:
    engine = EchoEngine()
    pool = BatcherPool(engine, lambda _: options)
    asked: list[tuple[list[float], asyncio.Task[InferResponse]]] = []
    for kind, number in steps:
        if kind.startswith("ask"):
            first = float(100 * len(asked))
            rows = [first + row for row in range(number if kind == "ask" and number <= options.max_batch_size else 1)]
            deadline = time.monotonic() + number / 1000 if kind != "ask" else None
            request = asking(*rows, deadline=deadline)
            task = asyncio.create_task(pool.infer(request, client=str(len(asked) % 3), priority=len(asked) % 4))
            asked.append((rows, task))
        elif kind == "leave" and asked:
            asked[number % len(asked)][1].cancel()
        elif kind == "hold":
            engine.gate.clear()
        elif kind == "let go":
            engine.gate.set()
        elif kind in FAILURES:
            engine.refusals.append(FAILURES[kind]("injected"))
        await asyncio.sleep(0)
    engine.gate.set()
    ends = await asyncio.gather(*[task for _, task in asked], return_exceptions=True)
    kinds = Counter(kind_of(rows, end) for (rows, _), end in zip(asked, ends, strict=True))
    assert sum(kinds.values()) == len(asked)
    await asyncio.sleep(0.001)
    for statistics in pool.statistics().values():
        assert (statistics.depth, statistics.in_flight, statistics.size_bytes) == (0, 0, 0)
    assert engine.running == 0
    await pool.aclose()


def kind_of(rows: list[float], end: InferResponse | BaseException) -> str:
    """answered, with exactly its rows; failed; or left."""
    if isinstance(end, InferResponse):
        assert rows_in(end) == [row + 1 for row in rows]
        return "answered"
    assert isinstance(end, InferenceError | asyncio.CancelledError), repr(end)
    return "failed" if isinstance(end, InferenceError) else "left"
