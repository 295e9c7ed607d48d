"""The way in and out of the engine's side: role, quota, engine up, place taken, time left, shared memory held."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Self
from urllib.parse import unquote

from server.access.audit import NO_AUDIT, OK, AuditLog
from server.access.quotas import Quotas
from server.admission import Admission
from server.backends.engine_view import EngineView
from server.backends.model_health import Cause
from server.backends.shell_paths import is_special
from server.core.abandoned import when_free
from server.core.caller import Caller
from server.core.errors import (
    BackendFailed,
    BackendUnavailable,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
)
from server.core.leaving import LeftAt, when_known
from server.core.relay import InferHead
from server.core.verb import Verb, require_role
from server.metrics import Metrics
from server.shared_memory.absent import NoSharedMemory
from server.shared_memory.keeper import SharedMemory
from server.tracing.trace import trace_arrival

UNKNOWN_MODEL = "unknown"
DEADLINE_SLACK_S = 0.02
LONG_WAIT_S = 1.0  # if a client disconnects sooner, that is no evidence about the model
LOOK_INTERVAL_S = 1.0  # between two looks for calls that wait long
_NOTHING_HELD = nullcontext()
_REPLACED = (Cause.HANG, Cause.CANARY)  # causes for which a model's process is restarted


class Passage:
    """Lets requests through, one block each, and knows which of them wait for the engine.

    Blocks raise of the InferenceError tree: PermissionDenied, QuotaExceeded, Overloaded, BackendUnavailable,
    DeadlineExceeded before the work, and BackendUnavailable where the engine falls silent under it.
    """

    def __init__(
        self, *, watch: EngineView, admission: Admission, metrics: Metrics, quotas: Quotas | None = None
    ) -> None:
        """quotas: of clients that have one; None without quotas. memory, audit: set by the composer."""
        self._metrics = metrics
        self.admission = admission
        self.memory: SharedMemory | NoSharedMemory = NoSharedMemory()
        self.audit: AuditLog = NO_AUDIT
        self._watch = watch
        self._quotas = quotas
        self._waiting: set[asyncio.Task[object]] = set()
        self._cut_for: dict[asyncio.Task[object], str] = {}
        self._unanswered: dict[object, tuple[str, float]] = {}  # model and start of each inference, oldest first
        self._look: asyncio.TimerHandle | None = None
        watch.when_silent(self._cut)

    def through(self, verb: Verb, head: InferHead, caller: Caller, size_bytes: int, until: float | None) -> "_OtherWay":
        """One call to the engine. size_bytes: what it weighs in admission. until: its deadline, monotonic seconds."""
        way = _InferenceWay if verb is Verb.INFER else _OtherWay if verb is Verb.READ else _AdminWay
        return way(self, verb, head, caller, (size_bytes, until))

    @contextmanager
    def place_on_stream(self, head: InferHead, caller: Caller, size_bytes: int) -> Iterator[None]:
        """The place of one request on a stream, from its message to its last answer."""
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
            self._count_end(error, LeftAt.STREAM, None)
            self._note_end(error, head.model_name, began)
            raise
        finally:
            self._unanswered.pop(call, None)
            self._leave(caller, size_bytes)

    def cuttable(self) -> AbstractContextManager[None]:
        """Work that ends as BackendUnavailable when the engine has fallen silent."""
        return _Cuttable(self)

    def require_engine(self) -> None:
        """Raises BackendUnavailable while the engine is not up."""
        if not self._watch.is_up:
            raise BackendUnavailable(f"the engine is not ready: {self._watch.reason}")

    def require_served(self, head: InferHead) -> None:
        """Raises ModelRefused or ModelUnavailable for a model that the engine serves and the gateway does not.

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
        """The model's name where it is one of the repository's, else `unknown`: clients cannot grow the metrics."""
        return model_name if model_name in self._watch.models else UNKNOWN_MODEL

    def _admit(self, verb: Verb, head: InferHead, caller: Caller) -> None:
        """What every call must pass, whatever it is about."""
        require_role(verb, caller)
        if self._quotas is not None:
            self._quotas.take(caller, time.monotonic())
        self.require_engine()
        if verb is Verb.LOAD:
            refuse_special_name(head.model_name)

    def _enter(self, caller: Caller, size_bytes: int) -> None:
        """A place of the caller's own, and one of all. Raises QuotaExceeded and Overloaded."""
        if self._quotas is not None:
            self._quotas.enter(caller, size_bytes)
        try:
            self.admission.enter(size_bytes)
        except Overloaded:
            if self._quotas is not None:
                self._quotas.leave(caller, size_bytes)
            raise
        self._metrics.inference_accepted()

    def _count_end(self, error: BaseException, where: LeftAt, until: float | None) -> None:
        """Of what was let in and not answered. where: the caller left it, unless a room knows better."""
        if isinstance(error, InferenceError):
            self._metrics.inference_failed(error.reason)
        elif not isinstance(error, asyncio.CancelledError):
            self._metrics.inference_failed(InferenceError.reason)
        elif until is not None and time.monotonic() >= until - DEADLINE_SLACK_S:
            self._metrics.inference_failed(DeadlineExceeded.reason)  # who asked gave up a moment before we said so
        else:
            when_known(error, where, self._metrics.inference_cancelled)

    def _note_end(self, error: BaseException, model_name: str, began: float) -> None:
        """Reports the end of a call to the model's health checks. began: monotonic seconds."""
        waited_s = time.monotonic() - began
        is_left = isinstance(error, asyncio.CancelledError) and waited_s >= LONG_WAIT_S
        if is_left or isinstance(error, DeadlineExceeded):
            self._watch.note_late(model_name, waited_s)
        elif isinstance(error, BackendFailed) and not isinstance(error, OutOfMemory):
            self._watch.note_failed(model_name)

    def note_failed(self, model_name: str) -> None:
        """The engine failed a client's inference. Raises ModelUnavailable if the model's process is being replaced."""
        self._watch.note_failed(model_name)
        if (why := self._unavailable(model_name)) is not None:
            raise why

    def _unavailable(self, model_name: str) -> InferenceError | None:
        """Why the gateway does not serve the model at present; None if it does."""
        known = self._watch.models.get(model_name)
        return known.error if known is not None and known.unavailable in _REPLACED else None

    def _begin(self, call: object, model_name: str, began: float) -> None:
        self._unanswered[call] = model_name, began
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look_for_late)

    def _look_for_late(self) -> None:
        """Reports models whose oldest call waits long: a call without a deadline may never end."""
        now = time.monotonic()
        waits: dict[str, float] = {}
        for model_name, began in self._unanswered.values():
            if now - began < LONG_WAIT_S:
                break
            waits.setdefault(model_name, now - began)
        for model_name, waited_s in waits.items():
            self._watch.note_late(model_name, waited_s, is_waiting=True)
        self._look = None
        if self._unanswered:
            self._look = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look_for_late)

    def _leave(self, caller: Caller, size_bytes: int) -> None:
        self.admission.leave(size_bytes)
        if self._quotas is not None:
            self._quotas.leave(caller, size_bytes)

    def _held(self, head: InferHead, caller: Caller) -> AbstractContextManager[None]:
        """The shared memory that the request uses, kept until the engine has answered."""
        return self.memory.held(head.regions, caller) if head.regions else _NOTHING_HELD

    def _wait(self) -> "asyncio.Task[object]":
        """The task that runs is cut when the engine falls silent, until `_waited`."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("requests are served by tasks")
        self._waiting.add(task)
        return task

    def _waited(self, task: "asyncio.Task[object]", error: BaseException | None) -> BackendUnavailable | None:
        """What the task's work ends with, where not with its own error: it was cut, and nobody else cancelled it."""
        self._waiting.discard(task)
        reason = self._cut_for.pop(task, None)
        if reason is None or not isinstance(error, asyncio.CancelledError) or task.uncancel() > 0:
            return None
        return BackendUnavailable(f"the engine fell silent over this request: {reason}")

    def _cut(self, reason: str) -> None:
        for task in self._waiting:
            self._cut_for[task] = reason
            task.cancel()


