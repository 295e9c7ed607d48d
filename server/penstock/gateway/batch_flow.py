"""Inference through the gateway's batcher: bytes to tensors, into a batch, back to bytes."""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.engines.concurrency import CallCoalescer, in_thread
from penstock.engines.model_health import EngineView
from penstock.engines.model_io import RequestRules, raw_tensor, rules_of
from penstock.gateway.batching.explanation import add_explanation, explain_batched, wants_explanation
from penstock.gateway.engine_slots import EngineSlots
from penstock.protocol.call import A, Call, GrpcCall, InferHead
from penstock.protocol.codec import Codec, codec_of
from penstock.protocol.decoded_request import DecodedRequest
from penstock.protocol.engine import ModelConfig, Relay
from penstock.protocol.error_codes import ENGINE_ERRORS
from penstock.protocol.errors import InferenceError, OutOfMemory
from penstock.protocol.grpc_inference import EMPTY_FINAL_RESPONSE
from penstock.protocol.grpc_messages import parsed
from penstock.protocol.inference import Batcher, Datatype, InferRequest, InferResponse, Parameter

MAX_CHECKED_FORMS = 256  # shapes of valid requests cached per model
MODEL_CONFIG = "/inference.GRPCInferenceService/ModelConfig"
# Consumed by the gateway, or about the response's encoding: not sent to the engine, and compatible within a batch.
_CONSUMED = frozenset(("timeout", "priority", "binary_data_output", EMPTY_FINAL_RESPONSE))
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1  # range that gRPC can carry
_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request's head, client (for fair queueing) and deadline."""

    head: InferHead
    client: str
    deadline: float | None


@dataclass(frozen=True, slots=True)
class _ServedModel:
    """A model version as the engine describes it. known: the config it was read for. good: forms of valid requests."""

    known: ModelConfig
    message: model_config_pb2.ModelConfig
    rules: RequestRules
    has_strings: bool
    good: set[Hashable] = field(default_factory=set)

    def check(self, request: InferRequest) -> None:
        """Raises InvalidRequest. Requests with the names, shapes and sizes of a valid one are not checked again."""
        form = request.outputs, *[(item.name, item.datatype, item.shape, item.data.nbytes) for item in request.inputs]
        if form not in self.good:
            self.rules.check(request)
            if len(self.good) >= MAX_CHECKED_FORMS:
                self.good.clear()
            self.good.add(form)
        if self.has_strings:
            self.rules.check_strings(request)


@dataclass(frozen=True, slots=True)
class _BatchEntry:
    """A request as part of a batch, with its decoded form."""

    ask: DecodedRequest
    request: InferRequest
    priority: int


