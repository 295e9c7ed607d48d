"""Admission control: role, quota, engine up, model served, deadline, in-flight slot, shared memory."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Self
from urllib.parse import unquote

from penstock.engines.call_options import CuttableCalls
from penstock.engines.model_health import Cause, EngineView
from penstock.engines.triton.runtime import is_special
from penstock.gateway.audit import CANCELLED, NO_AUDIT, OK, AuditLog
from penstock.gateway.auth.rate_limiter import RateLimiter
from penstock.gateway.in_flight import InFlightLimiter
from penstock.gateway.metrics import Metrics
from penstock.gateway.shared_memory.regions import NoSharedMemory, SharedMemory
from penstock.gateway.tracing import trace_arrival
from penstock.protocol.call import InferHead
from penstock.protocol.cancellation import CancelStage, ClientLeft, when_engine_done, when_stage_known
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
)
from penstock.protocol.identity import ROLE_OF, Identity, Role, Verb, require_role

UNKNOWN_MODEL = "unknown"
DEADLINE_SLACK_S = 0.02
LONG_WAIT_S = 1.0  # if a client disconnects sooner, that is no evidence about the model
CHECK_INTERVAL_S = 1.0  # between checks for calls that wait long
_NO_REGIONS = nullcontext()
_RESTART_CAUSES = (Cause.HANG, Cause.CANARY)  # causes for which a model's process is restarted


class AdmissionControl:
    """Admits requests, one context manager each, and tracks which of them wait for the engine.

    They raise PermissionDenied, QuotaExceeded, Overloaded, EngineUnavailable or DeadlineExceeded on entry.
    """

    def __init__(
        self,
        *,
        watch: EngineView,
        admission: InFlightLimiter,
        metrics: Metrics,
        quotas: RateLimiter | None = None,
        memory: SharedMemory | NoSharedMemory | None = None,
        audit: AuditLog = NO_AUDIT,
    ) -> None:
        """quotas: None for no quotas. memory: of clients and the engine. audit: gets a line for each admin action."""
        self._metrics = metrics
        self.admission = admission
        self.memory = memory or NoSharedMemory()
        self.audit = audit
        self._watch = watch
        self._quotas = quotas
        self._running = CuttableCalls()
        self._unanswered: dict[object, tuple[str, float]] = {}  # model and start of each inference, oldest first
        self._last_unavailable: dict[str, tuple[float, InferenceError]] = {}  # when calls waited
        self._look: asyncio.TimerHandle | None = None
        watch.when_silent(lambda why: self._running.cut(f"the engine fell silent over this request: {why}"))

    def through(
        self, verb: Verb, head: InferHead, caller: Identity, size_bytes: int, until: float | None
    ) -> "_OtherWay":
        """Admits one call to the engine. size_bytes: counted as in flight. until: deadline, monotonic seconds."""
        way = _InferenceCall if verb is Verb.INFER else _OtherWay if ROLE_OF[verb] is Role.READ else _AdminCall
        return way(self, verb, head, caller, (size_bytes, until))

    @contextmanager
    def stream_slot(self, head: InferHead, caller: Identity, size_bytes: int) -> Iterator[None]:
        """Takes the in-flight slot of one request on a stream, from its message to its last response."""
        if self._quotas is not None:
            self._quotas.take(caller, time.monotonic())
        self.require_engine()
        self.require_served(head)
        self._enter(caller, size_bytes)
        began, call = time.monotonic(), object()
        self._begin(call, head.model_name, began)
        try:
            with self._held(head, caller):
                yield
            self._metrics.inference_answered()
        except BaseException as error:
            self._count_end(error, CancelStage.STREAM, None)
            self._note_end(error, head.model_name, began)
            raise
        finally:
            self._unanswered.pop(call, None)
            self._leave(caller, size_bytes)

    def cuttable(self) -> AbstractContextManager[None]:
        """Context that is cancelled with EngineUnavailable if the engine stops answering."""
        return self._running

    def require_engine(self) -> None:
        """Raises EngineUnavailable while the engine is not up."""
        if not self._watch.is_up:
            raise EngineUnavailable(f"the engine is not ready: {self._watch.reason}")

    def require_served(self, head: InferHead) -> None:
        """Raises ModelRefused or ModelUnavailable for a model that the gateway does not serve.

        Raises InvalidRequest for a batch of no rows: Triton 2.51's Python backend never answers it, and can then not
        unload the model.
        """
        known = self._watch.models.get(head.model_name)
        if known is None:
            return
        if known.is_withheld:
            known.require_served()
        if head.rowless_input and known.config is not None and known.config.max_batch_size:
            raise InvalidRequest(
                f"input {head.rowless_input!r}: its first dimension, the batch, is 0; send at least one row"
            )

    def model_label(self, model_name: str) -> str:
        """The model's name if it is in the repository, else `unknown`, so that clients cannot add metric series."""
        return model_name if model_name in self._watch.models else UNKNOWN_MODEL

    def _admit(self, verb: Verb, head: InferHead, caller: Identity) -> None:
        """Checks that apply to every call."""
        require_role(verb, caller)
        if self._quotas is not None:
            self._quotas.take(caller, time.monotonic())
        self.require_engine()
        if verb is Verb.LOAD:
            check_model_name(head.model_name)

    def _enter(self, caller: Identity, size_bytes: int) -> None:
        """Takes a slot in the client's share and one of the gateway. Raises QuotaExceeded, Overloaded."""
        if self._quotas is not None:
            self._quotas.enter(caller, size_bytes)
        try:
            self.admission.enter(size_bytes)
        except Overloaded:
            if self._quotas is not None:
                self._quotas.leave(caller, size_bytes)
            raise
        self._metrics.inference_accepted()

    def _count_end(self, error: BaseException, where: CancelStage, until: float | None) -> None:
        """Counts an admitted request without a response. where: stage of a cancellation, unless the error has one."""
        if isinstance(error, InferenceError):
            self._metrics.inference_failed(error.reason)
        elif not isinstance(error, asyncio.CancelledError):
            self._metrics.inference_failed(InferenceError.reason)
        elif until is not None and time.monotonic() >= until - DEADLINE_SLACK_S:
            self._metrics.inference_failed(DeadlineExceeded.reason)  # the client gave up just before our own timeout
        else:
            when_stage_known(error, where, self._metrics.inference_cancelled)

    def _note_end(self, error: BaseException, model_name: str, began: float) -> None:
        """Reports the end of a call to the model's health checks. began: monotonic seconds."""
        waited_s = time.monotonic() - began
        is_left = isinstance(error, asyncio.CancelledError) and waited_s >= LONG_WAIT_S
        if is_left or isinstance(error, DeadlineExceeded):
            self._watch.note_late(model_name, waited_s)
        elif isinstance(error, EngineFailed) and not isinstance(error, OutOfMemory):
            self._watch.note_failed(model_name)

    def note_failed(self, model_name: str) -> None:
        """Reports a failed inference. Raises ModelUnavailable if the model's process is or was being replaced."""
        self._watch.note_failed(model_name)
        began = min(
            (began for name, began in self._unanswered.values() if name == model_name), default=time.monotonic()
        )
        if (why := self._unavailable_since(model_name, began)) is not None:
            raise why

    def _unavailable(self, model_name: str) -> InferenceError | None:
        """Why the gateway does not serve the model at present; None if it does."""
        known = self._watch.models.get(model_name)
        return known.error if known is not None and known.unavailable in _RESTART_CAUSES else None

    def _unavailable_since(self, model_name: str, began: float) -> InferenceError | None:
        """The same, or why the model was unavailable at a moment after `began`: its process was replaced since then."""
        seen_at, why = self._last_unavailable.get(model_name, (began, None))
        return self._unavailable(model_name) or (why if seen_at > began else None)

    def _begin(self, call: object, model_name: str, began: float) -> None:
        self._unanswered[call] = model_name, began
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._look_for_late)

    def _look_for_late(self) -> None:
        """Reports models whose oldest call waits long: a call without a deadline may never end."""
        now = time.monotonic()
        waits: dict[str, float] = {}
        for model_name, began in self._unanswered.values():
            if now - began < LONG_WAIT_S:
                break
            waits.setdefault(model_name, now - began)
            if (why := self._unavailable(model_name)) is not None:
                self._last_unavailable[model_name] = now, why
        for model_name, waited_s in waits.items():
            self._watch.note_late(model_name, waited_s, is_waiting=True)
        self._look = None
        if self._unanswered:
            self._look = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._look_for_late)

    def _leave(self, caller: Identity, size_bytes: int) -> None:
        self.admission.leave(size_bytes)
        if self._quotas is not None:
            self._quotas.leave(caller, size_bytes)

    def _held(self, head: InferHead, caller: Identity) -> AbstractContextManager[None]:
        """Protects the request's shared-memory regions until the engine has answered."""
        return self.memory.held(head.regions, caller) if head.regions else _NO_REGIONS