# Classes, not generators: every inference passes here, and a generator takes twice as long.
class _Cuttable:
    """See Passage.cuttable."""

    __slots__ = ("_passage", "_task")

    def __init__(self, passage: Passage) -> None:
        self._passage = passage

    def __enter__(self) -> None:
        self._task = self._passage._wait()

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        cut = self._passage._waited(self._task, error)
        if cut is not None:
            raise cut from None


class _OtherWay:
    """A call that is no inference, on its way through."""

    __slots__ = ("_caller", "_head", "_passage", "_size_bytes", "_until", "_verb")

    def __init__(
        self, passage: Passage, verb: Verb, head: InferHead, caller: Caller, terms: tuple[int, float | None]
    ) -> None:
        """terms: size_bytes and until, see Passage.through."""
        self._passage, self._verb, self._head, self._caller = passage, verb, head, caller
        self._size_bytes, self._until = terms

    def __enter__(self) -> Self:
        self._passage._admit(self._verb, self._head, self._caller)
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, BackendUnavailable | OutOfMemory):
            self._passage._watch.suspect()

    def answered(self, is_done: bool | None) -> bool | None:
        """Notes the engine's answer and returns is_done: False if the engine failed, None if it refused the call."""
        return is_done


class _AdminWay(_OtherWay):
    """An admin action: however it ends, the audit log gets one line."""

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
            self._outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else InferenceError.reason
        self._record(self._outcome)
        super().__exit__(kind, error, trace)

    def answered(self, is_done: bool | None) -> bool | None:
        self._outcome = OK if is_done else BackendFailed.reason
        return is_done

    def _record(self, outcome: str) -> None:
        caller = self._caller
        self._passage.audit.record(caller.key_name, caller.address, self._verb, self._head.model_name, outcome)


