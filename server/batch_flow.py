"""Inferences of the models whose batches the gateway forms: bytes to tensors, into a batch, and back to bytes."""

import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from tritonclient.grpc import model_config_pb2, service_pb2

from server.backends.engine_view import EngineView
from server.backends.shared_asks import SharedAsks
from server.backends.triton_messages import parsed
from server.backends.wire.asks import InferAsk
from server.backends.wire.errors import ANSWERED, grpc_error, http_error
from server.backends.wire.grpc_messages import EMPTY_FINAL_RESPONSE, encode_response, parsed_request
from server.backends.wire.grpc_messages import read_infer as read_grpc
from server.backends.wire.http_raw import raw_tensor
from server.backends.wire.http_request import header_length_of
from server.backends.wire.http_request import read_infer as read_http
from server.backends.wire.http_response import accepted_encoding, infer_answer
from server.backends.wire.threads import in_thread, is_short
from server.backends.wire.validation import RequestRules, rules_of
from server.batching.explanation import explained
from server.batching.told import asks_grpc, asks_http, told_grpc, told_http
from server.core.backend import Relay
from server.core.batching import Batching
from server.core.compression import inflate
from server.core.errors import InferenceError, OutOfMemory
from server.core.infer import InferRequest, InferResponse, Parameter
from server.core.model import ModelConfig
from server.core.relay import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall, InferHead
from server.core.tensor import Datatype
from server.engine_turns import EngineTurns

C = TypeVar("C", HttpCall, GrpcCall)
MAX_FORMS = 256  # kept of a model's good requests
MODEL_CONFIG = "/inference.GRPCInferenceService/ModelConfig"
# Said for the gateway, or of the answer's form: they go no further, and part no batch.
_CONSUMED = frozenset(("timeout", "priority", "binary_data_output", EMPTY_FINAL_RESPONSE))
_LEAST, _GREATEST = -(2**63), 2**63 - 1  # that gRPC has a number for
_OF_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(frozen=True, slots=True)
class Passenger:
    """Of whom a request is, and how long it may take. client: whom the queue is fair to."""

    head: InferHead
    client: str
    deadline: float | None


@dataclass(frozen=True, slots=True)
class _Served:
    """A version of a model, as the engine describes it. known: the config that it was asked for.

    good: forms of requests that were found good.
    """

    known: ModelConfig
    message: model_config_pb2.ModelConfig
    rules: RequestRules
    has_strings: bool
    good: set[Hashable] = field(default_factory=set)

    def check(self, request: InferRequest) -> None:
        """Raises InvalidRequest. What has names, shapes and sizes like one before it is not looked at again."""
        form = request.outputs, *[(item.name, item.datatype, item.shape, item.data.nbytes) for item in request.inputs]
        if form not in self.good:
            self.rules.check(request)
            if len(self.good) >= MAX_FORMS:
                self.good.clear()
            self.good.add(form)
        if self.has_strings:
            self.rules.check_strings(request)


@dataclass(frozen=True, slots=True)
class _Ride:
    """A request as a batch takes it, and in what form it was asked for."""

    ask: InferAsk
    request: InferRequest
    priority: int