# Classes, not generators, which take twice as long: every inference uses them.
class _OtherWay:
    """A call other than an inference."""

    __slots__ = ("_caller", "_control", "_head", "_size_bytes", "_until", "_verb")

    def __init__(
        self,
        admission_control: AdmissionControl,
        verb: Verb,
        head: InferHead,
        caller: Identity,
        terms: tuple[int, float | None],
    ) -> None:
        """terms: size_bytes and until, see AdmissionControl.through."""
        self._control, self._verb, self._head, self._caller = admission_control, verb, head, caller
        self._size_bytes, self._until = terms

    def __enter__(self) -> Self:
        self._control._admit(self._verb, self._head, self._caller)
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, EngineUnavailable | OutOfMemory):
            self._control._watch.suspect()

    def answered(self, is_done: bool | None) -> bool | None:
        """Notes the engine's response and returns is_done: False if the engine failed, None if it refused the call."""
        return is_done


class _AdminCall(_OtherWay):
    """An admin action. Writes one line to the audit log, however it ends."""

    __slots__ = ("_outcome",)

    def __enter__(self) -> Self:
        self._outcome = OK
        try:
            return super().__enter__()
        except InferenceError as error:
            self._record(error.reason)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, InferenceError):
            self._outcome = error.reason
        elif error is not None:
            is_cancelled = isinstance(error, asyncio.CancelledError | ClientLeft)
            self._outcome = CANCELLED if is_cancelled else InferenceError.reason
        self._record(self._outcome)
        super().__exit__(kind, error, trace)

    def answered(self, is_done: bool | None) -> bool | None:
        self._outcome = OK if is_done else EngineFailed.reason
        return is_done

    def _record(self, outcome: str) -> None:
        caller = self._caller
        self._control.audit.record(caller.key_name, caller.address, self._verb, self._head.model_name, outcome)


