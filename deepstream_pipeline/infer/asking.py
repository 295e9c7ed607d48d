"""Calls to the engine and what comes back, as the pipeline counts it."""

import asyncio
import time
from collections.abc import Sequence

from deepstream_pipeline.errors import InferFailed, InferRefused, ModelUnusable
from deepstream_pipeline.infer.answer import Answer, AnsweredRow
from deepstream_pipeline.infer.calls import Loaded
from deepstream_pipeline.infer.line import Line
from deepstream_pipeline.infer.network import Network, network_from
from server.batching.declared import UNTRIED
from server.core.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    ModelRefused,
    Overloaded,
    QuotaExceeded,
)
from server.core.infer import InferResponse

LATE_S = 1.0  # beyond a deadline, which the line keeps itself
RETRY_S = 0.2
_REFUSED = (Overloaded, QuotaExceeded, DeadlineExceeded)
_PASSING = (BackendUnavailable, ModelNotReady, *_REFUSED)  # of a model that may be there in a moment


async def ask_all(loaded: Sequence[Loaded]) -> Answer:
    """Every call at once. One that fails takes its own rows alone. Leases come back whatever happens."""
    if len(loaded) == 1:
        outcomes = [await _ask(loaded[0])]
    else:
        outcomes = list(await asyncio.gather(*(_ask(one) for one in loaded)))
    return _answer(loaded, outcomes)


async def _ask(loaded: Loaded) -> tuple[InferResponse | InferFailed, float]:
    """(what came, seconds until then)."""
    started, is_answered = time.monotonic(), False
    deadline = loaded.request.deadline
    try:
        async with asyncio.timeout(None if deadline is None else max(deadline - started, 0.0) + LATE_S):
            response = await loaded.line.infer(loaded.request)
        is_answered = True
        return response, time.monotonic() - started
    except (InferenceError, TimeoutError) as error:
        return failure_of(error), time.monotonic() - started
    finally:
        if loaded.lease is not None:
            if is_answered:
                loaded.lease.release()
            else:
                loaded.lease.release_later()  # the engine may still begin to read


def failure_of(error: Exception) -> InferFailed:
    """The pipeline's word for it, with the gateway's text."""
    if isinstance(error, TimeoutError):
        return InferRefused("the engine did not answer by the deadline")
    if isinstance(error, InferenceError):
        return InferRefused(error.message) if isinstance(error, _REFUSED) else InferFailed(error.message)
    return InferFailed("internal error")


def _answer(loaded: Sequence[Loaded], outcomes: Sequence[tuple[InferResponse | InferFailed, float]]) -> Answer:
    rows: dict[int, AnsweredRow] = {}
    first: InferFailed | None = None
    infer_s, queue_s, engine_rows = 0.0, 0.0, 0
    for one, (outcome, took_s) in zip(loaded, outcomes, strict=True):
        call = one.call
        if isinstance(outcome, InferFailed):
            first = first or outcome
            rows |= {member: AnsweredRow(None, None, outcome) for member in call.members}
            continue
        timings, told = outcome.timings, outcome.explanation
        infer_s, queue_s = max(infer_s, timings.infer or took_s), max(queue_s, timings.queue)
        engine_rows = max(engine_rows, told.rows if told is not None else len(call.members))
        for place, member in enumerate(call.members):
            rows[member] = AnsweredRow(outcome, place if call.has_batch_axis else None)
    return Answer(first, tuple(rows[index] for index in sorted(rows)), infer_s, queue_s, engine_rows)


async def find_network(line: Line, name: str, version: str, timeout_s: float) -> Network:
    """See Engine.network. Waits for the end of the model's trial."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            network = network_from(await line.config(name, version), version)
            if network.unmerged != UNTRIED or time.monotonic() + RETRY_S >= until:
                return network
        except ModelRefused as error:
            raise ModelUnusable(error.message) from error
        except ModelNotFound as error:
            raise ModelUnusable(
                f"the engine has no model {name!r} ({error.message}); `penstock models list` shows what it has, and "
                "`penstock models pull` fetches more"
            ) from error
        except InvalidRequest as error:
            raise ModelUnusable(f"model {name!r} cannot be used: {error.message}") from error
        except _PASSING as error:
            if time.monotonic() + RETRY_S >= until:
                raise InferFailed(f"model {name!r} is not ready within {timeout_s:g} s: {error.message}") from error
        except InferenceError as error:
            raise InferFailed(f"model {name!r}: {error.message}") from error
        await asyncio.sleep(RETRY_S)
