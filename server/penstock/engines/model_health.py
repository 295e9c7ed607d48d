"""Decides from canaries and clients' calls whether each model can serve. No I/O.

The canary decides, so that clients' bad inputs cannot make a model unavailable. Clients' calls only reschedule it:
earlier after failures or late calls, later after successes. A model without a usable canary (stateful, or zeros never
worked) is judged by clients' calls, and still gets every call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import ModelRefused, ModelUnavailable

TRAFFIC_FAILURES = 10
TRAFFIC_FAILING_S = 10.0
RETRY_S = 1.0  # between canaries of a failing model
MAX_RETRY_S = 30.0  # between canaries of a model that was restarted repeatedly
MAX_ROTATION = 6  # maximum canary intervals between two canaries of an idle model
RECENTLY_S = 10.0  # a model without a canary works if it served a call within this time
ENGINE_RESTART_HANGS = 2  # consecutive, of the only working model


class Cause(StrEnum):
    """Why a model is unavailable. A metric label."""

    HANG = "hang"
    CANARY = "canary"
    TRAFFIC = "traffic"
    TRIAL = "trial"  # at load; ended by another load, not by a canary
    STARTING = "starting"  # its first inference after a load is not answered yet


@dataclass(frozen=True, slots=True)
class Unavailable:
    """reason: one sentence for clients. since: monotonic seconds."""

    cause: Cause
    reason: str
    since: float


@dataclass(slots=True)
class _ModelRecord:
    checked_at: float  # end of the last canary
    has_canary: bool = True
    has_passed: bool = False  # since the load
    is_suspect: bool = False  # calls fail or are late, so the canary runs early
    running_since: float | None = None
    canary_failures: int = 0
    call_failures: int = 0
    failing_since: float = 0.0
    answered_at: float = float("-inf")
    served_at: float = float("-inf")
    restarts: int = 0  # since the canary last passed
    renewed_at: float = float("-inf")  # start of the model's current process
    unavailable: Unavailable | None = None


class ModelHealth:
    """The table of unavailable models. now: monotonic seconds. sent: the canary's start, to ignore a replaced process.

    limit: consecutive canary failures that make a model unavailable. interval_s: between two canaries; idle models take
    turns. changed: called with a model's name on a change of its availability.
    """

    def __init__(self, *, limit: int, interval_s: float, changed: Callable[[str], None]) -> None:
        self._limit = limit
        self._interval_s = interval_s
        self._retry_s = min(RETRY_S, interval_s)
        self._changed = changed
        self._records: dict[str, _ModelRecord] = {}

    def loaded(self, model_name: str, now: float) -> None:
        """The model was loaded or reloaded: its history is dropped."""
        self._records[model_name] = _ModelRecord(checked_at=now)

    def begun(self, model_name: str, now: float) -> None:
        """Its canary starts now, due or not."""
        self._records[model_name].running_since = now

    def renewed(self, model_name: str, now: float) -> None:
        """The model has a new process. Results of earlier canaries are ignored."""
        if (record := self._records.get(model_name)) is not None:
            record.renewed_at = record.checked_at = now
            record.running_since, record.canary_failures = None, 0

    def forget(self, model_name: str) -> None:
        """The model was unloaded."""
        self._records.pop(model_name, None)

    def reset(self) -> None:
        """The engine is down: the next one is a new process."""
        self._records.clear()

    def unavailable(self, model_name: str) -> Unavailable | None:
        """Why the model cannot serve; None if it can."""
        record = self._records.get(model_name)
        return record.unavailable if record is not None else None

    def is_known(self, model_name: str) -> bool:
        """Whether the model is loaded."""
        return model_name in self._records

    def may_hang(self, model_name: str) -> bool:
        """Whether it is unavailable, or its canary still runs."""
        record = self._records.get(model_name)
        return record is not None and (record.unavailable is not None or record.running_since is not None)

    def needs_proof(self, model_name: str) -> bool:
        """Whether it may have a canary, which has not passed since the load."""
        record = self._records.get(model_name)
        return record is not None and record.has_canary and not record.has_passed

    def mark(self, model_name: str, cause: Cause, reason: str, now: float) -> None:
        """Makes the model unavailable, unless it already is."""
        record = self._records.setdefault(model_name, _ModelRecord(checked_at=now))
        if record.unavailable is None:
            record.unavailable = Unavailable(cause, reason, now)
            self._changed(model_name)

    def due(self, now: float) -> list[str]:
        """Models whose canary should run now. Each runs until passed, failed, late, over or skipped is called."""
        rotation_s = self._interval_s * min(max(len(self._records), 1), MAX_ROTATION)
        names = [name for name, record in self._records.items() if self._is_due(record, now, rotation_s)]
        for name in names:
            self.begun(name, now)
        return names

    def skipped(self, model_name: str) -> None:
        """The model has no canary."""
        if (record := self._records.get(model_name)) is not None:
            record.has_canary, record.running_since = False, None

    def over(self, model_name: str, sent: float, now: float) -> None:
        """Its canary ended without evidence about the model."""
        self._checked(model_name, sent, now)

    def passed(self, model_name: str, sent: float, now: float) -> None:
        """Its canary succeeded."""
        if (record := self._checked(model_name, sent, now)) is not None:
            record.has_passed, record.restarts = True, 0
            self._served(model_name, record, now)

    def failed(self, model_name: str, why: str, sent: float, now: float) -> bool:
        """Its canary failed in the engine. Returns whether to restart the model; False if its canary never passed."""
        record = self._checked(model_name, sent, now)
        if record is None or not record.has_passed:
            return False
        record.answered_at = now
        record.canary_failures += 1
        if record.canary_failures % self._limit:
            return False
        record.restarts += 1
        reason = f"{record.canary_failures} canary inferences in a row failed, the last: {why}"
        self.mark(model_name, Cause.CANARY, reason, now)
        return True

    def late(self, model_name: str, timeout_s: float, sent: float, now: float) -> bool:
        """Its canary got no answer in timeout_s. Returns whether the model hangs: nothing else was answered."""
        record = self._checked(model_name, sent, now)
        if record is None or record.answered_at > sent:
            return False
        return self._hung(model_name, record, timeout_s, now)

    def served(self, model_name: str, now: float) -> None:
        """A client's inference succeeded."""
        if (record := self._records.get(model_name)) is not None:
            self._served(model_name, record, now)

    def call_failed(self, model_name: str, now: float) -> bool:
        """A client's valid inference failed in the engine. Returns whether a canary is due."""
        if (record := self._records.get(model_name)) is None:
            return False
        record.answered_at = now
        record.failing_since = record.failing_since if record.call_failures else now
        record.call_failures += 1
        if record.has_passed:
            return record.call_failures >= self._limit and self._suspect(record, now)
        failing_s = now - record.failing_since
        if record.call_failures >= TRAFFIC_FAILURES and failing_s >= TRAFFIC_FAILING_S:
            reason = f"its last {record.call_failures} inferences all failed in the engine, over {failing_s:.0f} s"
            self.mark(model_name, Cause.TRAFFIC, reason, now)
        return False

    def call_late(self, model_name: str, waited_s: float, now: float) -> bool:
        """A client's call ended without an answer. Returns whether the model's canary is due."""
        record = self._records.get(model_name)
        is_answering = record is None or record.answered_at > now - waited_s
        return not is_answering and record is not None and record.has_passed and self._suspect(record, now)

    def call_hung(self, model_name: str, waited_s: float, timeout_s: float, now: float) -> bool:
        """As call_late, for a model without a canary. Returns whether it hangs (no answer for timeout_s)."""
        record = self._records.get(model_name)
        if record is None or record.has_passed or waited_s < timeout_s:
            return False
        if max(record.answered_at, record.renewed_at) > now - waited_s:
            return False
        return self._hung(model_name, record, timeout_s, now)

    def sick_reason(self, model_name: str) -> str:
        """Why the whole engine must restart; empty if another model serves, or the model hangs for the first time."""
        record = self._records.get(model_name)
        why = record.unavailable if record is not None else None
        if record is None or why is None or (why.cause is Cause.HANG and record.restarts < ENGINE_RESTART_HANGS):
            return ""
        others = [one for one in self._records.values() if one is not record]
        recently = why.since - RECENTLY_S
        if any(one.unavailable is None and (one.has_passed or one.served_at > recently) for one in others):
            return ""
        return f"model {model_name!r}: {why.reason}, and no other model answers"

    def _hung(self, model_name: str, record: _ModelRecord, timeout_s: float, now: float) -> bool:
        record.restarts += 1
        self.mark(model_name, Cause.HANG, f"it answered nothing for {timeout_s:g} s (execution_timeout_ms)", now)
        return True

    def _checked(self, model_name: str, sent: float, now: float) -> _ModelRecord | None:
        """Ends its canary. Returns its record, or None if none ran or it was sent to an earlier process."""
        record = self._records.get(model_name)
        if record is None or record.running_since is None or sent < record.renewed_at:
            return None
        record.running_since, record.is_suspect, record.checked_at = None, False, now
        return record

    def _is_due(self, record: _ModelRecord, now: float, rotation_s: float) -> bool:
        why = record.unavailable
        if not record.has_canary or record.running_since is not None or (why is not None and why.cause is Cause.TRIAL):
            return False
        if why is not None or record.canary_failures or record.is_suspect:
            return now >= record.checked_at + self._pause_s(record)
        return now >= max(record.checked_at, record.served_at) + rotation_s

    def _pause_s(self, record: _ModelRecord) -> float:
        """Grows with each restart since the canary last passed."""
        return min(self._retry_s * 2.0 ** max(record.restarts - 1, 0), MAX_RETRY_S)

    def _suspect(self, record: _ModelRecord, now: float) -> bool:
        record.is_suspect = True
        return self._is_due(record, now, 0.0)

    def _served(self, model_name: str, record: _ModelRecord, now: float) -> None:
        record.answered_at = record.served_at = now
        record.canary_failures = record.call_failures = 0
        if record.unavailable is not None and record.unavailable.cause is not Cause.TRIAL:
            record.unavailable = None
            self._changed(model_name)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model as last seen."""

    name: str
    is_ready: bool
    reason: str = ""  # why it is not ready, for clients
    config: ModelConfig | None = None  # None if it was never loaded
    is_refused: bool = False  # not served, because its options are invalid
    unavailable: Cause | None = None

    @property
    def is_withheld(self) -> bool:
        """Whether the engine serves it, but the gateway does not."""
        return self.is_refused or self.unavailable is not None

    @property
    def error(self) -> ModelRefused | ModelUnavailable | None:
        """The error for its clients; None if it is not withheld."""
        if self.is_refused:
            return ModelRefused(self.reason)
        if self.unavailable is not None:
            wait_s = None if self.unavailable is Cause.TRIAL else 1.0  # a failed trial ends only with another load
            return ModelUnavailable(f"model {self.name!r} is unavailable: {self.reason}", retry_after_s=wait_s)
        return None

    def require_served(self) -> None:
        """Raises its error, unless only clients' calls can judge the model."""
        error = self.error
        if error is not None and self.unavailable is not Cause.TRAFFIC:
            raise error