class _InferenceWay(_OtherWay):
    """An inference on its way through: with a place, cut when the engine falls silent, and counted however it ends."""

    __slots__ = ("_began", "_held", "_task")

    def __enter__(self) -> Self:
        passage, head, until = self._passage, self._head, self._until
        passage._admit(self._verb, head, self._caller)
        passage.require_served(head)
        self._began = time.monotonic()
        if until is not None and until <= self._began:
            raise DeadlineExceeded("the deadline had passed when the request arrived; allow more time")
        passage._enter(self._caller, self._size_bytes)
        self._held: AbstractContextManager[None] = _NOTHING_HELD
        try:
            trace_arrival(passage.model_label(head.model_name))
            if head.regions:
                held = passage._held(head, self._caller)
                held.__enter__()
                self._held = held
            self._task = passage._wait()
            passage._begin(self, head.model_name, self._began)
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cut: InferenceError | None = self._passage._waited(self._task, error)
        if isinstance(error, BackendFailed):
            cut = self._passage._unavailable(self._head.model_name)
        if cut is not None:
            kind, error, trace = type(cut), cut, None
        try:
            if self._held is not _NOTHING_HELD:
                self._held.__exit__(kind, error, trace)
        finally:
            self._end(error)
        if cut is not None:
            raise cut from None

    def _end(self, error: BaseException | None) -> None:
        passage = self._passage
        passage._unanswered.pop(self, None)
        if error is None:
            passage._leave(self._caller, self._size_bytes)
            passage._metrics.inference_answered()
        else:
            when_free(error, partial(passage._leave, self._caller, self._size_bytes))
            passage._count_end(error, LeftAt.ENGINE, self._until)
            passage._note_end(error, self._head.model_name, self._began)
        super().__exit__(None, error, None)


def refuse_special_name(model_name: str) -> None:
    """Raises InvalidRequest for a model that Triton must not load: its Python backend puts the name into a shell line.

    model_name: as it stood on the wire, where a path may have it percent-encoded.
    """
    if is_special(model_name) or is_special(unquote(model_name)):
        raise InvalidRequest(
            f"a model named {unquote(model_name)!r} cannot be loaded; use no spaces and none of a shell's signs"
        )
