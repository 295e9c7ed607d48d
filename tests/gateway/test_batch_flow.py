"""What of a gateway-owned model's requests goes into a batch, and what goes to the engine alone."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.engines.model_health import KnownModel
from penstock.gateway.batch_flow import MODEL_CONFIG, BatchFlow, RequestContext
from penstock.protocol.call import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall, InferHead
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import DeadlineExceeded
from penstock.protocol.inference import Datatype, InferRequest, InferResponse

CONFIG = ModelConfig("owned", "python", 8, (TensorSpec("x", Datatype.FP32, (-1,)),), (), {"batch_owner": "gateway"})
MESSAGE = model_config_pb2.ModelConfig(
    name="owned",
    max_batch_size=8,
    input=[model_config_pb2.ModelInput(name="x", data_type=model_config_pb2.TYPE_FP32, dims=[-1], optional=True)],
    output=[model_config_pb2.ModelOutput(name="y", data_type=model_config_pb2.TYPE_FP32, dims=[-1])],
)


@dataclass
class Asked:
    """Relay, watch and batching in one; what each was asked is kept.

    asked_config: with which deadlines. answers: when the config is returned; None for at once.
    """

    models: Mapping[str, KnownModel] = field(
        default_factory=lambda: {"owned": KnownModel("owned", is_ready=True, config=CONFIG)}
    )
    alone: int = 0
    batched: list[InferRequest] = field(default_factory=list)
    asked_config: list[float | None] = field(default_factory=list)
    answers: asyncio.Event | None = None

    async def send(self, call: HttpCall | GrpcCall, *, deadline: float | None) -> HttpAnswer | GrpcAnswer:
        if isinstance(call, HttpCall) or call.method != MODEL_CONFIG:
            self.alone += 1
            return HttpAnswer(200, (), b"") if isinstance(call, HttpCall) else GrpcAnswer(0, b"")
        self.asked_config.append(deadline)
        if self.answers is not None:
            await self.answers.wait()
        return GrpcAnswer(0, service_pb2.ModelConfigResponse(config=MESSAGE).SerializeToString())

    async def infer(self, request: InferRequest, *, client: str, priority: int = 0) -> InferResponse:
        self.batched.append(request)
        return InferResponse("owned", "1", request.inputs)


def flow_of(asked: Asked) -> BatchFlow:
    both: Any = asked
    return BatchFlow(batching=both, relay=both, watch=both, max_rows_of=lambda _: 8, max_body_bytes=1 << 20)


def context(version: str = "", deadline: float | None = None) -> RequestContext:
    return RequestContext(InferHead("owned", version), "c", deadline)


def grpc_call(version: str = "", *, has_input: bool = True) -> GrpcCall:
    message = service_pb2.ModelInferRequest(model_name="owned", model_version=version)
    if has_input:
        message.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        message.raw_input_contents.append(bytes(4))
    return GrpcCall("/inference.GRPCInferenceService/ModelInfer", message.SerializeToString())


async def test_request_without_inputs_goes_alone() -> None:
    """It has no rows to merge; whether it is one is the engine's to say."""
    asked = Asked()

    await flow_of(asked).infer(grpc_call(has_input=False), context())

    assert (asked.alone, asked.batched) == (1, [])


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
async def test_parameter_that_no_call_of_ours_can_hold_goes_alone(number: int) -> None:
    """REST has numbers of any size, and the engine takes them there; gRPC has 64 bits."""
    asked = Asked()
    body = b'{"parameters":{"a":%d},"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}]}' % number

    await flow_of(asked).infer(HttpCall("POST", b"/v2/models/owned/infer", (), body), context())

    assert (asked.alone, asked.batched) == (1, [])


async def test_versions_that_are_spelled_oddly_grow_no_table() -> None:
    """The engine takes `1`, `01` and `1x` for one version: each of a client's spellings would be kept for ever."""
    asked = Asked()
    flow = flow_of(asked)

    for version in ("1", "1", "01", "001", "+1", "1x", "\N{ARABIC-INDIC DIGIT ONE}"):
        await flow.infer(grpc_call(version), context(version))

    assert (len(asked.batched), asked.alone, len(asked.asked_config)) == (2, 5, 1)


async def test_engine_is_asked_for_the_config_no_longer_than_the_request_has() -> None:
    """The first request of a version waits for its config, too; with it the question ends."""
    asked = Asked(answers=asyncio.Event())

    with pytest.raises(DeadlineExceeded):
        await flow_of(asked).infer(grpc_call(), context(deadline=time.monotonic() + 0.01))

    await asyncio.sleep(0.01)
    assert len(asked.asked_config) == 1
    assert len(asyncio.all_tasks()) == 1


async def test_requests_that_come_together_after_a_reload_ask_the_engine_once() -> None:
    """Not each of a crowd; all of them are batched."""
    asked = Asked(answers=asyncio.Event())
    flow = flow_of(asked)
    crowd = [asyncio.create_task(flow.infer(grpc_call(), context())) for _ in range(30)]
    await asyncio.sleep(0.01)
    asked.answers.set()
    await asyncio.gather(*crowd)
    assert (len(asked.asked_config), len(asked.batched)) == (1, 30)


async def test_new_config_is_asked_for_though_the_old_one_is_still_on_its_way() -> None:
    """A reload in between: who comes after it is not served by what was asked before."""
    asked = Asked(answers=asyncio.Event())
    flow = flow_of(asked)
    before = asyncio.create_task(flow.infer(grpc_call(), context()))
    await asyncio.sleep(0.01)
    asked.models = {"owned": KnownModel("owned", is_ready=True, config=replace(CONFIG))}
    after = asyncio.create_task(flow.infer(grpc_call(), context()))
    await asyncio.sleep(0.01)
    asked.answers.set()
    await asyncio.gather(before, after)
    assert len(asked.asked_config) == 2
