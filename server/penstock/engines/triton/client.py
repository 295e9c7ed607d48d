"""A Triton Inference Server as an engine, over its HTTP and gRPC ports."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import grpc
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.engines.call_options import CallTimeouts, EngineHeaders, RetryBudget
from penstock.engines.config_pbtxt import config_from_proto
from penstock.engines.embedded.repository import ModelFolder, chosen_versions, read_config, scan
from penstock.engines.failures import SHARED_MEMORY_FULL, means_out_of_memory, means_shared_memory_full
from penstock.engines.relayed_calls import LOAD_METHOD, load_over_grpc, to_http_answer
from penstock.engines.triton.grpc_client import TritonGrpcClient
from penstock.engines.triton.http_client import TritonHttpClient, parse_engine_url
from penstock.protocol.call import A, Answer, Call, GrpcAnswer, GrpcCall, GrpcMetadata, HttpAnswer, HttpCall, HttpStream
from penstock.protocol.engine import GrpcStream, ModelConfig, ModelMetadata, ModelState
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    ModelNotReady,
    OutOfMemory,
    reason_line,
)
from penstock.protocol.grpc_messages import decode_index, decode_metadata, decode_response, encode_request, parsed
from penstock.protocol.inference import InferRequest, InferResponse
from penstock.protocol.request_checks import is_version

METRICS_CONNECTIONS = 2
REGION_UNKNOWN = "Unable to find shared memory region"  # Triton's text
_FAILED = (500, grpc.StatusCode.INTERNAL.value[0])


class TritonEngine:
    """A Triton as engine. Create it inside the running loop; `async with`, or aclose(), ends it."""

    def __init__(  # noqa: PLR0913 - three addresses and their clients' options
        self,
        *,
        http_url: str,  # http://, https:// (TLS on both ports) or unix://
        grpc_address: str,  # host:port or unix:/path
        max_connections: int,  # HTTP; gRPC shares one
        metrics_url: str | None = None,  # /metrics by default; None without metrics
        timeouts: CallTimeouts | None = None,
        budget: RetryBudget | None = None,
        headers: EngineHeaders | None = None,
        finishes: bool = True,  # see TritonHttpClient
    ) -> None:
        self._timeouts = timeouts or CallTimeouts()
        budget = budget or RetryBudget()
        origin = parse_engine_url(http_url)
        self._grpc = TritonGrpcClient(
            grpc_address, is_tls=origin.is_tls, timeouts=self._timeouts, budget=budget, headers=headers
        )
        self._http = TritonHttpClient(
            origin,
            max_connections=max_connections,
            timeouts=self._timeouts,
            budget=budget,
            headers=headers,
            finishes=finishes,
        )
        self._regions: dict[str, Callable[[], None]] = {}
        self._metrics: TritonHttpClient | None = None
        if metrics_url is not None:
            page = parse_engine_url(metrics_url)
            self._metrics = TritonHttpClient(
                replace(page, base_path=b""),
                max_connections=METRICS_CONNECTIONS,
                timeouts=self._timeouts,
                headers=headers,
            )
            self._metrics_call = HttpCall("GET", page.base_path or b"/metrics", (), b"")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes all connections; calls in flight fail."""
        await self._grpc.aclose()
        await self._http.aclose()
        if self._metrics is not None:
            await self._metrics.aclose()

    # Relay

    async def send(self, call: Call[A], *, deadline: float | None) -> A:
        answer: Answer
        if isinstance(call, HttpCall):
            answer = await self._send_http(call, deadline)
            error_text = answer.body.decode("utf-8", "replace") if answer.status >= 400 else ""
        else:
            answer = await self._send_grpc(cast(GrpcCall, call), deadline)
            error_text = answer.details if answer.code else ""
        if error_text and means_shared_memory_full(error_text):
            raise OutOfMemory(SHARED_MEMORY_FULL)
        if answer.status_code in _FAILED and means_out_of_memory(error_text):
            raise OutOfMemory(reason_line(error_text.removeprefix('{"error":"').removesuffix('"}')))
        return cast(A, answer)

    async def _send_http(self, call: HttpCall, deadline: float | None) -> HttpAnswer:
        return await self._http.relay(call, deadline=deadline)

    async def _send_grpc(self, call: GrpcCall, deadline: float | None) -> GrpcAnswer:
        if call.method == LOAD_METHOD:
            call = await self._load_call(call)
        return await self._grpc.relay(call, deadline=deadline)

    async def stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        return await self._http.stream(call, deadline=deadline)

    async def open_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> GrpcStream:
        return self._grpc.open_stream(method, metadata, deadline=deadline)

    # Engine

    async def infer(self, request: InferRequest) -> InferResponse:
        started = time.monotonic()
        try:
            answer = await self._infer(request)
        except EngineFailed as error:
            version = f" version {request.model_version}" if request.model_version else ""
            raise type(error)(f"model {request.model_name!r}{version} failed: {error}") from error
        return decode_response(answer, request, time.monotonic() - started)

    async def _infer(self, request: InferRequest) -> bytes:
        """Sent again, with all bytes, if the engine does not know a region, because then it has not run."""
        regions = self._regions
        try:
            return await self._ask_infer(request, encode_request(request, regions))
        except InferenceError as error:
            named = {tensor.place.region for tensor in request.inputs if tensor.place is not None}
            if not named or REGION_UNKNOWN not in error.message:
                raise
            for name in named:  # another call may have handled it first
                if tell := regions.pop(name, None):
                    tell()
        return await self._ask_infer(request, encode_request(request))

    async def _ask_infer(self, request: InferRequest, message: bytes) -> bytes:
        return await self._grpc.ask(
            "ModelInfer",
            message,
            deadline=request.deadline,
            max_wait_s=self._timeouts.call_s,
            metadata=request.metadata,
        )

    def use_region(self, name: str, lost: Callable[[], None]) -> None:
        """Inputs in this region are sent by reference until it is dropped. lost: called if the engine has lost it."""
        self._regions[name] = lost

    def drop_region(self, name: str) -> None:
        """Sends inputs in the region by value again."""
        self._regions.pop(name, None)

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata:
        question = service_pb2.ModelMetadataRequest(name=model_name, version=model_version)
        return decode_metadata(await self._ask("ModelMetadata", question.SerializeToString()))

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig:
        question = service_pb2.ModelConfigRequest(name=model_name, version=model_version)
        answer = await self._ask("ModelConfig", question.SerializeToString())
        config: model_config_pb2.ModelConfig = parsed(service_pb2.ModelConfigResponse, answer).config
        return config_from_proto(config)

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        """Without a model, this is ServerLive: Triton's ServerReady is false while any model is broken."""
        try:
            if not model_name:
                answer = await self._ask("ServerLive", b"")
                return bool(parsed(service_pb2.ServerLiveResponse, answer).live)
            question = service_pb2.ModelReadyRequest(name=model_name, version=model_version)
            answer = await self._ask("ModelReady", question.SerializeToString())
            return bool(parsed(service_pb2.ModelReadyResponse, answer).ready)
        except InferenceError:
            return False

    async def repository_index(self) -> list[ModelState]:
        return decode_index(await self._ask("RepositoryIndex", b""))

    async def load(self, model_name: str) -> None:
        question = await self._load_question(model_name)
        try:
            await self._ask("RepositoryModelLoad", question.SerializeToString(), max_wait_s=self._timeouts.load_s)
        except (EngineUnavailable, DeadlineExceeded):
            raise
        except InferenceError as error:
            raise ModelNotReady(
                f"model {model_name!r} cannot be loaded: {_load_reason(str(error), model_name)}"
            ) from error

    async def _load_call(self, call: GrpcCall) -> GrpcCall:
        return call

    async def _load_question(self, model_name: str) -> "service_pb2.RepositoryModelLoadRequest":
        return service_pb2.RepositoryModelLoadRequest(model_name=model_name)

    async def unload(self, model_name: str) -> None:
        question = service_pb2.RepositoryModelUnloadRequest(model_name=model_name)
        await self._ask("RepositoryModelUnload", question.SerializeToString())

    async def metrics(self) -> bytes:
        if self._metrics is None:
            return b""
        try:
            answer = await self._metrics.relay(self._metrics_call, deadline=time.monotonic() + self._timeouts.connect_s)
        except InferenceError:
            return b""
        return answer.body if answer.status == 200 else b""

    async def _ask(self, method: str, message: bytes, *, max_wait_s: float | None = None) -> bytes:
        """A control call. A late answer counts as EngineUnavailable."""
        try:
            return await self._grpc.ask(
                method, message, deadline=None, max_wait_s=max_wait_s or self._timeouts.control_s
            )
        except DeadlineExceeded as error:
            raise EngineUnavailable(f"{method}: {error}") from error