class _InferenceCall(_OtherWay):
    """An inference: has an in-flight slot, is cancelled if the engine stops answering, and is always counted."""

    __slots__ = ("_began", "_held")

    def __enter__(self) -> Self:
        admission_control, head, until = self._control, self._head, self._until
        admission_control._admit(self._verb, head, self._caller)
        admission_control.require_served(head)
        self._began = time.monotonic()
        if until is not None and until <= self._began:
            raise DeadlineExceeded("the deadline had passed when the request arrived; allow more time")
        admission_control._enter(self._caller, self._size_bytes)
        self._held: AbstractContextManager[None] = _NO_REGIONS
        try:
            trace_arrival(admission_control.model_label(head.model_name))
            if head.regions:
                held = admission_control._held(head, self._caller)
                held.__enter__()
                self._held = held
            admission_control._running.begin()
            admission_control._begin(self, head.model_name, self._began)
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cut: InferenceError | None = self._control._running.end(error)
        if isinstance(error, EngineFailed):
            cut = self._control._unavailable_since(self._head.model_name, self._began)
        if cut is not None:
            kind, error, trace = type(cut), cut, None
        try:
            if self._held is not _NO_REGIONS:
                self._held.__exit__(kind, error, trace)
        finally:
            self._end(error)
        if cut is not None:
            raise cut from None

    def _end(self, error: BaseException | None) -> None:
        admission_control = self._control
        admission_control._unanswered.pop(self, None)
        if error is None:
            admission_control._leave(self._caller, self._size_bytes)
            admission_control._metrics.inference_answered()
        else:
            when_engine_done(error, partial(admission_control._leave, self._caller, self._size_bytes))
            admission_control._count_end(error, CancelStage.ENGINE, self._until)
            admission_control._note_end(error, self._head.model_name, self._began)
        super().__exit__(None, error, None)


def check_model_name(model_name: str) -> None:
    """Raises InvalidRequest for a name (as on the wire) that is unsafe in a shell of Triton's Python backend."""
    if is_special(model_name) or is_special(unquote(model_name)):
        raise InvalidRequest(
            f"a model named {unquote(model_name)!r} cannot be loaded; use no spaces and none of a shell's signs"
        )
