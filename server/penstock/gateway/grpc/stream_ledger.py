"""Requests in flight on one stream: matches responses, and decides when a rejection is due. Sans-IO."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tritonclient.grpc import service_pb2

from penstock.protocol.call import InferHead
from penstock.protocol.errors import InferenceError, InvalidRequest
from penstock.protocol.protobuf import LENGTH, VARINT, WireReader

FINAL, EMPTY_FINAL = "triton_final_response", "triton_enable_empty_final_response"
# ModelInferRequest.parameters[EMPTY_FINAL] = true. Appended to a message, it overrides an earlier value.
EMPTY_FINAL_ON: bytes = service_pb2.ModelInferRequest(
    parameters={EMPTY_FINAL: service_pb2.InferParameter(bool_param=True)}
).SerializeToString()

_ERROR, _RESPONSE = 1, 2
_MODEL, _VERSION, _ID, _PARAMETERS, _OUTPUTS, _RAW = 1, 2, 3, 4, 5, 6
_BOOL_PARAM = 1
_REQUEST_MODEL, _REQUEST_ID = 1, 3


@dataclass(slots=True)
class StreamAnswer:
    """Content of a ModelStreamInferResponse. is_final: None if the engine does not set it."""

    error: str = ""
    model_name: str = ""
    model_version: str = ""
    request_id: str = ""
    is_final: bool | None = None
    has_outputs: bool = False

    @property
    def is_last(self) -> bool:
        """Whether its request is done. Engines that do not set is_final answer once."""
        return self.is_final is not False

    @property
    def is_empty_final(self) -> bool:
        """Whether it only ends its request: a decoupled model's message after its last response."""
        return self.is_final is True and not (self.error or self.has_outputs or self.model_version)


def read_stream_answer(message: bytes) -> StreamAnswer:
    """Reads a response. Unreadable parts are left at their defaults, since responses are relayed in any case."""
    answer = StreamAnswer()
    reader = WireReader(message)
    try:
        for number, wire_type, start, end in reader.fields():
            if wire_type != LENGTH:
                continue
            if number == _ERROR:
                answer.error = reader.text(start, end)
            elif number == _RESPONSE:
                _read_response(reader, start, end, answer)
    except InvalidRequest:
        return answer
    return answer


def _read_response(reader: WireReader, start: int, end: int, answer: StreamAnswer) -> None:
    for number, wire_type, first, last in reader.fields(start, end):
        if wire_type != LENGTH:
            continue
        if number == _MODEL:
            answer.model_name = reader.text(first, last)
        elif number == _VERSION:
            answer.model_version = reader.text(first, last)
        elif number == _ID:
            answer.request_id = reader.text(first, last)
        elif number == _PARAMETERS:
            key, value = bool_entry(reader, first, last)
            if key == FINAL:
                answer.is_final = value
        elif number in (_OUTPUTS, _RAW):
            answer.has_outputs = True
            return  # fields are written in order of their numbers


def read_address(message: bytes) -> InferHead:
    """Model and ID of a ModelInferRequest, as far as they are readable, for its rejection."""
    texts = {_REQUEST_MODEL: "", _REQUEST_ID: ""}
    reader = WireReader(message)
    try:
        for number, wire_type, start, end in reader.fields():
            if number in texts and wire_type == LENGTH:
                texts[number] = reader.text(start, end)
    except InvalidRequest:
        pass  # malformed messages were reported before
    return InferHead(texts[_REQUEST_MODEL], request_id=texts[_REQUEST_ID])


def wants_empty_final(message: bytes) -> bool:
    """Whether the ModelInferRequest itself requests the empty final response. Raises InvalidRequest."""
    reader = WireReader(message)
    wanted = False
    for number, wire_type, start, end in reader.fields():
        if number == _PARAMETERS and wire_type == LENGTH:
            key, value = bool_entry(reader, start, end)
            if key == EMPTY_FINAL:
                wanted = bool(value)
    return wanted


