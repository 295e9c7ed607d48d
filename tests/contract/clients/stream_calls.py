"""Streams that tritonclient's gRPC clients, plain and asynchronous, can open."""

import queue
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from tests.contract.clients.asking import Asker, Reply, plain, reported_by_result
from tests.contract.clients.infer_calls import F6

WAIT_S = 60.0
Request = dict[str, Any]
Requests = Callable[[Asker], list[Request]]


def streamed(requests: Requests, expected: int, **options: Any) -> Callable[[Asker], Reply]:
    """What comes for these requests on one stream, in the order of its coming."""

    def ask(asker: Asker) -> Reply:
        asked = requests(asker)
        if asker.runner is None:
            return _reported_by_callbacks(asker, asked, expected, options)
        return asker.runner.run(_reported_by_iterator(asker, asked, expected, options))

    return ask


def _reported_by_callbacks(asker: Asker, requests: list[Request], expected: int, options: dict[str, Any]) -> Reply:
    answers: queue.Queue[Reply] = queue.Queue()
    asker.client.start_stream(lambda result, error: answers.put(_reported(result, error)), **options)
    for request in requests:
        asker.client.async_stream_infer(**request)
    reply = [answers.get(timeout=WAIT_S) for _ in range(expected)]
    asker.client.stop_stream()
    return reply, answers.qsize()


async def _reported_by_iterator(asker: Asker, requests: list[Request], expected: int, options: dict[str, Any]) -> Reply:
    async def outgoing() -> AsyncIterator[Request]:
        for request in requests:
            yield request

    reply = []
    async for result, error in asker.client.stream_infer(outgoing(), stream_timeout=WAIT_S, **options):
        reply.append(_reported(result, error))
    return reply[:expected], len(reply) - expected


def _reported(result: Any, error: Any) -> Reply:
    if error is not None:
        return {"status": str(error.status()), "error": error.message()}
    return reported_by_result(result), plain(result.get_response().parameters)


def _numbered(model: str, count: int) -> Requests:
    return lambda asker: [
        {"model_name": model, "inputs": [asker.tensor(F6 + number, "FP32")], "request_id": str(number)}
        for number in range(count)
    ]


def _repeats(*counts: int, **options: Any) -> Requests:
    return lambda asker: [
        {
            "model_name": "repeats",
            "inputs": [asker.tensor(np.array([count], np.int32), "INT32")],
            "request_id": f"{count} times",
            **options,
        }
        for count in counts
    ]


def _sums(sequence_id: int | str, model: str) -> Requests:
    return lambda asker: [
        {
            "model_name": model,
            "inputs": [asker.tensor(np.array([[number]], np.int32), "INT32")],
            "sequence_id": sequence_id,
            "sequence_start": number == 1,
            "sequence_end": number == 5,
        }
        for number in range(1, 6)
    ]


def _good_after_bad(asker: Asker) -> list[Request]:
    """An unknown model, a wrong input, a model that fails; and one that answers."""
    x = [asker.tensor(F6, "FP32")]
    return [
        {"model_name": "unknown", "inputs": x, "request_id": "a"},
        {"model_name": "identity_fp32", "inputs": [asker.tensor(F6, "FP32", "wrong")], "request_id": "b"},
        {"model_name": "fails", "inputs": [asker.tensor(F6[0], "FP32")], "request_id": "c"},
        {"model_name": "identity_fp32", "inputs": x, "request_id": "d"},
    ]


CALLS: dict[str, Callable[[Asker], Reply]] = {
    "many on one stream": streamed(_numbered("identity_fp32", 20), 20),
    "a sequence on a stream": streamed(_sums(70, "sums"), 5),
    "a named sequence on a stream": streamed(_sums("seventy", "sums_by_word"), 5),
    "a decoupled model on a stream": streamed(_repeats(3), 3),
    "no answer of a decoupled model": streamed(_repeats(0, 1), 1),
    "the empty final answer": streamed(_repeats(2, enable_empty_final_response=True), 3),
    "an error of a decoupled model": streamed(_repeats(-1), 1),
    "compression on a stream": streamed(_numbered("identity_fp32", 2), 2, compression_algorithm="gzip"),
    "errors on a stream": streamed(_good_after_bad, 4),
    "an error that ends the stream": streamed(_numbered("unknown", 1), 1, headers={"triton_grpc_error": "true"}),
    "a stream without a request": streamed(lambda _: [], 0),
}