class EngineView(Protocol):
    """The last known state of the engine and its models."""

    @property
    def is_up(self) -> bool:
        """Whether it answers and its canary inference succeeds."""
        ...

    @property
    def reason(self) -> str:
        """Why it is not up; empty while it is."""
        ...

    @property
    def generation(self) -> int:
        """How often it came up. A change means that its memory may be lost."""
        ...

    @property
    def models(self) -> Mapping[str, KnownModel]: ...

    @property
    def left_out(self) -> Mapping[str, str]:
        """Cards that serve nothing though the engine is up, by label, and why."""
        ...

    def when_silent(self, cut: Callable[[str], None]) -> None:
        """Registers a function to call, with the reason, when calls in flight will not be answered."""
        ...

    def suspect(self) -> None:
        """A call could not reach the engine."""
        ...

    def note_late(self, model_name: str, waited_s: float, *, is_waiting: bool = False) -> None:
        """A call ended after waited_s without an answer. is_waiting: it has not ended."""
        ...

    def note_failed(self, model_name: str) -> None:
        """A client's valid inference failed in the engine."""
        ...

    def note_served(self, model_name: str) -> None:
        """A client's inference succeeded."""
        ...

    async def note_loaded(self, model_name: str) -> None:
        """A client loaded a model."""
        ...

    def note_unloaded(self, model_name: str) -> None:
        """A client unloaded a model."""
        ...

    async def find(self, model_name: str) -> ModelConfig:
        """The config of a ready model. Raises ModelNotFound, ModelRefused."""
        ...