class BatchFlow:
    """Inferences of models whose batches the gateway forms.

    Requests that cannot be batched are relayed alone: shared memory, sequences, classes, no inputs, parameters that
    gRPC cannot carry, or unknown versions. So are invalid requests, for the engine's own error message.
    """

    def __init__(
        self,
        *,
        batching: Batcher,
        relay: Relay,
        watch: EngineView,
        max_rows_of: Callable[[ModelConfig], int],
        max_body_bytes: int,
        turns: EngineSlots | None = None,
    ) -> None:
        """max_rows_of: maximum rows in one request of a model. turns: for requests that are relayed alone."""
        self.batching = batching
        self._relay = relay
        self._turns = turns or EngineSlots(relay, watch)
        self._watch = watch
        self._max_rows_of = max_rows_of
        self._max_body_bytes = max_body_bytes
        self._served: dict[tuple[str, str], _ServedModel] = {}
        self._asks: CallCoalescer[tuple[str, str, int], _ServedModel | None] = CallCoalescer()

    def takes(self, head: InferHead) -> bool:
        """Whether the request may be batched, as far as its head shows."""
        return not head.regions and self.batching.owns(head.model_name)

    async def infer(self, call: Call[A], context: RequestContext) -> A:
        """See Relay.send. Raises InferenceError for errors that are not the engine's response."""
        codec = codec_of(call)
        entry = await self._batch_entry(call, codec, context)
        if entry is None:
            return await self._turns.send(call, context.head, context.client, context.deadline)
        try:
            response = await self.batching.infer(entry.request, client=context.client, priority=entry.priority)
            answer = await in_thread(_size_bytes(response), codec.encode, response, entry.ask, call)
            if response.explanation is None or not wants_explanation(call):
                return answer
            return add_explanation(answer, explain_batched(response.explanation))
        except OutOfMemory:
            raise  # the gateway formed the batch, and makes the next ones smaller
        except ENGINE_ERRORS as error:
            return codec.encode_error(error)

    async def tensors(self, request: InferRequest, context: RequestContext, priority: int) -> InferResponse | None:
        """Batched inference on tensors; None if it must be relayed alone. Raises InferenceError."""
        served = await self._find(context)
        if served is None or not request.inputs or not _are_mergeable(request.parameters):
            return None
        if request.parameters:
            request = replace(request, parameters=_for_the_engine(request.parameters))
        served.check(request)
        return await self.batching.infer(request, client=context.client, priority=priority)

    async def _batch_entry(self, call: Call[A], codec: Codec[A], context: RequestContext) -> _BatchEntry | None:
        """The call as part of a batch; None if it must be relayed alone."""
        served = await self._find(context)
        if served is None:
            return None
        try:
            size_bytes = codec.parsed_bytes(call)
            ask = await in_thread(size_bytes, codec.decode, call, served.rules.model_name, self._max_body_bytes)
            if ask.raw is not None:
                ask = replace(ask, inputs=(raw_tensor(ask.raw, served.message),))
            if not _is_mergeable(ask):
                return None
            request = _request(ask, context)
            served.check(request)
        except ENGINE_ERRORS:
            return None
        priority = ask.parameters.get("priority", 0)
        return _BatchEntry(ask, request, priority if isinstance(priority, int) else 0)

    async def _find(self, context: RequestContext) -> _ServedModel | None:
        """The model version as the engine describes it; None if the engine rejects it."""
        head = context.head
        known = self._watch.models.get(head.model_name)
        if known is None or known.config is None:
            return None
        served = self._served.get((head.model_name, head.model_version))
        if served is None or served.known is not known.config:
            if not _is_plain(head.model_version):
                return None
            question = partial(self._ask, head.model_name, head.model_version, known.config)
            key = head.model_name, head.model_version, id(known.config)  # unique: the call keeps the config alive
            timeout_s = None if context.deadline is None else context.deadline - time.monotonic()
            served = await self._asks.ask(key, question, timeout_s=timeout_s)
        return served

    async def _ask(self, name: str, version: str, config: ModelConfig) -> _ServedModel | None:
        """Reads and stores the description. It has no deadline, but is cancelled when no client waits for it."""
        served = await self._described(name, version, config)
        if served is not None:
            self._served[name, version] = served
        return served

    async def _described(self, name: str, version: str, config: ModelConfig) -> _ServedModel | None:
        question = service_pb2.ModelConfigRequest(name=name, version=version)
        call = GrpcCall(MODEL_CONFIG, question.SerializeToString())
        answer = await self._relay.send(call, deadline=None)
        if answer.code:
            return None
        message = parsed(service_pb2.ModelConfigResponse, answer.message).config
        try:
            rules = rules_of(message)
        except InferenceError:
            return None
        if rules.max_batch_size < 1:
            return None
        has_strings = any(rule.datatype is Datatype.BYTES for rule in rules.inputs.values())
        return _ServedModel(config, message, replace(rules, max_batch_size=self._max_rows_of(config)), has_strings)


def _request(ask: DecodedRequest, context: RequestContext) -> InferRequest:
    head = context.head
    return InferRequest(
        head.model_name,
        ask.inputs,
        head.model_version,
        ask.id,
        tuple([output.name for output in ask.outputs]),
        _for_the_engine(ask.parameters),
        context.deadline,
    )


def _is_plain(version: str) -> bool:
    """Whether the version is in canonical form; the engine accepts 01 and 1x for 1, too."""
    return not version or (version.isascii() and version.isdigit() and (version[0] != "0" or version == "0"))


def _is_mergeable(ask: DecodedRequest) -> bool:
    """False for shared memory, classes, sequences and parameters that Triton cannot carry."""
    if ask.shared or not ask.inputs or any(output.classes or output.region is not None for output in ask.outputs):
        return False
    return _are_mergeable(ask.parameters)


def _are_mergeable(parameters: Mapping[str, Parameter]) -> bool:
    if not parameters:
        return True
    if any(parameters.get(name) for name in _SEQUENCE_PARAMETERS) or "\0" in "".join(parameters):
        return False
    return all(not isinstance(value, int) or _MIN_INT64 <= value <= _MAX_INT64 for value in parameters.values())


def _for_the_engine(parameters: Mapping[str, Parameter]) -> Mapping[str, Parameter]:
    if not parameters:
        return parameters
    return {
        name: value for name, value in parameters.items() if name not in _CONSUMED and name not in _SEQUENCE_PARAMETERS
    }


def _size_bytes(response: InferResponse) -> int:
    return sum([tensor.data.nbytes for tensor in response.outputs])
