"""Fake Tritons in groups: several in this process, or one in a process of its own beside one here."""

from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc import service_pb2

from penstock.engines.call_options import CallTimeouts, RetryBudget
from penstock.engines.failures import Outliers
from penstock.engines.replicas import Replicas
from penstock.engines.triton.client import TritonEngine
from penstock.protocol.call import GrpcCall, HttpCall
from penstock.protocol.inference import Datatype, InferRequest, Parameter, Tensor
from tests.engines.fake_triton import FakeTriton, Mode, child_triton

METHOD = "/inference.GRPCInferenceService/ModelInfer"
HTTP_INFER = HttpCall("POST", b"/v2/models/double/infer", (), b"{}")
X = Tensor("x", Datatype.FP32, (1, 1), memoryview(np.ones(1, np.float32).tobytes()))


def infer_request(deadline: float | None = None, **parameters: Parameter) -> InferRequest:
    return InferRequest("double", (X,), parameters=parameters, deadline=deadline)


def infer_call() -> GrpcCall:
    request = service_pb2.ModelInferRequest(model_name="double", id="7")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(bytes(4))
    return GrpcCall(METHOD, request.SerializeToString())


class Turns:
    """In place of chance: the next replica each time."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self) -> float:
        self._turn += 1
        return self._turn * 0.381966 % 1.0  # spread evenly, whatever the number of replicas


def connected(addresses: dict[str, str], *, outliers: Outliers | None = None) -> Replicas:
    """addresses: gRPC's by HTTP's."""
    budget = RetryBudget()
    timeouts = CallTimeouts(control_s=1.0, connect_s=0.5)
    engines = {
        url: TritonEngine(http_url=url, grpc_address=grpc, max_connections=8, timeouts=timeouts, budget=budget)
        for url, grpc in addresses.items()
    }
    return Replicas(engines, budget=budget, outliers=outliers, uniform=Turns())


@asynccontextmanager
async def group(count: int, *, outliers: Outliers | None = None) -> AsyncIterator[tuple[Replicas, list[FakeTriton]]]:
    """So many fakes and what stands before them, looked at once as the watch does."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeTriton().running()) for _ in range(count)]
        replicas = connected({fake.http_url: fake.grpc_address for fake in fakes}, outliers=outliers)
        assert await replicas.ready()
        await replicas.repository_index()
        try:
            yield replicas, fakes
        finally:
            await replicas.aclose()


@dataclass(frozen=True)
class Pair:
    """A fake in a process of its own, which a test may kill or stop, beside one in this process."""

    replicas: Replicas
    process: Process
    grpc_port: int
    fake: FakeTriton

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    """Looked at once as the watch does."""
    async with child_triton(Mode.NORMAL) as (process, url, address), FakeTriton().running() as fake:
        replicas = connected({url: address, fake.http_url: fake.grpc_address})
        assert await replicas.ready()
        await replicas.repository_index()
        try:
            yield Pair(replicas, process, int(address.rpartition(":")[2]), fake)
        finally:
            await replicas.aclose()


def infers(fakes: list[FakeTriton]) -> list[int]:
    return [fake.grpc_methods.count("ModelInfer") for fake in fakes]


def standings(replicas: Replicas) -> list[str]:
    return [row.standing for row in replicas.statistics()]
