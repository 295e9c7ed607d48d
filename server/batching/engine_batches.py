"""The sizes of a model's batches, from the engine's statistics."""

import time
from urllib.parse import quote

from server.batching.engine_statistics import EngineBatches, read_engine_batches
from server.core.backend import Relay
from server.core.errors import BackendFailed
from server.core.relay import HttpCall

STATISTICS_S = 5.0


async def ask_engine_batches(relay: Relay, model_name: str) -> EngineBatches:
    """The engine's statistics of the model. Raises BackendFailed, and what the relay raises."""
    target = f"/v2/models/{quote(model_name, safe='')}/stats".encode()
    answer = await relay.http(HttpCall("GET", target, (), b""), deadline=time.monotonic() + STATISTICS_S)
    if answer.status != 200:
        said = answer.body[:200].decode(errors="replace")
        raise BackendFailed(f"the engine's statistics of model {model_name!r}: status {answer.status}: {said}")
    return read_engine_batches(answer.body)
