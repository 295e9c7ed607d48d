"""Engines of users, `--engine module:Class`: the example of docs/extend.md and its faults."""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from structlog.testing import capture_logs

from penstock.engines.embedded.user_engine import CustomEngine
from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway.batching.options import read_options
from penstock.gateway.settings import Settings
from penstock.gateway.stack.startup import CannotStart, choose_engine
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, InvalidRequest, ModelNotFound, NotSupported
from penstock.protocol.extensions import ExtensionError
from penstock.protocol.inference import (
    BatchOwner,
    Datatype,
    InferRequest,
    InferResponse,
    tensor_from_bytes,
    tensor_from_numpy,
)
from tests.support.http import call
from tests.support.stack import CHECKOUT, start_stack, stop_stack

EXAMPLES = CHECKOUT / "deepstream_pipeline" / "examples" / "extend"
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
SPECS = (TensorSpec("x", Datatype.FP32, (4,)),), (TensorSpec("y", Datatype.FP32, (4,)),)


class UserClass:
    """A user's engine with the model `m`, whose `infer` is the test's."""

    config = ModelConfig("m", "numpy", 8, *SPECS)

    def models(self) -> list[ModelConfig]:
        return [self.config]

    async def infer(self, request: InferRequest) -> InferResponse:
        return InferResponse(request.model_name, "1", (tensor_from_numpy("y", request.inputs[0].to_numpy()),))

    async def aclose(self) -> None:
        """Nothing to free."""


def request(**options: float) -> InferRequest:
    return InferRequest("m", (tensor_from_numpy("x", ROWS),), **options)  # type: ignore[arg-type]


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CustomEngine]:
    """Makes an engine of a class with these members."""

    def make(**members: object) -> CustomEngine:
        module = ModuleType("users_module")
        module.Mine = type("Mine", (UserClass,), members)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "users_module", module)
        return CustomEngine("users_module:Mine")

    return make


def test_example_serves_over_http_and_grpc(tmp_path: Path) -> None:
    """`penstock up` with the example answers both protocols, is ready, counts its inferences and stops cleanly."""
    stack = start_stack(
        tmp_path / "home", "--engine", "numpy_engine:NumpyEngine", environ={"PYTHONPATH": str(EXAMPLES)}
    )
    for module, address in (
        (tritonclient.http, stack.http_url.removeprefix("http://")),
        (tritonclient.grpc, stack.grpc_address),
    ):
        with module.InferenceServerClient(address) as client:
            assert client.is_server_ready()
            assert client.is_model_ready("identity")
            tensor = module.InferInput("x", [2, 4], "FP32")
            tensor.set_data_from_numpy(ROWS)
            np.testing.assert_array_equal(client.infer("identity", [tensor]).as_numpy("y"), ROWS)
    page = call("GET", stack.metrics_url).body.decode()
    assert 'nv_inference_count{model="identity",version="1"}' in page
    assert "penstock_ready 1.0" in page
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:Engine", "it cannot be loaded (ModuleNotFoundError"),
        ("json:JSONDecoder", "it has no method models; an engine is a class with the methods models, infer, aclose"),
    ],
)
def test_class_that_is_no_engine_ends_the_start(name: str, why: str) -> None:
    """The parent process names the flag and the reason."""
    with pytest.raises(CannotStart, match=f"--engine {name}: ") as refused:
        choose_engine(Settings(engine=name))
    assert why in str(refused.value)


def test_text_that_is_neither_engine_nor_class_is_refused() -> None:
    """A word or an address without http:// is no class."""
    for text in ("localhost:8000", "tritn"):
        with pytest.raises(ValueError, match="or module:Class of your own"):
            Settings(engine=text)


def test_constructor_that_raises_ends_the_start(engine_of: Callable[..., CustomEngine]) -> None:
    """Its error is the reason."""

    def fail(_: object) -> None:
        raise RuntimeError("no licence")

    with pytest.raises(ExtensionError, match=r"it cannot start \(RuntimeError: no licence\)"):
        engine_of(__init__=fail)
    with pytest.raises(ExtensionError, match=r"it cannot start \(SystemExit: 2\)"):
        engine_of(models=lambda _: sys.exit(2))


