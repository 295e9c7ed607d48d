"""A small v2 server in the test's own event loop, over HTTP and gRPC, whose behaviour a test sets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
from aiohttp import web
from aiohttp.test_utils import TestServer
from tritonclient.grpc import service_pb2 as pb

from penstock_load.clients.client import Endpoint

SERVICE = "inference.GRPCInferenceService"
Context = grpc.aio.ServicerContext
Stream = Callable[[AsyncIterator[pb.ModelInferRequest], Context], AsyncIterator[pb.ModelStreamInferResponse]]


@dataclass
class V2Server:
    """Serves model `m`, x [-1, -1] of a datatype, answered as y. post and infer say what becomes of a request."""

    post: Callable[[web.Request], Awaitable[web.Response]]
    infer: Callable[[pb.ModelInferRequest, Context], Awaitable[pb.ModelInferResponse]]
    stream: Stream
    datatype: str = "FP32"
    extensions: list[str] = field(default_factory=lambda: ["binary_tensor_data"])
    is_decoupled: bool = False
    posted: list[tuple[web.BaseRequest, bytes]] = field(default_factory=list)
    http_url: str = ""
    grpc_address: str = ""

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens."""
        return Endpoint(http_url=self.http_url, grpc_address=self.grpc_address)


@asynccontextmanager
async def running_v2_server() -> AsyncIterator[V2Server]:
    """On ephemeral ports; both sides answer what is right until a test sets another."""
    server = V2Server(_post, _infer, answer_in_order)
    app = web.Application(client_max_size=1 << 24)
    app.add_routes(_routes(server))
    grpc_server = grpc.aio.server()
    grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, _methods(server)),))
    server.grpc_address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    await grpc_server.start()
    async with TestServer(app) as http:
        server.http_url = f"http://127.0.0.1:{http.port}"
        yield server
    await grpc_server.stop(0)


async def answer_in_order(
    requests: AsyncIterator[pb.ModelInferRequest], _: Context
) -> AsyncIterator[pb.ModelStreamInferResponse]:
    """One response a request, as it comes."""
    async for request in requests:
        yield response_to(request)


def response_to(request: pb.ModelInferRequest, *, is_final: bool = True) -> pb.ModelStreamInferResponse:
    """With output y and the request's id."""
    response = pb.ModelStreamInferResponse(infer_response=_answer(request))
    response.infer_response.parameters["triton_final_response"].bool_param = is_final
    return response


def _answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    answer = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
    answer.outputs.add(name="y", datatype="FP32", shape=[1, 1])
    answer.raw_output_contents.append(b"\0\0\0\0")
    return answer


async def _infer(request: pb.ModelInferRequest, _: Context) -> pb.ModelInferResponse:
    return _answer(request)


async def _post(request: web.Request) -> web.Response:
    if request.path.endswith("/infer"):
        return web.json_response({"model_name": "m", "outputs": []})
    return web.json_response({"results": [{"detections": []}]})


def _routes(server: V2Server) -> list[web.RouteDef]:
    async def identity(_: web.Request) -> web.Response:
        return web.json_response({"name": "small", "version": "1.2", "extensions": server.extensions})

    async def metadata(request: web.Request) -> web.Response:
        if request.match_info["model"] != "m":
            return web.json_response({"error": "unknown model"}, status=404)
        tensor = {"datatype": server.datatype, "shape": [-1, -1]}
        return web.json_response({"name": "m", "inputs": [{"name": "x"} | tensor], "outputs": [{"name": "y"} | tensor]})

    async def index(_: web.Request) -> web.Response:
        return web.json_response([{"name": "m", "state": "READY"}, {"name": "broken", "state": "UNAVAILABLE"}])

    async def post(request: web.Request) -> web.Response:
        server.posted.append((request, await request.read()))
        return await server.post(request)

    return [
        web.get("/v2", identity),
        web.get("/v2/models/{model}", metadata),
        web.post("/v2/repository/index", index),
        web.post("/{tail:.*}", post),
    ]


def _methods(server: V2Server) -> dict[str, grpc.RpcMethodHandler]:
    async def metadata(request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        if request.name != "m":
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        answer = pb.ModelMetadataResponse(name="m")
        answer.inputs.add(name="x", datatype=server.datatype, shape=[-1, -1])
        answer.outputs.add(name="y", datatype=server.datatype, shape=[-1, -1])
        return answer

    async def config(_: pb.ModelConfigRequest, __: Context) -> pb.ModelConfigResponse:
        answer = pb.ModelConfigResponse()
        answer.config.model_transaction_policy.decoupled = server.is_decoupled
        return answer

    async def index(_: pb.RepositoryIndexRequest, __: Context) -> pb.RepositoryIndexResponse:
        answer = pb.RepositoryIndexResponse()
        answer.models.add(name="m", state="READY")
        return answer

    async def infer(request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        return await server.infer(request, context)

    async def stream(
        requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for response in server.stream(requests, context):
            yield response

    unary = {"ModelMetadata": metadata, "ModelConfig": config, "RepositoryIndex": index, "ModelInfer": infer}
    kinds = {
        "ModelMetadata": pb.ModelMetadataRequest,
        "ModelConfig": pb.ModelConfigRequest,
        "RepositoryIndex": pb.RepositoryIndexRequest,
        "ModelInfer": pb.ModelInferRequest,
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(method, kinds[name].FromString, lambda m: m.SerializeToString())
        for name, method in unary.items()
    }
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        stream, pb.ModelInferRequest.FromString, lambda m: m.SerializeToString()
    )
    return handlers


async def for_ever() -> None:
    """Until it is cancelled."""
    await asyncio.Event().wait()