def _load_reason(text: str, model_name: str) -> str:
    """Triton's reason, without parts that our message has already."""
    if "failed to poll from model repository" in text:
        return (
            "it is not in the engine's model repository, or its config.pbtxt is not valid (the engine's log says which)"
        )
    return text.removeprefix(f"load failed for model '{model_name}': ").replace(" is at UNAVAILABLE state", "")


MAX_LABEL_BYTES = 16 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class DiskLoads:
    """Corrects plain loads of the models in our repositories, by the config on disk.

    label_folder: for cleaned label files. has_one_card: the GPUs that a config names are numbers of the machine, and
    Triton has one of them. Triton 2.51 would otherwise serve something else:
    * after a load with a config override, a plain load keeps that override;
    * a folder `2.bak` is read as version 2, without a model file;
    * a label file's byte order mark and carriage returns become part of the labels;
    * the timeouts of calls with pictures are ignored: its queue runs a call although its clients got 504.
    """

    def __init__(self, repositories: Sequence[Path], label_folder: Path, *, has_one_card: bool = False) -> None:
        self._repositories = repositories
        self._has_one_card = has_one_card
        self._label_folder = label_folder

    def config_for(self, model_name: str, *, is_overridden: bool) -> str:
        """The config (JSON) for a plain load; empty if not needed. is_overridden: by an earlier load."""
        folder = scan(self._repositories).get(model_name)
        if folder is None:
            return ""
        try:
            config = read_config(folder)
        except InvalidRequest:
            return ""
        is_corrected = self._clean_labels(folder, config) | _heed_timeouts(config)
        for group in config.instance_group if self._has_one_card else ():
            is_corrected |= bool(group.gpus)
            del group.gpus[:]
        versions = chosen_versions(folder, config)
        if versions and _has_lookalike(folder.path):
            config.version_policy.specific.versions[:] = versions
            is_corrected = True
        if not (is_corrected or is_overridden):
            return ""
        config.name = config.name or model_name
        return json_format.MessageToJson(config, preserving_proto_field_name=True, indent=None)

    def _clean_labels(self, folder: ModelFolder, config: model_config_pb2.ModelConfig) -> bool:
        """Points the config to clean copies of its label files. Paths are relative to the model's folder."""
        is_corrected = False
        for output in config.output:
            if not output.label_filename:
                continue
            labels = _read(folder.path / output.label_filename)
            if not labels.startswith(_BYTE_ORDER_MARK) and b"\r" not in labels:
                continue
            copy = self._label_folder / folder.name / f"{output.name}.txt"
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            copy.write_bytes(b"\n".join(labels.removeprefix(_BYTE_ORDER_MARK).splitlines()) + b"\n")
            output.label_filename = os.path.relpath(copy.resolve(), folder.path.resolve())
            is_corrected = True
        return is_corrected


