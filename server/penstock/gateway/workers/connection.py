"""Messages between the core and its workers and client processes: length-prefixed MessagePack over Unix sockets."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar, cast

import msgspec

from penstock.engines.model_health import KnownModel
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.workers.slab import SlabPart
from penstock.logs import get_logger
from penstock.protocol.cancellation import CancelStage, PendingStage
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import InferRequest, InferResponse

PROTOCOL = 4  # increment it when messages change: client processes may have another version


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the messages. number: the sender's number of a request, repeated in the answer."""


class WorkerHello(Message, frozen=True):
    """Worker → core, first message: the worker's number."""

    index: int


class ClientHello(Message, frozen=True):
    """Client process → core, first message: the program's name, for the log."""

    name: str


class Infer(Message, frozen=True):
    """Worker → core: an inference. client, priority: see Batcher.infer. An input with a place has no data."""

    number: int
    request: InferRequest
    client: str
    priority: int


class CancelInfer(Message, frozen=True):
    """Worker → core: the answer is no longer needed."""

    number: int


class FindModel(Message, frozen=True):
    """Worker → core: request the model's config."""

    number: int
    model_name: str


class ModelsServed(Message, frozen=True):
    """Worker → core: inferences of these models succeeded."""

    model_names: tuple[str, ...]


class EngineSuspected(Message, frozen=True):
    """Worker → core: a call could not reach the engine."""


class CallLate(Message, frozen=True):
    """Worker → core: a call ended after waited_s without a response. is_waiting: it has not ended."""

    model_name: str
    waited_s: float
    is_waiting: bool = False


class CallFailed(Message, frozen=True):
    """Worker → core: a valid inference failed in the engine."""

    model_name: str


class QueuesReported(Message, frozen=True):
    """Worker → core: its own queues, by model. It replaces the former report."""

    queues: dict[str, QueueStatistics]


class SyncDone(Message, frozen=True):
    """Worker → core: everything sent before that `Sync` was processed."""

    number: int


class CoreState(Message, frozen=True):
    """Core → worker: state of the engine. owned: batched by the gateway. apart: called by the core only.
    left_out: see EngineView. homes: see ReplicaRouter."""

    is_up: bool
    reason: str
    generation: int
    models: tuple[KnownModel, ...]
    owned: tuple[str, ...]
    apart: tuple[str, ...] = ()
    left_out: dict[str, str] = {}
    homes: dict[str, tuple[str, ...]] = {}


class Sync(Message, frozen=True):
    """Core → worker: reply with SyncDone after processing everything sent before."""

    number: int


class CallsCut(Message, frozen=True):
    """Core → worker: calls in the engine will not be answered any more."""

    reason: str


class SlabPartGranted(Message, frozen=True):
    """Core → worker: use this part of the slab from now on, instead of an earlier one."""

    lent: SlabPart


class ClientRejected(Message, frozen=True):
    """Core → client process, last message: why it is not served."""

    reason: str


class Inferred(Message, frozen=True):
    """Core → worker: answer to an Infer."""

    number: int
    response: InferResponse


class ModelFound(Message, frozen=True):
    """Core → worker: answer to a FindModel."""

    number: int
    config: ModelConfig


class CancelledAt(Message, frozen=True):
    """Core → worker: an Infer was cancelled at this stage."""

    number: int
    where: CancelStage


class RequestFailed(Message, frozen=True):
    """Core → worker: error of an Infer or FindModel. kind: the error's class. retry_after_s: None if it has none."""

    number: int
    kind: str
    message: str
    reason: str
    retry_after_s: float | None


ToCore = (
    WorkerHello
    | ClientHello
    | Infer
    | CancelInfer
    | FindModel
    | ModelsServed
    | CallFailed
    | EngineSuspected
    | CallLate
    | QueuesReported
    | SyncDone
)
ToClient = (
    CoreState | CallsCut | SlabPartGranted | ClientRejected | Inferred | ModelFound | RequestFailed | CancelledAt | Sync
)


def failed_message(number: int, error: InferenceError) -> RequestFailed:
    """The error as a message."""
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    return RequestFailed(number, type(error).__name__, error.message, error.reason, retry_after_s)


def error_from(record: RequestFailed) -> InferenceError:
    """The error in its own class; an InferenceError if the class is unknown."""
    kind = _kind_of(record.kind)
    error = kind.__new__(kind)
    InferenceError.__init__(error, record.message)
    if record.reason != kind.reason:
        error.reason = record.reason
    if record.retry_after_s is not None:
        vars(error)["retry_after_s"] = record.retry_after_s
    return error


@cache
def _kind_of(name: str) -> type[InferenceError]:
    """The InferenceError class of this name."""
    todo = [InferenceError]
    while todo:
        kind = todo.pop()
        if kind.__name__ == name:
            return kind
        todo += kind.__subclasses__()
    return InferenceError


