"""The trial that a loaded model must pass before it serves clients."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.engines.probes import LoadTrial
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import EngineFailed, EngineUnavailable, InvalidRequest, OutOfMemory
from penstock.protocol.inference import Datatype, InferRequest, Tensor, tensor_from_numpy
from penstock.testing import FakeEngine

TIMEOUT_S = 7.0
MODEL = ModelConfig(
    "m",
    "python",
    0,
    (TensorSpec("x", Datatype.FP32, (2, -1)),),
    (TensorSpec("y", Datatype.FP32, (-1,)), TensorSpec("z", Datatype.FP32, (-1,))),
)


def answer(*names: str) -> Callable[[InferRequest], Sequence[Tensor]]:
    return lambda _: [tensor_from_numpy(name, np.zeros(1, np.float32)) for name in names]


def refusing(error: Exception, *, is_zeros_only: bool = False) -> Callable[[InferRequest], Sequence[Tensor]]:
    def act(request: InferRequest) -> Sequence[Tensor]:
        if is_zeros_only and request.inputs[0].to_numpy().any():
            return answer("y", "z")(request)
        raise error

    return act


async def why(
    act: Callable[[InferRequest], Sequence[Tensor]], config: ModelConfig = MODEL, *, picture: str = ""
) -> tuple[str, FakeEngine, list[str]]:
    """Why the model cannot serve, the fake engine, and the models whose rows were tried."""
    backend, rows = FakeEngine((config,), answer=act), list[str]()

    async def see(_: ModelConfig, timeout_s: float) -> str:
        assert timeout_s == TIMEOUT_S
        return picture

    async def try_rows(tried: ModelConfig) -> str:
        rows.append(tried.name)
        return "its rows go astray"

    failure, unmerged = await LoadTrial(backend, see=see, try_rows=try_rows, execution_timeout_s=lambda _: TIMEOUT_S)(
        config
    )
    assert unmerged == ("its rows go astray" if rows else None)
    return failure, backend, rows


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (answer("y", "z"), ""),
        (answer("z", "y", "more"), ""),
        (answer("y"), "its trial at load failed: its answer lacks the output 'z'"),
        (answer(), "its trial at load failed: its answer lacks the output 'y'"),
        (refusing(EngineFailed("the output is a scalar")), "its trial at load failed: the output is a scalar"),
        (refusing(EngineFailed("model 'm' failed: KeyError")), "its trial at load failed: KeyError"),
        (refusing(EngineFailed("division by zero"), is_zeros_only=True), ""),
        (refusing(InvalidRequest("x must not be 0")), ""),
        (refusing(OutOfMemory("out of memory")), ""),
    ],
)
async def test_model_that_answers_neither_zeros_nor_noise_cannot_serve(
    act: Callable[[InferRequest], Sequence[Tensor]], reason: str
) -> None:
    """Refused inputs and a temporary lack of memory do not fail the trial."""
    found, backend, rows = await why(act)
    assert (found, rows) == (reason, [] if reason else ["m"])
    assert [request.inputs[0].shape for request in backend.calls] in ([(2, 1)], [(2, 1), (2, 32)])


async def test_model_without_a_canary_is_asked_nothing() -> None:
    """With `canary: off`, generated inputs are no evidence about the model."""
    config = replace(MODEL, parameters={"canary": "off"})
    found, backend, _ = await why(refusing(EngineFailed("no")), config)
    assert (found, backend.calls) == ("", [])


async def test_model_that_answers_no_picture_cannot_serve() -> None:
    """Correct answers to tensors are not enough, because clients send pictures."""
    found, _, rows = await why(answer("y", "z"), picture="a picture through /image: output 'y' has no boxes")
    assert found == "its trial at load failed: a picture through /image: output 'y' has no boxes"
    assert rows == []


async def test_engine_that_cannot_be_asked_says_nothing_of_the_model() -> None:
    """The trial is repeated later."""
    with pytest.raises(EngineUnavailable):
        await why(refusing(EngineUnavailable("connection refused")))


@pytest.mark.parametrize(
    ("max_batch_size", "unmerged", "tried"),
    [(8, "", [None, ""]), (8, "its rows go astray", [None]), (8, None, [None]), (1, "", [None]), (0, "", [None])],
)
async def test_pictures_are_tried_as_a_batch_where_requests_are_merged(
    max_batch_size: int, unmerged: str | None, tried: list[str | None]
) -> None:
    """First alone, and again after the rows have proved that they are independent."""
    config = replace(MODEL, max_batch_size=max_batch_size, inputs=(TensorSpec("x", Datatype.FP32, (2,)),))
    seen: list[str | None] = []

    async def see(one: ModelConfig, _: float) -> str:
        seen.append(one.unmerged)
        return "row 1 is missing" if len(seen) == 2 else ""

    async def try_rows(_: ModelConfig) -> str | None:
        return unmerged

    backend = FakeEngine((config,), answer=answer("y", "z"))
    trial = LoadTrial(backend, see=see, try_rows=try_rows, execution_timeout_s=lambda _: TIMEOUT_S)
    found = await trial(config)
    assert seen == tried
    assert found.failure == ("its trial at load failed: row 1 is missing" if len(tried) == 2 else "")
