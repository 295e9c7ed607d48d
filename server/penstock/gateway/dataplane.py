"""DataPlane: what every transport calls. Admits requests, then relays, batches or computes them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar
from urllib.parse import quote

import msgspec

from penstock.engines.load_policy import LoadPolicy
from penstock.engines.model_health import EngineView
from penstock.engines.relayed_calls import with_engine_sequence
from penstock.gateway.admission import AdmissionControl
from penstock.gateway.batch_flow import BatchFlow, RequestContext
from penstock.gateway.batching.batch_report import explain_engine, explain_queue, with_misspelt
from penstock.gateway.batching.engine_call import fetch_engine_batches
from penstock.gateway.batching.explanation import add_explanation, explain_unbatched, wants_explanation
from penstock.gateway.batching.options import BatchOptions, DeclaredOptions, misspelt_parameters
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.engine_slots import EngineSlots
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.metrics import Metrics
from penstock.gateway.readiness import Readiness, as_served, readiness_of
from penstock.gateway.shared_memory.regions import NoSharedMemory, SharedMemory
from penstock.gateway.tracing import Tracer
from penstock.protocol.batch_reports import ModelBatchReport, RequestExplanation
from penstock.protocol.call import A, Call, GrpcMetadata, HttpAnswer, HttpCall, HttpStream, InferHead
from penstock.protocol.engine import Engine, GrpcStream, Relay
from penstock.protocol.error_codes import ENGINE_ERRORS
from penstock.protocol.errors import (
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    NotSupported,
    OutOfMemory,
    reason_line,
)
from penstock.protocol.identity import ANONYMOUS, Identity, Verb, require_role
from penstock.protocol.inference import BatchOwner, Datatype, InferRequest, InferResponse
from penstock.protocol.request_checks import BLOCKED_EXTENSIONS, MAX_MODEL_NAME, EncodedCall, ImageInput
from penstock.vision.results import ImageRequest, ImageResponse

T = TypeVar("T")
_SharedMemory = SharedMemory | NoSharedMemory


async def _nothing_to_inform() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneParts:
    """Parts of a data plane. slots, images: over the same relay. batches: None if the gateway forms none.

    loads: which models clients may load. is_apart: whether a model has its own engine process. spread: informs other
    processes of a load or unload.
    """

    relay: Relay
    watch: EngineView
    images: ImageFlow
    admission: AdmissionControl
    metrics: Metrics
    slots: EngineSlots
    batches: BatchFlow | None = None
    options: DeclaredOptions = field(default_factory=DeclaredOptions)
    loads: LoadPolicy = field(default_factory=LoadPolicy)
    required_models: tuple[str, ...] | None = None
    queue_statistics: Callable[[], Mapping[str, QueueStatistics]] = dict
    is_apart: Callable[[str], bool] = lambda _: False
    spread: Callable[[], Awaitable[None]] = _nothing_to_inform
    tracer: Tracer | None = None


class DataPlane:
    """Serves requests of all transports, which call it in the event loop's thread."""

    def __init__(self, parts: PlaneParts) -> None:
        self._relay, self._watch, self._images, self._metrics = parts.relay, parts.watch, parts.images, parts.metrics
        self._admission, self.admission = parts.admission, parts.admission.admission
        self.slots, self._batches, self._options = parts.slots, parts.batches, parts.options
        self._loads, self._spread, self._queue_statistics = parts.loads, parts.spread, parts.queue_statistics
        self._required_models = parts.required_models
        self.is_apart, self.tracer = parts.is_apart, parts.tracer
        self._is_stopping = False

    def readiness(self) -> Readiness:
        """Whether this gateway is ready for requests."""
        if self._is_stopping:
            return Readiness(False, "draining: this gateway is about to stop")
        return readiness_of(self._watch, self._required_models)

    def not_formed(self, head: InferHead) -> RequestExplanation:
        """The explanation of a request whose batch the gateway did not form."""
        return explain_unbatched(head.model_name, self.batch_options(head.model_name).owner)

    def batch_options(self, model_name: str) -> BatchOptions:
        """The model's options; the defaults without batching for an unknown model."""
        known = self._watch.models.get(model_name)
        if known is None or known.config is None or known.is_refused:
            return BatchOptions()
        return self._options.of(known.config)

    async def explain_model(self, model_name: str, caller: Identity = ANONYMOUS) -> ModelBatchReport:
        """The model's batch report. Raises ModelNotFound, EngineFailed."""
        require_role(Verb.READ, caller)
        self._admission.require_engine()
        config = await self._watch.find(model_name)
        options, unread = self._options.of(config), misspelt_parameters(config)
        if options.owner is BatchOwner.GATEWAY:
            page = explain_queue(model_name, options, self._queue_statistics().get(model_name))
            return with_misspelt(page, unread)
        batches = await fetch_engine_batches(self._relay, model_name)
        return with_misspelt(explain_engine(model_name, options, batches), unread)

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def announce_stop(self) -> None:
        """Reports not ready from now on, and continues to serve."""
        self._is_stopping = True

    @property
    def why_no_shared_memory(self) -> str:
        """Why clients cannot share memory; empty if they can."""
        return self._admission.memory.refusal

    @property
    def blocked_extensions(self) -> frozenset[str]:
        """Extensions of the engine that are not served here."""
        return BLOCKED_EXTENSIONS if self._admission.memory.refusal else frozenset()

    @asynccontextmanager
    async def shared_memory(self, verb: Verb, caller: Identity, region: str = "") -> AsyncIterator[_SharedMemory]:
        """Admits one call about this region, or about all. Raises NotSupported without shared memory."""
        if self._admission.memory.refusal:
            raise NotSupported(self._admission.memory.refusal)
        with self._admission.through(verb, InferHead(region), caller, 0, None):
            yield self._admission.memory

    @contextmanager
    def adding(self, model_name: str, caller: Identity) -> Iterator[None]:
        """Admits the addition of a model, and writes its outcome to the audit log."""
        with self._admission.through(Verb.ADD, InferHead(model_name), caller, 0, None):
            yield

    async def remove_model(self, model_name: str, caller: Identity, remove: Callable[[], None]) -> None:
        """Unloads the model, then calls `remove` in a thread, which removes its folder.

        Raises what `remove` raises, and InvalidRequest if the model cannot be unloaded.
        """
        with self._admission.through(Verb.REMOVE, InferHead(model_name), caller, 0, None):
            answer = await self._change_added(model_name, "unload")
            known = self._watch.models.get(model_name)
            if not answer.succeeded and known is not None and known.is_ready:
                raise InvalidRequest(f"the model was not removed, as it cannot be unloaded: {_reason_in(answer)}")
            await self._note(Verb.UNLOAD, model_name, True)
            await asyncio.to_thread(remove)

    def refused_addition(self, model_name: str, caller: Identity, outcome: str) -> None:
        """Writes to the audit log why a model's file was not received."""
        self._admission.audit.record(caller.key_name, caller.address, Verb.ADD, model_name[:MAX_MODEL_NAME], outcome)

    async def load_added(self, model_name: str) -> None:
        """Loads a model of the repository, tries it, and informs other processes; admission has taken place.

        Raises InvalidRequest with the reason if it cannot be served, and EngineUnavailable.
        """
        answer = await self._change_added(model_name, "load")
        if not answer.succeeded:
            raise InvalidRequest(_reason_in(answer))
        await self._note(Verb.LOAD, model_name, True)

    async def restore(self, model_name: str, *, has_previous: bool) -> None:
        """After a failed load_added: loads the previous model of that name again, or unloads the model."""
        with suppress(InferenceError):
            if has_previous:
                await self.load_added(model_name)
            else:
                await self._change_added(model_name, "unload")
                await self._note(Verb.UNLOAD, model_name, True)

    async def _change_added(self, model_name: str, action: str) -> HttpAnswer:
        target = f"/v2/repository/models/{quote(model_name, safe='')}/{action}".encode()
        return await self._relay.send(HttpCall("POST", target, (), b""), deadline=None)

    def model_label(self, model_name: str) -> str:
        """The model's name if it is in the repository, else `unknown`, so that clients cannot add metric series."""
        return self._admission.model_label(model_name)

    async def relay(
        self,
        verb: Verb,
        head: InferHead,
        call: Call[A] | EncodedCall[A],
        *,
        caller: Identity = ANONYMOUS,
        deadline: float | None = None,
    ) -> A:
        """The engine's response, including errors. Encoded images become tensors first. Raises InferenceError."""
        if head.classification_outputs:
            await self.refuse_classification_of_bytes(head)
        until = self._until(verb, head, deadline)
        with self._admission.through(verb, head, caller, call.size_bytes, until) as admitted:
            if isinstance(call, EncodedCall):
                call = await self.with_tensors(call, until, caller)
            if verb is Verb.LOAD:
                await self._loads.check(call)
            elif verb is Verb.INFER and head.sequence is not None:
                call = await with_engine_sequence(call, head, caller)
            answer = await self._timed(verb, head, self._send(verb, head, call, caller, until))
            if verb is not Verb.INFER:
                name, models = head.model_name, self._watch.models
                unmerged = self.batch_options(name).unmerged if verb is Verb.CONFIG else ""
                answer = as_served(verb, name, call, answer, models, unmerged)
            await self._note(verb, head.model_name, admitted.answered(answer.succeeded))
            if verb is Verb.INFER and wants_explanation(call):
                return add_explanation(answer, self.not_formed(head))
            return answer

    def image_input(self, model_name: str) -> ImageInput | None:
        """The model's image input, or None if it takes tensors only. Raises InvalidRequest for invalid parameters."""
        return self._images.input_of(model_name)

    async def with_tensors(self, asked: EncodedCall[A], deadline: float | None, caller: Identity) -> Call[A]:
        """The call with its images as tensors, for callers that have a slot already. Raises InferenceError."""
        head, images, client = asked.head, asked.images, caller.client
        request = ImageRequest(head.model_name, head.model_version, images, deadline, head.request_id, client)
        return asked.with_tensors(await self._images.tensors(request, self.model_label(head.model_name)))

    @asynccontextmanager
    async def stream(
        self, head: InferHead, call: HttpCall, *, caller: Identity = ANONYMOUS, deadline: float | None = None
    ) -> AsyncIterator[HttpStream]:
        """An inference with a streamed response, in an in-flight slot until the block ends, without the model's SLO."""
        with self._admission.through(Verb.INFER, head, caller, len(call.body), deadline):
            started = time.monotonic()
            async with self.slots.stream(call, head, caller.client, deadline) as stream:
                try:
                    yield stream
                finally:
                    self._metrics.relayed(self.model_label(head.model_name), time.monotonic() - started)
            await self._note(Verb.INFER, head.model_name, stream.succeeded)

    @asynccontextmanager
    async def open_stream(
        self, method: str, metadata: GrpcMetadata, *, caller: Identity = ANONYMOUS, deadline: float | None = None
    ) -> AsyncIterator[GrpcStream]:
        """A stream to the engine, cancelled when the block ends. Each request on it takes its own slot."""
        require_role(Verb.INFER, caller)
        self._admission.require_engine()
        try:
            with self._admission.cuttable():
                stream = await self._relay.open_stream(method, metadata, deadline=deadline)
                try:
                    yield stream
                finally:
                    stream.cancel()
        except EngineUnavailable:
            self._watch.suspect()
            raise

    def stream_slot(self, head: InferHead, caller: Identity, size_bytes: int) -> AbstractContextManager[None]:
        """The in-flight slot of one request on a stream, from its message to its last response."""
        return self._admission.stream_slot(head, caller, size_bytes)

    def stream_answered(self, model_name: str, seconds: float) -> None:
        """Counts a request on a stream that got its last response."""
        self._metrics.relayed(self.model_label(model_name), seconds)
        self._watch.note_served(model_name)

    def is_decoupled(self, model_name: str) -> bool | None:
        """Whether a request may have any number of responses; None if the model's config is unknown."""
        known = self._watch.models.get(model_name)
        return None if known is None or known.config is None else known.config.is_decoupled

    async def find_decoupled(self, model_name: str) -> bool:
        """The same, with the config from the engine; False for an unknown model."""
        try:
            return (await self._watch.find(model_name)).is_decoupled
        except InferenceError:
            return False

    async def infer_images(self, request: ImageRequest, caller: Identity = ANONYMOUS) -> ImageResponse:
        """Labelled results in source pixels. Raises InferenceError."""
        head = InferHead(request.model_name, request.model_version, request.id)
        size_bytes = sum(len(image) for image in request.images)
        until = self._until(Verb.INFER, head, request.deadline)
        with self._admission.through(Verb.INFER, head, caller, size_bytes, until):
            model = await self._images.model(request.model_name)
            label = self.model_label(request.model_name)
            response = await self._images.run(replace(request, deadline=until, client=caller.client), model, label)
            self._watch.note_served(request.model_name)
            return response

    async def infer_tensors(
        self, request: InferRequest, alone: Engine, *, client: str, priority: int = 0
    ) -> InferResponse | InferenceError:
        """Response for a client process of this host, or the engine's error. alone: engine for unbatched requests."""
        head = InferHead(request.model_name, request.model_version, request.id)
        until = self._until(Verb.INFER, head, request.deadline)
        size_bytes = sum([tensor.data.nbytes for tensor in request.inputs])
        request = request if until == request.deadline else replace(request, deadline=until)
        with self._admission.through(Verb.INFER, head, ANONYMOUS, size_bytes, until):
            asking = self._tensors(request, alone, RequestContext(head, client, until), priority)
            try:
                response = await self._timed(Verb.INFER, head, asking)
            except OutOfMemory:
                raise
            except ENGINE_ERRORS as error:
                if isinstance(error, EngineFailed):
                    self._watch.note_failed(head.model_name)
                return error
            self._watch.note_served(request.model_name)
            return response

    async def _tensors(
        self, request: InferRequest, alone: Engine, context: RequestContext, priority: int
    ) -> InferResponse:
        if self._batches is not None and self._batches.takes(context.head):
            response = await self._batches.tensors(request, context, priority)
            if response is not None:
                return response
        return await alone.infer(request)

    async def refuse_classification_of_bytes(self, head: InferHead) -> None:
        """Raises InvalidRequest if an output is BYTES: Triton 2.51 crashes when asked for its classes."""
        self._admission.require_engine()
        config = await self._watch.find(head.model_name)
        for spec in config.outputs:
            if spec.name in head.classification_outputs and spec.datatype is Datatype.BYTES:
                raise InvalidRequest(
                    f"output {spec.name!r} of model {head.model_name!r} is BYTES; "
                    "the classification extension needs a numeric output"
                )

    def _until(self, verb: Verb, head: InferHead, deadline: float | None) -> float | None:
        """The request's deadline; otherwise the model's SLO from now for an inference, or None."""
        if deadline is not None or verb is not Verb.INFER:
            return deadline
        slo_s = self.batch_options(head.model_name).slo_s
        return None if slo_s is None else time.monotonic() + slo_s

    def _send(self, verb: Verb, head: InferHead, call: Call[A], caller: Identity, until: float | None) -> Awaitable[A]:
        """Batches the call if the gateway forms the model's batches, otherwise relays it."""
        if verb is not Verb.INFER:
            return self._relay.send(call, deadline=until)
        if self._batches is not None and self._batches.takes(head):
            return self._batches.infer(call, RequestContext(head, caller.owner, until))
        return self.slots.send(call, head, caller.client, until)

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
            self._admission.note_failed(model_name)
        elif is_done and verb is Verb.LOAD:
            await self._watch.note_loaded(model_name)
            await self._spread()
            known = self._watch.models.get(model_name)
            if known is not None and known.is_withheld:
                raise InvalidRequest(f"the model is loaded but not served: {known.reason}")
        elif is_done and verb is Verb.UNLOAD:
            self._watch.note_unloaded(model_name)
            await self._spread()


class _ErrorBody(msgspec.Struct):
    error: str


def _reason_in(answer: HttpAnswer) -> str:
    """The engine's reason in its error answer, on one line."""
    try:
        return reason_line(msgspec.json.decode(answer.body, type=_ErrorBody).error)
    except msgspec.DecodeError:
        return f"the engine answered {answer.status}"