SOCKET_NAME = "core-batch.sock"
CLOSE_GRACE_S = 1.0  # for the peer to read the last messages
_LENGTH_BYTES = 4
UNLIMITED_BYTES = 1 << 32
_ENCODER = msgspec.msgpack.Encoder()

log = get_logger("local")
In = TypeVar("In", bound=Message)


class MessageConnection(asyncio.Protocol, Generic[In]):
    """on_message: called with each message, in order, and this end. on_lost: called once, when the connection ends.

    Tensors are views into the received bytes. A message above max_record_bytes closes the connection. Messages of one
    loop iteration are written together, to save system calls.
    """

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[In]",
        on_message: "Callable[[MessageConnection[In], In], None]",
        on_lost: "Callable[[MessageConnection[In]], None]",
    ) -> None:
        self._decoder = decoder
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._gathered: list[bytes] = []  # written at the end of this loop iteration
        self._gathered_bytes = 0
        self._is_ended = False
        self.max_record_bytes = UNLIMITED_BYTES

    @property
    def is_open(self) -> bool:
        """Whether the peer is connected, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the peer has not received yet; 0 if it is gone."""
        if self._transport is None:
            return 0
        return self._transport.get_write_buffer_size() + self._gathered_bytes

    def send(self, record: Message) -> None:
        """Never blocks. Drops the message if the peer is gone."""
        if self._transport is None or self._transport.is_closing():
            return
        encoded = _ENCODER.encode(record)
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._write_gathered)
        self._gathered += (len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded)
        self._gathered_bytes += _LENGTH_BYTES + len(encoded)

    def close(self) -> None:
        """Aborts the connection, and drops messages of this loop iteration."""
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Stops reading, and closes the connection when everything sent is read, or after CLOSE_GRACE_S."""
        self._is_ended = True
        if self._transport is not None:
            self._write_gathered()
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._transport.abort)

    def _write_gathered(self) -> None:
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if gathered and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(gathered)

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        received = self._received
        if received:
            received += data
            position = self._take_all(received)
            if self._is_ended:
                received.clear()
            elif position:
                del received[:position]
            return
        position = self._take_all(data)  # the usual case: whole messages, nothing buffered
        if position < len(data) and not self._is_ended:
            received += memoryview(data)[position:]

    def _take_all(self, received: bytes | bytearray) -> int:
        """Processes all whole messages. Returns where the first incomplete one begins."""
        position, size = 0, len(received)
        while size - position >= _LENGTH_BYTES and not self._is_ended:
            begin = position + _LENGTH_BYTES
            end = begin + int.from_bytes(received[position:begin], "little")
            if end - begin > self.max_record_bytes:
                self._refuse(f"it has {end - begin} bytes (limit {self.max_record_bytes})")
                break
            if size < end:
                break
            position = end
            self._take(received[begin:end] if isinstance(received, bytes) else bytes(memoryview(received)[begin:end]))
        return position

    def connection_lost(self, error: Exception | None) -> None:
        self._received.clear()
        self._gathered, self._gathered_bytes = [], 0
        self._on_lost(self)

    def _take(self, encoded: bytes) -> None:
        try:
            record = self._decoder.decode(encoded)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: invalid UTF-8
            self._refuse(str(error))
            return
        self._on_message(self, record)

    def _refuse(self, why: str) -> None:
        log.error("invalid message on the batch socket; closing the connection", error=why)
        self._is_ended = True
        self.close()


CANCELLATION_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class _PendingCancellation:
    """otherwise: the stage if the core does not answer until then (monotonic seconds)."""

    later: PendingStage
    otherwise: CancelStage
    until: float


class PendingCancellations:
    """Cancellations that the core has not confirmed. Each is resolved once. Sans-IO: `now` in monotonic seconds."""

    def __init__(self) -> None:
        self._waiting: dict[int, _PendingCancellation] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, number: int, otherwise: CancelStage, now: float) -> PendingStage:
        """Adds a cancellation that was sent to the core."""
        later = PendingStage()
        self._waiting[number] = _PendingCancellation(later, otherwise, now + CANCELLATION_TIMEOUT_S)
        return later

    def tell(self, number: int, where: CancelStage | None = None) -> None:
        """Resolves it by the core's answer. where: None if the inference ended before the cancellation arrived."""
        departure = self._waiting.pop(number, None)
        if departure is not None:
            departure.later.tell(where or departure.otherwise)

    def expire(self, now: float) -> None:
        """Resolves those that the core did not answer in time."""
        for number in [number for number, departure in self._waiting.items() if now >= departure.until]:
            self.tell(number)

    def lose(self) -> None:
        """Resolves all, because the core is gone."""
        for number in list(self._waiting):
            self.tell(number)
