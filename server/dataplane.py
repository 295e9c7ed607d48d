"""The one plane under every transport: who may pass, what is relayed as bytes, what the gateway computes itself."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from server.access.audit import AuditLog
from server.access.quotas import Quotas
from server.admission import Admission
from server.backends.engine_view import EngineView
from server.backends.model_loads import LoadPolicy
from server.backends.own_sequences import own_grpc, own_http
from server.backends.wire.errors import ANSWERED
from server.batch_flow import BatchFlow, Passenger
from server.batching.declared import DeclaredOptions, misspelt
from server.batching.engine_batches import ask_engine_batches
from server.batching.explanation import Explained, not_formed
from server.batching.options import BatchOptions
from server.batching.page import ModelExplained, explain_engine, explain_queue, with_misspelt
from server.batching.queue import QueueStatistics
from server.batching.told import asks_grpc, asks_http, told_grpc, told_http
from server.core.backend import Backend, GrpcStream, Relay
from server.core.batching import Owner
from server.core.caller import NOBODY, Caller
from server.core.contract import BLOCKED_EXTENSIONS
from server.core.encoded_images import C, EncodedCall, ImageInput
from server.core.errors import (
    BackendFailed,
    BackendUnavailable,
    InferenceError,
    InvalidRequest,
    NotSupported,
    OutOfMemory,
)
from server.core.infer import InferRequest, InferResponse
from server.core.relay import GrpcAnswer, GrpcCall, GrpcMetadata, HttpAnswer, HttpCall, HttpStream, InferHead
from server.core.tensor import Datatype
from server.core.verb import Verb, require_role
from server.engine_turns import EngineTurns
from server.image_flow import ImageFlow, ImageRequest, ImageResponse
from server.metrics import Metrics
from server.passage import Passage
from server.readiness import Readiness, readiness_of
from server.shared_memory.absent import NoSharedMemory
from server.shared_memory.keeper import SharedMemory
from server.tracing.trace import Tracer

__all__ = ["DataPlane", "ImageRequest", "ImageResponse", "Readiness", "Verb"]

T = TypeVar("T")
_Memory = SharedMemory | NoSharedMemory
# Statuses of a relayed call by whether the model succeeded; others are not the model's. Codes: OK; UNKNOWN, INTERNAL.
_END_OF_STATUS, _END_OF_CODE = {200: True, 500: False}, {0: True, 2: False, 13: False}


class DataPlane:
    """Composed by server.main; called by the transports from the event loop's thread."""

    def __init__(
        self,
        *,
        relay: Relay,
        watch: EngineView,
        images: ImageFlow,
        admission: Admission,
        metrics: Metrics,
        quotas: Quotas | None = None,
    ) -> None:
        """quotas: of clients that have one; None without quotas. The composer sets the following, if wanted:

        tracer. options: the operator's batching options and deadlines. required_models: see readiness.
        batches, statistics_of_queues: of the gateway's queues, by model. loads: if clients may load other than ONNX
        models. is_apart: whether a model has an engine process of its own. spread: if other processes serve the same
        models; returns when they know of a load or an unload.
        """
        self._relay, self._watch, self._images, self.admission, self._metrics = relay, watch, images, admission, metrics
        self.turns = images.turns = EngineTurns(relay, watch)
        self._passage = Passage(watch=watch, admission=admission, metrics=metrics, quotas=quotas)
        self.options, self.loads = DeclaredOptions(), LoadPolicy()
        self.required_models: tuple[str, ...] | None = None
        self.batches: BatchFlow | None = None
        self.statistics_of_queues: Callable[[], Mapping[str, QueueStatistics]] = dict
        self.spread: Callable[[], Awaitable[None]] = _nobody_else
        self.tracer: Tracer | None = None
        self.is_apart: Callable[[str], bool] = lambda _: False
        self._is_stopping = False

    def readiness(self) -> Readiness:
        """Whether to send requests here."""
        if self._is_stopping:
            return Readiness(False, "draining: this gateway is about to stop")
        return readiness_of(self._watch, self.required_models)

    def refusals(self) -> Mapping[str, str]:
        """Models that the engine would serve and the gateway does not, each with the reason."""
        return {name: known.reason for name, known in self._watch.models.items() if known.is_withheld}

    def why_withheld(self, model_name: str) -> InferenceError | None:
        """Why the gateway does not serve a model that the engine would serve; None if it is served."""
        known = self._watch.models.get(model_name)
        return None if known is None else known.error

    def not_formed(self, head: InferHead) -> Explained:
        """What a request is told of a batch that the gateway did not form."""
        return not_formed(head.model_name, self.batch_options(head.model_name).owner)

    def batch_options(self, model_name: str) -> BatchOptions:
        """The model's options; the defaults of a model without batching if it is not known here."""
        known = self._watch.models.get(model_name)
        if known is None or known.config is None or known.is_refused:
            return BatchOptions()
        return self.options.of(known.config)

    async def explain_model(self, model_name: str, caller: Caller = NOBODY) -> ModelExplained:
        """How the model's batches are formed, and how that went. Raises ModelNotFound, BackendFailed."""
        require_role(Verb.READ, caller)
        self._passage.require_engine()
        config = await self._watch.find(model_name)
        options, unread = self.options.of(config), misspelt(config)
        if options.owner is Owner.GATEWAY:
            page = explain_queue(model_name, options, self.statistics_of_queues().get(model_name))
            return with_misspelt(page, unread)
        batches = await ask_engine_batches(self._relay, model_name)
        return with_misspelt(explain_engine(model_name, options, batches), unread)

    @property
    def is_stopping(self) -> bool:
        """Whether this gateway was told to stop."""
        return self._is_stopping

    def announce_stop(self) -> None:
        """Say not ready from now on, and go on serving."""
        self._is_stopping = True

    def share(self, memory: _Memory) -> None:
        """Let clients share memory with the engine, or tell them why they cannot; said once, before any request."""
        self._passage.memory = memory

    def audit_to(self, audit: AuditLog) -> None:
        """Write admin actions to this log; called once, before any request."""
        self._passage.audit = audit

    @property
    def why_no_shared_memory(self) -> str:
        """What a client is told that wants to share memory; empty where it may."""
        return self._passage.memory.refusal

    @property
    def blocked_extensions(self) -> frozenset[str]:
        """Those of the engine's that are not served here."""
        return BLOCKED_EXTENSIONS if self._passage.memory.refusal else frozenset()

    @asynccontextmanager
    async def shared_memory(self, verb: Verb, caller: Caller, region: str = "") -> AsyncIterator[_Memory]:
        """The engine's regions, for one call about that region or all. Raises NotSupported without shared memory."""
        if self._passage.memory.refusal:
            raise NotSupported(self._passage.memory.refusal)
        with self._passage.through(verb, InferHead(region), caller, 0, None):
            yield self._passage.memory

    def model_label(self, model_name: str) -> str:
        """The model's name where it is one of the repository's, else `unknown`: clients cannot grow the metrics."""
        return self._passage.model_label(model_name)

    async def relay_http(
        self, verb: Verb, head: InferHead, call: HttpCall, *, caller: Caller = NOBODY, deadline: float | None = None
    ) -> HttpAnswer:
        """The engine's answer as it is, its errors too. Raises of the InferenceError tree where there is none."""
        until = self._until(verb, head, deadline)
        with self._passage.through(verb, head, caller, len(call.body), until) as way:
            if verb is Verb.LOAD:
                await self.loads.check_http(call)
            call = await own_http(call, head, caller)
            answer = await self._timed(verb, head, self._http(verb, head, call, caller, until))
            await self._note(verb, head.model_name, way.answered(_END_OF_STATUS.get(answer.status)))
            return answer if verb is not Verb.INFER or not asks_http(call) else told_http(answer, self.not_formed(head))

    async def relay_grpc(
        self, verb: Verb, head: InferHead, call: GrpcCall, *, caller: Caller = NOBODY, deadline: float | None = None
    ) -> GrpcAnswer:
        """The engine's answer as it is, its errors too. Raises of the InferenceError tree where there is none."""
        until = self._until(verb, head, deadline)
        with self._passage.through(verb, head, caller, len(call.message), until) as way:
            if verb is Verb.LOAD:
                await self.loads.check_grpc(call)
            answer = await self._timed(verb, head, self._grpc(verb, head, call, caller, until))
            await self._note(verb, head.model_name, way.answered(_END_OF_CODE.get(answer.code)))
            return answer if verb is not Verb.INFER or not asks_grpc(call) else told_grpc(answer, self.not_formed(head))

    def image_input(self, model_name: str) -> ImageInput | None:
        """Where encoded images may stand in a request for this model; None where it takes tensors only.

        Raises InvalidRequest where its config means to describe images and does it wrongly.
        """
        return self._images.input_of(model_name)

    async def relay_http_images(
        self, asked: EncodedCall[HttpCall], *, caller: Caller = NOBODY, deadline: float | None = None
    ) -> HttpAnswer:
        """As relay_http, the images decoded and prepared on the way."""
        until = self._until(Verb.INFER, asked.head, deadline)
        with self._passage.through(Verb.INFER, asked.head, caller, self.size_of(asked), until):
            call = await own_http(await self.with_tensor(asked, until, caller), asked.head, caller)
            answer = await self._timed(Verb.INFER, asked.head, self._http(Verb.INFER, asked.head, call, caller, until))
            await self._note(Verb.INFER, asked.head.model_name, _END_OF_STATUS.get(answer.status))
            return told_http(answer, self.not_formed(asked.head)) if asks_http(call) else answer

    async def relay_grpc_images(
        self, asked: EncodedCall[GrpcCall], *, caller: Caller = NOBODY, deadline: float | None = None
    ) -> GrpcAnswer:
        """As relay_grpc, the images decoded and prepared on the way."""
        until = self._until(Verb.INFER, asked.head, deadline)
        with self._passage.through(Verb.INFER, asked.head, caller, self.size_of(asked), until):
            call = await self.with_tensor(asked, until, caller)
            answer = await self._timed(Verb.INFER, asked.head, self._grpc(Verb.INFER, asked.head, call, caller, until))
            await self._note(Verb.INFER, asked.head.model_name, _END_OF_CODE.get(answer.code))
            return told_grpc(answer, self.not_formed(asked.head)) if asks_grpc(call) else answer

    async def with_tensor(self, asked: EncodedCall[C], deadline: float | None, caller: Caller) -> C:
        """The call as the engine gets it, for who holds a place already, as a stream does. Raises of the tree."""
        head, images, client = asked.head, asked.images, caller.client
        request = ImageRequest(head.model_name, head.model_version, images, deadline, head.request_id, client)
        return asked.with_tensor(await self._images.tensor(request, self.model_label(head.model_name)))

    @asynccontextmanager
    async def stream_http(
        self, head: InferHead, call: HttpCall, *, caller: Caller = NOBODY, deadline: float | None = None
    ) -> AsyncIterator[HttpStream]:
        """An inference with a streamed answer; it has an in-flight slot and its deadline until the block ends.

        The block may raise what the chunks raise. A model's SLO does not limit how long the answer may take.
        """
        with self._passage.through(Verb.INFER, head, caller, len(call.body), deadline):
            started = time.monotonic()
            async with self.turns.http_stream(call, head, caller.client, deadline) as stream:
                try:
                    yield stream
                finally:
                    self._metrics.relayed(self.model_label(head.model_name), time.monotonic() - started)
            await self._note(Verb.INFER, head.model_name, _END_OF_STATUS.get(stream.status))

    @asynccontextmanager
    async def stream_grpc(
        self, method: str, metadata: GrpcMetadata, *, caller: Caller = NOBODY, deadline: float | None = None
    ) -> AsyncIterator[GrpcStream]:
        """A stream to the engine, cancelled when the block ends. It holds no place: each request on it takes one.

        The block may raise as the stream does.
        """
        require_role(Verb.INFER, caller)
        self._passage.require_engine()
        try:
            with self._passage.cuttable():
                stream = await self._relay.grpc_stream(method, metadata, deadline=deadline)
                try:
                    yield stream
                finally:
                    stream.cancel()
        except BackendUnavailable:
            self._watch.suspect()
            raise

    def place_on_stream(self, head: InferHead, caller: Caller, size_bytes: int) -> AbstractContextManager[None]:
        """The place of one request on a stream, from its message to its last answer."""
        return self._passage.place_on_stream(head, caller, size_bytes)

    def stream_answered(self, model_name: str, seconds: float) -> None:
        """A model answered a request on a stream for the last time."""
        self._metrics.relayed(self.model_label(model_name), seconds)
        self._watch.note_served(model_name)

    def is_decoupled(self, model_name: str) -> bool | None:
        """Whether a request to that model may have any number of answers; None where its config is not known here."""
        known = self._watch.models.get(model_name)
        return None if known is None or known.config is None else known.config.is_decoupled

    async def find_decoupled(self, model_name: str) -> bool:
        """The same, the engine asked; a model that nobody knows is none of that kind."""
        try:
            return (await self._watch.find(model_name)).is_decoupled
        except InferenceError:
            return False

    async def infer_images(self, request: ImageRequest, caller: Caller = NOBODY) -> ImageResponse:
        """Labelled results in source pixels. Raises of the InferenceError tree."""
        head = InferHead(request.model_name, request.model_version, request.id)
        size_bytes = sum(len(image) for image in request.images)
        until = self._until(Verb.INFER, head, request.deadline)
        with self._passage.through(Verb.INFER, head, caller, size_bytes, until):
            model = await self._images.model(request.model_name)
            label = self.model_label(request.model_name)
            response = await self._images.run(replace(request, deadline=until, client=caller.client), model, label)
            self._watch.note_served(request.model_name)
            return response

    async def infer_tensors(
        self, request: InferRequest, alone: Backend, *, client: str, priority: int = 0
    ) -> InferResponse | InferenceError:
        """Of another program of this host, which needs no key: the model's answer, or the engine's own refusal.

        alone: asked for what is in no batch. client: whom the queue is fair to. Raises of the tree where there is none.
        """
        head = InferHead(request.model_name, request.model_version, request.id)
        until = self._until(Verb.INFER, head, request.deadline)
        size_bytes = sum([tensor.data.nbytes for tensor in request.inputs])
        request = request if until == request.deadline else replace(request, deadline=until)
        with self._passage.through(Verb.INFER, head, NOBODY, size_bytes, until):
            asking = self._tensors(request, alone, Passenger(head, client, until), priority)
            try:
                response = await self._timed(Verb.INFER, head, asking)
            except OutOfMemory:
                raise
            except ANSWERED as error:
                if isinstance(error, BackendFailed):
                    self._watch.note_failed(head.model_name)
                return error
            self._watch.note_served(request.model_name)
            return response

    async def _tensors(
        self, request: InferRequest, alone: Backend, passenger: Passenger, priority: int
    ) -> InferResponse:
        """As _http."""
        if self.batches is not None and self.batches.takes(passenger.head):
            response = await self.batches.tensors(request, passenger, priority)
            if response is not None:
                return response
        return await alone.infer(request)

    def size_of(self, asked: EncodedCall[C]) -> int:
        """Bytes in flight: the images and, where it can be told, the tensor that they become."""
        place = self._images.input_of(asked.head.model_name)
        rows = len(asked.images) * place.row_bytes if place is not None else 0
        return sum(len(image) for image in asked.images) + rows

    async def refuse_classification_of_bytes(self, head: InferHead, output_names: tuple[str, ...]) -> None:
        """Raises InvalidRequest where one of the outputs is BYTES: asking Triton 2.51 for its classes kills it."""
        self._passage.require_engine()
        config = await self._watch.find(head.model_name)
        for spec in config.outputs:
            if spec.name in output_names and spec.datatype is Datatype.BYTES:
                raise InvalidRequest(
                    f"output {spec.name!r} of model {head.model_name!r} is BYTES; "
                    "the classification extension needs a numeric output"
                )

    def _until(self, verb: Verb, head: InferHead, deadline: float | None) -> float | None:
        """The request's own deadline, else of an inference its model's SLO from now on, else none."""
        if deadline is not None or verb is not Verb.INFER:
            return deadline
        slo_s = self.batch_options(head.model_name).slo_s
        return None if slo_s is None else time.monotonic() + slo_s

    def _http(
        self, verb: Verb, head: InferHead, call: HttpCall, caller: Caller, until: float | None
    ) -> Awaitable[HttpAnswer]:
        """Into a batch where the gateway forms the model's, else to the engine as it came."""
        if verb is Verb.INFER and self.batches is not None and self.batches.takes(head):
            return self.batches.http(call, Passenger(head, caller.owner, until))
        if verb is Verb.INFER:
            return self.turns.http(call, head, caller.client, until)
        return self._relay.http(call, deadline=until)

    def _grpc(
        self, verb: Verb, head: InferHead, call: GrpcCall, caller: Caller, until: float | None
    ) -> Awaitable[GrpcAnswer]:
        """As _http."""
        if verb is Verb.INFER and self.batches is not None and self.batches.takes(head):
            return self.batches.grpc(call, Passenger(head, caller.owner, until))
        if verb is Verb.INFER:
            return self.turns.grpc(own_grpc(call, head, caller), head, caller.client, until)
        return self._relay.grpc(call, deadline=until)

    async def _timed(self, verb: Verb, head: InferHead, answer: Awaitable[T]) -> T:
        started = time.monotonic()
        done = await answer
        if verb is Verb.INFER:
            self._metrics.relayed(self.model_label(head.model_name), time.monotonic() - started)
        return done

    async def _note(self, verb: Verb, model_name: str, is_done: bool | None) -> None:
        """is_done: False if the engine failed, None if it refused the call."""
        if is_done and verb is Verb.INFER:
            self._watch.note_served(model_name)
        elif is_done is False and verb is Verb.INFER:
            self._passage.note_failed(model_name)
        elif is_done and verb is Verb.LOAD:
            await self._watch.note_loaded(model_name)
            await self.spread()
            if refusal := self.refusals().get(model_name):
                raise InvalidRequest(f"the model is loaded but not served: {refusal}")
        elif is_done and verb is Verb.UNLOAD:
            self._watch.note_unloaded(model_name)
            await self.spread()


async def _nobody_else() -> None:
    """There is one process that serves."""