class BatchFlow:
    """What every inference over tensors passes whose model the gateway owns.

    A request that the gateway cannot answer as the engine would is relayed alone: one that stands in shared memory,
    is part of a sequence, wants classes, has no inputs, or a parameter that a call of ours cannot hold, or is for a
    version that the engine does not describe or that is spelled oddly. So is one that is wrong: it is kept out of the
    batches, and the engine refuses it in its own words.
    """

    def __init__(
        self,
        *,
        batching: Batching,
        relay: Relay,
        watch: EngineView,
        max_rows_of: Callable[[ModelConfig], int],
        max_body_bytes: int,
        turns: EngineTurns | None = None,
    ) -> None:
        """max_rows_of: maximum rows in one request of that model. turns: for requests that are relayed alone.

        max_body_bytes: of a compressed body, once decompressed.
        """
        self.batching = batching
        self._relay = relay
        self._turns = turns or EngineTurns(relay, watch)
        self._watch = watch
        self._max_rows_of = max_rows_of
        self._max_body_bytes = max_body_bytes
        self._served: dict[tuple[str, str], _Served] = {}
        self._asks: SharedAsks[tuple[str, str, int], _Served | None] = SharedAsks()

    def takes(self, head: InferHead) -> bool:
        """Whether the request may be part of a batch, as far as its head says."""
        return not head.regions and self.batching.owns(head.model_name)

    async def http(self, call: HttpCall, passenger: Passenger) -> HttpAnswer:
        """See Relay.http. Raises of the InferenceError tree what is nobody's answer."""
        ride = await self._ride(call, passenger, self._read_http)
        if ride is None:
            return await self._turns.http(call, passenger.head, passenger.client, passenger.deadline)
        try:
            response = await self.batching.infer(ride.request, client=passenger.client, priority=ride.priority)
            encoding = accepted_encoding(_header(call, b"accept-encoding"))
            answer = await in_thread(_size_bytes(response), infer_answer, response, ride.ask, encoding)
            if response.explanation is None or not asks_http(call):
                return answer
            return told_http(answer, explained(response.explanation))
        except OutOfMemory:
            raise  # the gateway's own word: it made the batch, and makes the next ones smaller
        except ANSWERED as error:
            return http_error(error)

    async def grpc(self, call: GrpcCall, passenger: Passenger) -> GrpcAnswer:
        """See Relay.grpc. Raises of the InferenceError tree what is nobody's answer."""
        ride = await self._ride(call, passenger, self._read_grpc)
        if ride is None:
            return await self._turns.grpc(call, passenger.head, passenger.client, passenger.deadline)
        try:
            response = await self.batching.infer(ride.request, client=passenger.client, priority=ride.priority)
            size_bytes = _size_bytes(response)
            is_quick = is_short(size_bytes)
            text = encode_response(response) if is_quick else await in_thread(size_bytes, encode_response, response)
            answer = GrpcAnswer(0, text)
            if response.explanation is None or not asks_grpc(call):
                return answer
            return told_grpc(answer, explained(response.explanation))
        except OutOfMemory:
            raise
        except ANSWERED as error:
            return grpc_error(error)

    async def tensors(self, request: InferRequest, passenger: Passenger, priority: int) -> InferResponse | None:
        """Of who has tensors and wants tensors; None for a request that the engine is to be asked alone.

        Its deadline is the passenger's. Raises of the InferenceError tree, InvalidRequest for what the model does not
        take: it comes into no batch.
        """
        served = await self._find(passenger)
        if served is None or not request.inputs or not _are_mergeable(request.parameters):
            return None
        if request.parameters:
            request = replace(request, parameters=_for_the_engine(request.parameters))
        served.check(request)
        return await self.batching.infer(request, client=passenger.client, priority=priority)

    async def _ride(
        self, call: C, passenger: Passenger, read: Callable[[C, _Served], Awaitable[InferAsk]]
    ) -> _Ride | None:
        """The call as a batch takes it; None for one that the engine is to be asked alone, or to refuse."""
        served = await self._find(passenger)
        if served is None:
            return None
        try:
            ask = await read(call, served)
            if not _is_mergeable(ask):
                return None
            request = _request(ask, passenger)
            served.check(request)
        except ANSWERED:
            return None
        priority = ask.parameters.get("priority", 0)
        return _Ride(ask, request, priority if isinstance(priority, int) else 0)

    async def _read_http(self, call: HttpCall, served: _Served) -> InferAsk:
        body = call.body
        encoding = _header(call, b"content-encoding").decode("latin-1")
        if encoding:
            body = await in_thread(len(body), inflate, body, encoding, self._max_body_bytes)
        length = header_length_of(_header(call, b"inference-header-content-length") or None)
        size_bytes, name = len(body) if length is None else length, served.rules.model_name
        is_quick = is_short(size_bytes)
        ask = read_http(body, length, name) if is_quick else await in_thread(size_bytes, read_http, body, length, name)
        return ask if ask.raw is None else replace(ask, inputs=(raw_tensor(ask.raw, served.message),))

    async def _read_grpc(self, call: GrpcCall, _: _Served) -> InferAsk:
        size_bytes = len(call.message)
        if is_short(size_bytes):
            return read_grpc(parsed_request(service_pb2.ModelInferRequest, call.message))
        message = await in_thread(size_bytes, parsed_request, service_pb2.ModelInferRequest, call.message)
        return await in_thread(size_bytes, read_grpc, message)

    async def _find(self, passenger: Passenger) -> _Served | None:
        """What the engine says of the model's version; None where it says nothing: it has its own words for that."""
        head = passenger.head
        known = self._watch.models.get(head.model_name)
        if known is None or known.config is None:
            return None
        served = self._served.get((head.model_name, head.model_version))
        if served is None or served.known is not known.config:
            if not _is_plain(head.model_version):
                return None
            question = partial(self._ask, head.model_name, head.model_version, known.config)
            key = head.model_name, head.model_version, id(known.config)  # alive, and so alone with it, until answered
            timeout_s = None if passenger.deadline is None else passenger.deadline - time.monotonic()
            served = await self._asks.ask(key, question, timeout_s=timeout_s)
        return served

    async def _ask(self, name: str, version: str, config: ModelConfig) -> _Served | None:
        """What the engine says, kept where it can be used. Without a deadline: it ends when nobody waits for it."""
        served = await self._described(name, version, config)
        if served is not None:
            self._served[name, version] = served
        return served

    async def _described(self, name: str, version: str, config: ModelConfig) -> _Served | None:
        question = service_pb2.ModelConfigRequest(name=name, version=version)
        call = GrpcCall(MODEL_CONFIG, question.SerializeToString())
        answer = await self._relay.grpc(call, deadline=None)
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
        return _Served(config, message, replace(rules, max_batch_size=self._max_rows_of(config)), has_strings)