@pytest.mark.parametrize("flag", ["is_on_gpu", "is_decoupled", "has_sequence_batching"])
def test_model_with_an_unsupported_feature_ends_the_start(engine_of: Callable[..., CustomEngine], flag: str) -> None:
    """What such an engine cannot have is said, not ignored."""
    with pytest.raises(ExtensionError, match=f"'m' has {flag}, which an engine of a user cannot have"):
        engine_of(config=ModelConfig("m", "numpy", 8, *SPECS, **{flag: True}))  # type: ignore[arg-type]


async def test_model_serves_between_load_and_unload(engine_of: Callable[..., CustomEngine]) -> None:
    """Ready, listed and counted after a load; unknown before it and after an unload."""
    engine = engine_of()
    with pytest.raises(ModelNotFound):
        await engine.infer(request())
    await engine.load("m")
    answer = (await engine.infer(request())).output("y")
    assert answer is not None
    np.testing.assert_array_equal(answer.to_numpy(), ROWS)
    assert not np.shares_memory(answer.to_numpy(), ROWS)
    assert [row.state for row in await engine.repository_index()] == ["READY"]
    assert b'nv_inference_count{model="m",version="1"} 2\n' in await engine.metrics()
    with pytest.raises(InvalidRequest, match="unexpected shape"):
        await engine.infer(InferRequest("m", (tensor_from_numpy("x", ROWS[:, :2]),)))
    with pytest.raises(NotSupported):
        await engine.load("m", "{}")
    await engine.unload("m")
    assert not await engine.ready("m")
    assert await engine.ready()
    await engine.aclose()
    assert not await engine.ready()


async def test_config_of_a_model_keeps_the_parameters_of_batches(engine_of: Callable[..., CustomEngine]) -> None:
    """`batch_owner` and the SLO in the user's ModelConfig are the gateway's options of the model."""
    words = {"batch_owner": "gateway", "slo_p99_ms": "50"}
    engine = engine_of(config=ModelConfig("m", "numpy", 8, *SPECS, words))
    await engine.load("m")
    options = read_options(await engine.model_config("m"))
    assert (options.owner, options.max_batch_size, options.slo_s) == (BatchOwner.GATEWAY, 8, 0.05)


async def test_fault_in_a_users_code_fails_one_request(engine_of: Callable[..., CustomEngine]) -> None:
    """Exceptions, outputs that the config does not have, and a passed deadline become errors of ours."""

    async def fail(*_: object) -> InferResponse:
        raise ZeroDivisionError

    async def wrong(*_: object) -> InferResponse:
        return InferResponse("m", "1", (tensor_from_numpy("y", ROWS.astype(np.int32)),))

    async def short(*_: object) -> InferResponse:
        return InferResponse("m", "1", (tensor_from_numpy("y", ROWS[:1]),))

    async def torn(*_: object) -> InferResponse:
        return InferResponse("m", "1", (replace(tensor_from_numpy("y", ROWS), data=memoryview(b"12345678")),))

    async def hang(*_: object) -> InferResponse:
        await asyncio.Event().wait()
        raise AssertionError

    for infer, error, why in (
        (fail, EngineFailed, "ZeroDivisionError in the engine"),
        (wrong, EngineFailed, "gave INT32 as output 'y'; its config has FP32"),
        (short, EngineFailed, r"gave shape \[1, 4\] as output 'y'; \[2, 4\] is needed"),
        (torn, EngineFailed, "gave 8 bytes as output 'y'; its shape needs 32"),
        (hang, DeadlineExceeded, "did not answer in time"),
    ):
        engine = engine_of(infer=infer)
        await engine.load("m")
        with pytest.raises(error, match=why):
            await engine.infer(request(deadline=time.monotonic() + 0.05))
        assert b'request_failure{model="m",version="1"' in await engine.metrics()


@pytest.mark.parametrize("fault", [SystemExit(3), asyncio.CancelledError(), BaseException("panic")], ids=repr)
async def test_users_code_that_ends_itself_fails_one_request(
    engine_of: Callable[..., CustomEngine], fault: BaseException
) -> None:
    """sys.exit in a library, a cancelled future, a panic of Rust: an error of this request; the gateway runs on."""

    async def fail(*_: object) -> InferResponse:
        raise fault

    engine = engine_of(infer=fail, aclose=fail)
    await engine.load("m")
    with pytest.raises(EngineFailed, match=f"{type(fault).__name__} in the engine"):
        await engine.infer(request())
    await engine.aclose()


