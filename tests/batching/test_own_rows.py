"""Every client gets exactly its own answer, whatever a model does with rows: random models, requests and clients.

Tests both places that merge requests: the gateway's batcher, and the runner of our backends under Triton.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock.engines.ort_serving.batch import BatchRunner, OrtRequest
from penstock.engines.ort_serving.config import OrtRequestError
from penstock.engines.row_trial import FULL_PRECISION, Answer, Arrays, InputSpec, row_trial, run_trial
from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.options import BatchOptions
from penstock.protocol.inference import BatchOwner, InferRequest, InferResponse, tensor_from_numpy
from tests.batching.echo_engine import EchoEngine

CASES = 500  # in each block; a block is tested here, more in `make test-long`
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.long) for block in range(1, 20))]
Rows = Callable[[Any], Any]

FOLLOWING: list[Rows] = [  # each row of the answer depends on that input row only
    lambda x: x * 3 - 1,
    lambda x: x.sum(axis=1, keepdims=True),
    lambda x: x.argmax(axis=1),
    lambda x: np.stack([x, -x], axis=2),
    lambda x: np.where(x > 0.5, x, 0),
]
OTHERS: list[Rows] = [  # rows that depend on content, in another order, or on the whole batch
    lambda x: np.argwhere(x > 0.3),
    lambda x: x[x > 0.2].reshape(-1, 1),
    lambda x: np.concatenate([np.nonzero(row > 0.1)[0] for row in x]).reshape(-1, 1),
    lambda x: np.sort(x, axis=0),
    lambda x: x[::-1],
    lambda x: x.mean(axis=0, keepdims=True),
    lambda x: x - x.mean(),
    lambda x: np.concatenate([x, x]),
    lambda x: x.max(),
    lambda x: x.T,
]


@dataclass(frozen=True)
class Model:
    """x [n, width] → one or two outputs."""

    width: int
    outputs: tuple[Rows, ...]

    @property
    def follows(self) -> bool:
        return all(rows in FOLLOWING for rows in self.outputs)

    def run(self, x: Any) -> Arrays:
        return {f"y{number}": np.asarray(rows(x)) for number, rows in enumerate(self.outputs)}

    def why_unmerged(self) -> str:
        def run(arrays: Arrays) -> Answer:
            return self.run(arrays["x"])

        return run_trial(row_trial([InputSpec("x", "FP32", (self.width,))], FULL_PRECISION), run)


class ModelEngine(EchoEngine):
    """Answers with a model, after all ready tasks have run."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    async def infer(self, request: InferRequest) -> InferResponse:
        x = request.inputs[0].to_numpy()
        self.calls.append([len(x)])
        await asyncio.sleep(0)
        tensors = tuple(tensor_from_numpy(name, array) for name, array in self._model.run(x).items())
        return InferResponse(request.model_name, "1", tensors, request.id)


def drawn_model(random: Any) -> Model:
    """A model of either kind; with two outputs, only one may follow the batch."""
    kinds = FOLLOWING if random.random() < 0.5 else FOLLOWING + OTHERS * 2
    outputs = tuple(kinds[number] for number in random.integers(0, len(kinds), random.integers(1, 3)))
    return Model(int(random.integers(5, 9)), outputs)


def drawn_crowd(random: Any, width: int) -> list[Any]:
    """Inputs of concurrent clients, some bright and some empty."""
    rows = random.integers(1, 4, random.integers(2, 9))
    return [(random.random((count, width)) * random.choice([0, 0.3, 1])).astype(np.float32) for count in rows]


def assert_own(model: Model, x: Any, answer: Arrays) -> None:
    """Names and shapes are the same as alone; values differ by rounding at most."""
    alone = model.run(x)
    assert answer.keys() == alone.keys()
    for name, wanted in alone.items():
        assert answer[name].shape == wanted.shape, name
        np.testing.assert_allclose(answer[name], wanted, rtol=1e-5, atol=1e-6)


async def through_the_gateway(model: Model, why: str, crowd: list[Any]) -> int:
    """The number of requests that shared a call."""
    engine = ModelEngine(model)
    options = BatchOptions(BatchOwner.GATEWAY, max_batch_size=16, unmerged=why)
    pool = BatcherPool(engine, lambda _: options)
    requests = [InferRequest("m", (tensor_from_numpy("x", x),)) for x in crowd]
    responses = await asyncio.gather(*(pool.infer(one, client=str(n)) for n, one in enumerate(requests)))
    await pool.aclose()
    for x, response in zip(crowd, responses, strict=True):
        assert_own(model, x, {tensor.name: tensor.to_numpy() for tensor in response.outputs})
    return len(crowd) - len(engine.calls)


def through_the_backend(model: Model, why: str, crowd: list[Any]) -> int:
    """The number of requests that shared a run."""
    runs = 0

    def run(names: Any, inputs: Any) -> list[Any]:
        nonlocal runs
        runs += 1
        found = model.run(inputs["x"])
        return [found[name] for name in names]

    names = tuple(f"y{number}" for number in range(len(model.outputs)))
    outcomes = BatchRunner(run, is_batching=not why).answer([OrtRequest({"x": x}, names) for x in crowd])
    for x, outcome in zip(crowd, outcomes, strict=True):
        assert not isinstance(outcome, OrtRequestError)
        assert_own(model, x, outcome)
    return len(crowd) - runs


@pytest.mark.parametrize("block", BLOCKS)
async def test_every_client_gets_its_own_answer_of_any_model(block: int) -> None:
    """Models whose rows follow the batch are merged, others never, in hundreds of random cases a block."""
    random = np.random.default_rng([20261127, block])
    shared = {True: 0, False: 0}
    for _ in range(CASES):
        model = drawn_model(random)
        why = model.why_unmerged()
        assert (why == "") == model.follows, (why, model)
        crowd = drawn_crowd(random, model.width)
        shared[model.follows] += await through_the_gateway(model, why, crowd)
        shared[model.follows] += through_the_backend(model, why, crowd)
    assert shared[False] == 0
    assert shared[True] > CASES
