"""The two engines that are asked the same, and their answers made comparable."""

import asyncio
import contextlib
import gzip
import json
import re
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf import json_format
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.model_health import KnownModel
from penstock.engines.triton.client import TritonEngine
from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway.batch_flow import BatchFlow, RequestContext
from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.options import BatchOptions
from penstock.protocol.call import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall, InferHead
from penstock.protocol.engine import Relay
from penstock.protocol.errors import ModelNotReady
from penstock.protocol.inference import BatchOwner
from tests.engines.triton_of_onnx_models import RunningTriton

Json: TypeAlias = dict[str, Any]
HEADERS_THAT_MATTER = (b"content-type", b"inference-header-content-length", b"content-encoding")
MODEL_IN_PATH = re.compile(rb"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")
RESPONSES: dict[str, type[Message]] = {
    "ModelInfer": service_pb2.ModelInferResponse,
    "ServerLive": service_pb2.ServerLiveResponse,
    "ServerReady": service_pb2.ServerReadyResponse,
    "ServerMetadata": service_pb2.ServerMetadataResponse,
    "ModelReady": service_pb2.ModelReadyResponse,
    "ModelMetadata": service_pb2.ModelMetadataResponse,
    "ModelConfig": service_pb2.ModelConfigResponse,
    "ModelStatistics": service_pb2.ModelStatisticsResponse,
    "RepositoryIndex": service_pb2.RepositoryIndexResponse,
    "RepositoryModelLoad": service_pb2.RepositoryModelLoadResponse,
    "RepositoryModelUnload": service_pb2.RepositoryModelUnloadResponse,
}


@dataclass(frozen=True)
class Engines:
    """Over the same repository, with every model loaded that can be."""

    triton: Relay
    embedded: Relay
    batched: "Batched"


class Batched:
    """Inferences through the gateway's own batches, into the Triton: of every model that has a batch dimension."""

    def __init__(self, triton: TritonEngine, watch: EngineWatch) -> None:
        """watch: has found the models."""
        self.pool = BatcherPool(triton, lambda name: self._options(watch.models.get(name)))
        self.flow = BatchFlow(
            batching=self.pool,
            relay=triton,
            watch=watch,
            max_rows_of=lambda config: config.max_batch_size,
            max_body_bytes=1 << 20,
        )

    def takes(self, model_name: str) -> bool:
        """Whether the model's inferences go through batches."""
        return self.flow.takes(InferHead(model_name))

    async def http(self, call: HttpCall) -> HttpAnswer:
        """As the gateway answers it."""
        found = MODEL_IN_PATH.match(call.target)
        assert found is not None
        head = InferHead(found["model"].decode(), (found["version"] or b"").decode())
        return await self.flow.infer(call, RequestContext(head, "", None))

    async def grpc(self, call: GrpcCall) -> GrpcAnswer:
        """As the gateway answers it."""
        request = service_pb2.ModelInferRequest.FromString(call.message)
        head = InferHead(request.model_name, request.model_version)
        return await self.flow.infer(call, RequestContext(head, "", None))

    @staticmethod
    def _options(known: KnownModel | None) -> BatchOptions | None:
        if known is None or known.config is None or not known.config.max_batch_size:
            return None
        return BatchOptions(owner=BatchOwner.GATEWAY, max_batch_size=known.config.max_batch_size)


@contextlib.asynccontextmanager
async def both_engines(triton: RunningTriton, repository: Path) -> AsyncIterator[Engines]:
    """The running Triton, and the embedded engine in this process."""
    engine = EmbeddedEngine((repository,))
    backend = TritonEngine(http_url=triton.http_url, grpc_address=triton.grpc_address, max_connections=4)
    try:
        watch = EngineWatch(backend, WatchOptions())
        for row in await engine.repository_index():
            with contextlib.suppress(ModelNotReady):
                await engine.load(row.name)
                await watch.find(row.name)
        batched = Batched(backend, watch)
        yield Engines(backend, engine, batched)
        await batched.pool.aclose()
    finally:
        await backend.aclose()
        await engine.aclose()
        await asyncio.sleep(0.05)  # the sockets close in the loop's next turns; Triton waits for those that are open


def comparable_http(answer: HttpAnswer) -> Json:
    """Status, headers that matter, the JSON with each output's bytes in place; outputs sorted by name.

    Triton's Python backend answers in no order; of an error only the text counts, not its content type: Triton's is
    now one, now the other.
    """
    headers = {name.decode(): value.decode() for name, value in answer.headers if name in HEADERS_THAT_MATTER}
    body = _inflated(answer.body, headers.get("content-encoding", ""))
    length = int(headers.get("inference-header-content-length", len(body)))
    if headers.get("content-type", "").startswith("text/event-stream"):
        events = body.removesuffix(b"\n\n").split(b"\n\n")
        content: Any = [_json(event.removeprefix(b"data: ")) for event in events]
    else:
        content = _json(body[:length])
    if isinstance(content, dict) and "outputs" in content and "model_version" in content:
        _place_bytes(content["outputs"], body[length:])
        content["outputs"].sort(key=lambda output: output["name"])
    if answer.status != 200 or not body:
        headers.pop("content-type", None)
    return {"status": answer.status, "headers": headers, "content": content}


def comparable_grpc(method: str, answer: GrpcAnswer) -> Json:
    """Code, details, trailing metadata, and the message as JSON with each output's bytes in place."""
    comparable: Json = {"code": answer.code, "details": answer.details, "trailing": answer.trailing_metadata}
    if answer.code:
        return comparable
    message = RESPONSES[method].FromString(answer.message)
    if isinstance(message, service_pb2.ModelInferResponse):
        contents = list(message.raw_output_contents)
        del message.raw_output_contents[:]
        comparable["content"] = as_json(message)
        for output, raw in zip(comparable["content"]["outputs"], contents, strict=True):
            output["raw"] = raw.hex()
        comparable["content"]["outputs"].sort(key=lambda output: output["name"])
        return comparable
    comparable["content"] = as_json(message)
    return comparable


def as_json(message: Message) -> Json:
    """Every field, defaults too."""
    comparable: Json = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return comparable


def without(json_value: Any, members: tuple[str, ...]) -> Any:
    """The same with the members of these names left out, at any depth."""
    if isinstance(json_value, dict):
        return {name: without(value, members) for name, value in json_value.items() if name not in members}
    return [without(item, members) for item in json_value] if isinstance(json_value, list) else json_value


def _inflated(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(body)
    return zlib.decompress(body) if encoding == "deflate" else body


def _json(text: bytes) -> Any:
    """Not-a-numbers as words, since they equal nothing."""
    return json.loads(text, parse_constant=str) if text else None


def _place_bytes(outputs: list[Json], binary: bytes) -> None:
    for output in outputs:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None:
            output["raw"], binary = binary[:size].hex(), binary[size:]
    assert binary == b"", "bytes that belong to no output"