def _request(ask: InferAsk, passenger: Passenger) -> InferRequest:
    head = passenger.head
    return InferRequest(
        head.model_name,
        ask.inputs,
        head.model_version,
        ask.id,
        tuple([output.name for output in ask.outputs]),
        _for_the_engine(ask.parameters),
        passenger.deadline,
    )


def _header(call: HttpCall, name: bytes) -> bytes:
    """The first header of that name, in lower case; empty where there is none."""
    for known, value in call.headers:
        if known == name:
            return value
    return b""


def _is_plain(version: str) -> bool:
    """Whether it is spelled in the one way that nothing else stands for; the engine takes 01 and 1x for 1, too."""
    return not version or (version.isascii() and version.isdigit() and (version[0] != "0" or version == "0"))


def _is_mergeable(ask: InferAsk) -> bool:
    """Not what stands in shared memory, wants classes or is of a sequence, nor a parameter that Triton cannot name."""
    if ask.shared or not ask.inputs or any(output.classes or output.region is not None for output in ask.outputs):
        return False
    return _are_mergeable(ask.parameters)


def _are_mergeable(parameters: Mapping[str, Parameter]) -> bool:
    if not parameters:
        return True
    if any(parameters.get(name) for name in _OF_SEQUENCES) or "\0" in "".join(parameters):
        return False
    return all(not isinstance(value, int) or _LEAST <= value <= _GREATEST for value in parameters.values())


def _for_the_engine(parameters: Mapping[str, Parameter]) -> Mapping[str, Parameter]:
    if not parameters:
        return parameters
    return {name: value for name, value in parameters.items() if name not in _CONSUMED and name not in _OF_SEQUENCES}


def _size_bytes(response: InferResponse) -> int:
    return sum([tensor.data.nbytes for tensor in response.outputs])