def bool_entry(reader: WireReader, start: int, end: int) -> tuple[str, bool | None]:
    """Key and value of an entry of map<string, InferParameter>; None for a value that is no bool_param."""
    key, value = "", None
    for number, wire_type, first, last in reader.fields(start, end):
        if number == 1 and wire_type == LENGTH:
            key = reader.text(first, last)
        elif number == 2 and wire_type == LENGTH:
            for kind, kind_type, bits, _ in reader.fields(first, last):
                if kind == _BOOL_PARAM and kind_type == VARINT:
                    value = bool(bits)
    return key, value


def error_answer(request_id: str, text: str) -> bytes:
    """The response to a rejected request, as Triton forms it: the message, and the request's ID."""
    answer = service_pb2.ModelStreamInferResponse(error_message=text)
    answer.infer_response.id = request_id
    message: bytes = answer.SerializeToString()
    return message


@dataclass(slots=True, eq=False)
class Sent:
    """A request that was sent to the engine. leave: releases its slot; gets the error if it is unanswered, else None.

    is_decoupled: its responses come in any order; others' come in the requests' order. hides_empty_final: the gateway
    requested the empty final response, the client did not.
    """

    model_name: str
    request_id: str
    started: float
    leave: Callable[[BaseException | None], None]
    is_decoupled: bool = False
    hides_empty_final: bool = False
    is_done: bool = False
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that is not sent to the engine."""

    model_name: str
    request_id: str
    started: float
    error: InferenceError


@dataclass(slots=True)
class StreamLedger:
    """The unanswered requests of one stream, at most `window`.

    Responses are matched by ID, equal IDs in the order of their requests. A rejection keeps its position in that order:
    as in Triton, it is due when all earlier requests, except decoupled ones, are answered.
    """

    window: int
    _by_id: dict[str, deque[Sent]] = field(default_factory=dict)
    _in_order: deque[Sent | Rejected] = field(default_factory=deque)
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    @property
    def has_room(self) -> bool:
        """Whether another request may be added."""
        return self._count < self.window

    def send(self, request: Sent) -> None:
        """Adds a request that is sent to the engine."""
        self._count += 1
        self._by_id.setdefault(request.request_id, deque()).append(request)
        if not request.is_decoupled:
            self._in_order.append(request)

    def refuse(self, request: Rejected) -> None:
        """Adds a rejected request, which `due` returns in its turn."""
        self._count += 1
        self._in_order.append(request)

    def answered(self, answer: StreamAnswer) -> Sent | None:
        """The request of this response, or None. The last response removes the request from the ledger."""
        request = self.find(answer)
        if request is None:
            return None
        request.has_failed |= bool(answer.error)
        if answer.is_last:
            self._remove(request)
        else:
            request.is_decoupled = True
        return request

    def due(self) -> list[Rejected]:
        """Removes and returns the rejections that are due."""
        found: list[Rejected] = []
        while self._in_order:
            first = self._in_order[0]
            if isinstance(first, Rejected):
                found.append(first)
                self._count -= 1
            elif not (first.is_done or first.is_decoupled):
                break
            self._in_order.popleft()
        return found

    def abandon(self) -> list[Sent]:
        """Removes and returns, in any order, all requests that will not be answered."""
        left = [request for requests in self._by_id.values() for request in requests]
        self._by_id.clear()
        self._in_order.clear()
        self._count = 0
        return left

    def find(self, answer: StreamAnswer) -> Sent | None:
        """The unfinished request of this response."""
        requests = self._by_id.get(answer.request_id)
        if not requests:
            return None
        if not answer.model_name:
            return requests[0]
        return next((request for request in requests if request.model_name == answer.model_name), requests[0])

    def _remove(self, request: Sent) -> None:
        requests = self._by_id[request.request_id]
        requests.remove(request)
        if not requests:
            del self._by_id[request.request_id]
        request.is_done = True
        self._count -= 1