async def test_cancelled_request_cancels_the_users_code(engine_of: Callable[..., CustomEngine]) -> None:
    """Its client has left: the task ends as cancelled."""
    is_running, is_cancelled = asyncio.Event(), asyncio.Event()

    async def wait(*_: object) -> InferResponse:
        is_running.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
        raise AssertionError

    engine = engine_of(infer=wait)
    await engine.load("m")
    task = asyncio.create_task(engine.infer(request()))
    await is_running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_cancelled.is_set()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"data": b"1234" * 8}, "gave bytes as data of output 'y'; a memoryview is needed"),
        ({"data": 1 << 40}, "gave int as data of output 'y'"),
        ({"shape": (2.0, 4.0)}, "TypeError in the engine"),
        ({"shape": (2, -4)}, r"gave shape \[2, -4\] as output 'y'"),
        ({"datatype": Datatype.BYTES}, "gave BYTES as output 'y'"),
    ],
)
async def test_output_of_other_types_is_the_engines_fault(
    engine_of: Callable[..., CustomEngine], wrong: dict[str, object], why: str
) -> None:
    """Each is a 500 with the reason."""

    async def infer(*_: object) -> InferResponse:
        return InferResponse("m", "1", (replace(tensor_from_numpy("y", ROWS), **wrong),))  # type: ignore[arg-type]

    engine = engine_of(infer=infer)
    await engine.load("m")
    with pytest.raises(EngineFailed, match=why):
        await engine.infer(request())


async def test_texts_of_an_output_are_checked(engine_of: Callable[..., CustomEngine]) -> None:
    """Text that its length prefix cuts is the engine's fault, not the client's; a shape of NumPy's numbers is taken."""
    given = tensor_from_bytes("y", [b"a", b"bc"], tuple(np.array([2])))

    async def infer(*_: object) -> InferResponse:
        return InferResponse("m", "1", (given,))

    outputs = (TensorSpec("y", Datatype.BYTES, (-1,)),)
    engine = engine_of(infer=infer, config=ModelConfig("m", "numpy", 0, SPECS[0], outputs))
    await engine.load("m")
    whole = InferRequest("m", (tensor_from_numpy("x", ROWS[0]),))
    (output,) = (await engine.infer(whole)).outputs
    assert output.to_numpy().tolist() == [b"a", b"bc"]
    assert type(output.shape[0]) is int
    given = replace(given, data=memoryview(b"\xff\xff\xff\xffa"))
    with pytest.raises(EngineFailed, match="gave elements that cannot be read: tensor 'y' has an element of"):
        await engine.infer(whole)


async def test_users_engine_that_hangs_restarts_the_gateway(engine_of: Callable[..., CustomEngine]) -> None:
    """If no model of it answers any more, the watch asks for a restart, which ends a gateway with such an engine."""
    is_hanging = asyncio.Event()

    async def hang(mine: UserClass, request: InferRequest) -> InferResponse:
        if is_hanging.is_set():
            await asyncio.Event().wait()
        return await UserClass.infer(mine, request)

    reasons: asyncio.Queue[str] = asyncio.Queue()
    options = WatchOptions(
        probe_interval_s=0.01, down_interval_s=0.01, canary_interval_s=0.0, execution_timeout_s=lambda _: 0.1
    )
    watch = EngineWatch(engine_of(infer=hang), options, ask_restart=reasons.put_nowait)
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(30):
        await watch.first_ready.wait()
        is_hanging.set()
        reason = await reasons.get()
    assert reason == "model 'm': it answered nothing for 0.1 s (execution_timeout_ms), and no other model answers"
    assert Settings(engine="users_module:Mine").engine_is_embedded, "its restart is the gateway's"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_users_class_that_does_not_close_does_not_keep_the_gateway(
    engine_of: Callable[..., CustomEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its aclose hangs or raises, the gateway's end goes on, and the log has the reason."""
    monkeypatch.setattr("penstock.engines.embedded.user_engine.CLOSE_TIMEOUT_S", 0.05)

    async def hang(_: object) -> None:
        await asyncio.Event().wait()

    async def fail(_: object) -> None:
        raise ZeroDivisionError

    for aclose, reason in ((hang, "TimeoutError"), (fail, "ZeroDivisionError")):
        with capture_logs() as lines:
            await engine_of(aclose=aclose).aclose()
        assert reason in lines[0]["error"]