MAX_QUEUED_US = 600 * 10**6  # a request's timeout can only be shorter than the model's


def _heed_timeouts(config: model_config_pb2.ModelConfig) -> bool:
    """Makes Triton drop calls with pictures whose timeout passed in its queue, unless the config has a queue policy."""
    if not config.HasField("dynamic_batching") or "image-decoder" not in config.parameters:
        return False
    batcher, decoder = config.dynamic_batching, config.parameters["image-decoder"].string_value
    if decoder.strip().lower() not in ("engine", "1") or batcher.HasField("default_queue_policy"):
        return False
    batcher.default_queue_policy.default_timeout_microseconds = MAX_QUEUED_US
    batcher.default_queue_policy.allow_timeout_override = True  # the action is REJECT
    return True


def _has_lookalike(path: Path) -> bool:
    """Whether a folder that is not a version starts with digits: Triton would read it as a version."""
    return any(
        not is_version(entry.name) and entry.name[:1].isdecimal() and entry.is_dir() for entry in os.scandir(path)
    )


def _read(path: Path) -> bytes:
    """Empty if it cannot be read or is too large; Triton then reports the error."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_LABEL_BYTES + 1)
    except OSError:
        return b""
    return content if len(content) <= MAX_LABEL_BYTES else b""


class SupervisedTriton(TritonEngine):
    """The Triton that the stack started. HTTP loads go over gRPC, too; plain loads serve the files on disk."""

    def __init__(  # noqa: PLR0913 - TritonEngine's, and the disk
        self,
        *,
        http_url: str,
        grpc_address: str,
        max_connections: int,
        metrics_url: str | None = None,
        timeouts: CallTimeouts | None = None,
        budget: RetryBudget | None = None,
        disk: DiskLoads | None = None,  # None: send every load unchanged
    ) -> None:
        super().__init__(
            http_url=http_url,
            grpc_address=grpc_address,
            max_connections=max_connections,
            metrics_url=metrics_url,
            timeouts=timeouts,
            budget=budget,
        )
        self._disk = disk
        self._overridden: set[str] = set()

    async def _send_http(self, call: HttpCall, deadline: float | None) -> HttpAnswer:
        if (load := load_over_grpc(call)) is not None:
            return to_http_answer(await self._send_grpc(load, deadline))
        return await super()._send_http(call, deadline)

    async def _load_call(self, call: GrpcCall) -> GrpcCall:
        question = service_pb2.RepositoryModelLoadRequest.FromString(call.message)
        if "config" in question.parameters:
            self._overridden.add(question.model_name)
        if question.parameters:
            return call
        question = await self._load_question(question.model_name)
        return GrpcCall(call.method, question.SerializeToString(), call.metadata)

    async def _load_question(self, model_name: str) -> "service_pb2.RepositoryModelLoadRequest":
        question = await super()._load_question(model_name)
        if self._disk is None:
            return question
        is_overridden = model_name in self._overridden
        if config := await asyncio.to_thread(self._disk.config_for, model_name, is_overridden=is_overridden):
            question.parameters["config"].string_param = config
        return question
