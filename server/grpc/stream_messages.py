"""The messages of ModelStreamInfer, read shallowly and, where the gateway itself answers, written."""

from dataclasses import dataclass

from tritonclient.grpc import service_pb2

from server.core.errors import InvalidRequest
from server.core.relay import InferHead
from server.core.wire import LENGTH, VARINT, WireReader

FINAL, EMPTY_FINAL = "triton_final_response", "triton_enable_empty_final_response"
# ModelInferRequest.parameters[EMPTY_FINAL] = true. Behind a message it wins over what stands before it there.
EMPTY_FINAL_ON: bytes = service_pb2.ModelInferRequest(
    parameters={EMPTY_FINAL: service_pb2.InferParameter(bool_param=True)}
).SerializeToString()

_ERROR, _RESPONSE = 1, 2
_MODEL, _VERSION, _ID, _PARAMETERS, _OUTPUTS, _RAW = 1, 2, 3, 4, 5, 6
_BOOL_PARAM = 1
_REQUEST_MODEL, _REQUEST_ID = 1, 3


@dataclass(slots=True)
class StreamAnswer:
    """What a serialised ModelStreamInferResponse tells.

    is_final: what the engine says of it, None where it says nothing. model_name and model_version are empty in an error
    about a request that no model has seen.
    """

    error: str = ""
    model_name: str = ""
    model_version: str = ""
    request_id: str = ""
    is_final: bool | None = None
    has_outputs: bool = False

    @property
    def is_last(self) -> bool:
        """Whether its request is done. Engines that do not say are taken to answer once."""
        return self.is_final is not False

    @property
    def is_empty_final(self) -> bool:
        """Whether it says nothing but that its request is done: of a decoupled model, after its last response."""
        return self.is_final is True and not (self.error or self.has_outputs or self.model_version)


def scan_answer(message: bytes) -> StreamAnswer:
    """Of one answer; what cannot be read is taken as not said: engines' answers are passed on in any case."""
    answer = StreamAnswer()
    reader = WireReader(message)
    try:
        for number, wire_type, start, end in reader.fields():
            if wire_type != LENGTH:
                continue
            if number == _ERROR:
                answer.error = reader.text(start, end)
            elif number == _RESPONSE:
                _scan_response(reader, start, end, answer)
    except InvalidRequest:
        return answer
    return answer


def _scan_response(reader: WireReader, start: int, end: int, answer: StreamAnswer) -> None:
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
            return  # fields are written in their numbers' order


def addressed(message: bytes) -> InferHead:
    """Model and id of a ModelInferRequest, as far as they can be read: for the answer to one that is refused."""
    texts = {_REQUEST_MODEL: "", _REQUEST_ID: ""}
    reader = WireReader(message)
    try:
        for number, wire_type, start, end in reader.fields():
            if number in texts and wire_type == LENGTH:
                texts[number] = reader.text(start, end)
    except InvalidRequest:
        pass  # what is broken has been told
    return InferHead(texts[_REQUEST_MODEL], request_id=texts[_REQUEST_ID])


def wants_empty_final(message: bytes) -> bool:
    """Whether the ModelInferRequest itself asks to be told when it is done. Raises InvalidRequest."""
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


def refusal(request_id: str, text: str) -> bytes:
    """The answer to a request that no model sees, as Triton forms it: the sentence, and the request's id."""
    answer = service_pb2.ModelStreamInferResponse(error_message=text)
    answer.infer_response.id = request_id
    message: bytes = answer.SerializeToString()
    return message
