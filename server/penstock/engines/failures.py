"""Decisions about failing engines: circuit breaker, silence, outlier ejection, out-of-memory errors. Sans-IO.

    CLOSED ── failures in a row ──► SUSPECT ── probe unanswered ──► OPEN ── pause over ──► HALF_OPEN
       ▲                               │                             ▲                        │
       └──────── answered ─────────────┘                             └─── probe unanswered ───┤
       └──────────────────────────────── probe answered ──────────────────────────────────────┘

Late calls alone do not open the circuit, because a slow model is not a dead engine: an unanswered probe does. One probe
runs at a time, and no client's call is used as a probe.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class CircuitState(Enum):
    """CLOSED and SUSPECT let calls through. OPEN and HALF_OPEN reject them at once."""

    CLOSED = "closed"
    SUSPECT = "suspect"
    OPEN = "open"
    HALF_OPEN = "half open"


CALM_S, BROKEN_CALM_S = 1.0, 0.1  # after an answered probe, ignore late calls, or broken connections
FIRST_PAUSE_S = 0.2  # between probes of an open circuit, then doubling


class CircuitBreaker:
    """failures: consecutive ones until SUSPECT. max_pause_s: between two probes. now: monotonic seconds."""

    def __init__(self, *, failures: int = 5, max_pause_s: float = 5.0) -> None:
        self._max_failures, self._max_pause_s = failures, max_pause_s
        self._pause_s = FIRST_PAUSE_S
        self._probe_at = 0.0
        self._answered_at: float | None = None
        self.state = CircuitState.CLOSED
        self.failures = 0
        self.openings = 0

    @property
    def is_passable(self) -> bool:
        """Whether calls may go through."""
        return self.state is CircuitState.CLOSED or self.state is CircuitState.SUSPECT

    @property
    def is_refuted(self) -> bool:
        """Whether a call or another probe has succeeded, so that an unanswered probe does not count."""
        return self.is_passable and self.failures == 0

    def answered(self) -> None:
        """A call was answered, with a result or an error."""
        self.failures = 0

    def failed(self, now: float, *, is_broken: bool = False) -> None:
        """A call was not answered. is_broken: connection lost, which gives SUSPECT at once; else the call was late."""
        calm_s = BROKEN_CALM_S if is_broken else CALM_S
        is_calm = self._answered_at is not None and now < self._answered_at + calm_s
        if self.state is not CircuitState.CLOSED or is_calm:
            return
        self.failures += 1
        if is_broken or self.failures >= self._max_failures:
            self.state = CircuitState.SUSPECT

    def is_probe_due(self, now: float) -> bool:
        """Whether to send a probe now; call `probing` when it is sent."""
        if self.state is CircuitState.OPEN:
            return now >= self._probe_at
        return self.state is CircuitState.SUSPECT

    def probing(self) -> None:
        """A probe was sent."""
        if self.state is CircuitState.OPEN:
            self.state = CircuitState.HALF_OPEN

    def probe_answered(self, now: float) -> None:
        """The engine answered a probe, due or not."""
        if self.state is not CircuitState.CLOSED:
            self._answered_at = now
            self.failures = 0
        self.state = CircuitState.CLOSED
        self._pause_s = FIRST_PAUSE_S

    def probe_unanswered(self, now: float) -> None:
        """A probe was not answered."""
        if self.is_passable:
            self.openings += 1
        self.state = CircuitState.OPEN
        self._probe_at = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, self._max_pause_s)


class SilenceAction(Enum):
    """What to do about a silent engine."""

    NOTHING = "nothing"
    CUT = "end the calls that wait for the engine"
    RESTART = "start the engine again"


class Silence:
    """Decides on an engine's silence: cuts calls once after cut_s, restarts every restart_s. now: monotonic seconds."""

    def __init__(self, *, cut_s: float, restart_s: float) -> None:
        self._cut_s = cut_s
        self._restart_s = restart_s
        self._since: float | None = None
        self._restart_at = 0.0
        self._is_cut = False

    def answered(self) -> None:
        """The engine answered."""
        self._since = None

    def probe_missed(self, now: float) -> SilenceAction:
        """A probe was not answered."""
        if self._since is None:
            self._since, self._restart_at, self._is_cut = now, now + self._restart_s, False
        if now >= self._restart_at:
            self._restart_at = now + self._restart_s
            return SilenceAction.RESTART
        if not self._is_cut and now - self._since >= self._cut_s:
            self._is_cut = True
            return SilenceAction.CUT
        return SilenceAction.NOTHING


# A replica is ejected after so many consecutive failures, or if a share of its recent calls failed. Either share must
# exceed that of the other replicas by MARGIN, because failures everywhere are not its fault.
OUTLIER_FAILURES = 5
MIN_CALLS, FAILING_SHARE, MARGIN = 20.0, 0.5, 0.3
HALF_LIFE_S = 10.0  # after which a call counts half
MAX_EJECTED_S = 300.0
FORGIVEN_S = 60.0  # in service, after which one ejection is forgotten
MAX_EJECTED_SHARE = 0.5  # of all replicas


@dataclass(slots=True)
class _ReplicaRecord:
    """good, bad: recent calls, decaying. is_on_trial: back from an ejection, without a good answer yet."""

    good: float = 0.0
    bad: float = 0.0
    faded_at: float = 0.0
    failures: int = 0
    is_ejected: bool = False
    until: float = 0.0
    ejections: int = 0
    level: int = 0
    is_on_trial: bool = False

    def rate(self) -> float:
        calls = self.good + self.bad
        return self.bad / calls if calls else 0.0


class Outliers:
    """Outlier ejection over `count` replicas, identified by index. now: monotonic seconds.

    first_s: duration of the first ejection; doubles each time, shortened randomly by up to a fifth. uniform: random
    numbers in [0, 1).
    """

    def __init__(self, count: int, *, first_s: float = 5.0, uniform: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._uniform = uniform
        self._records = [_ReplicaRecord() for _ in range(count)]
        self.is_calm = True  # none is ejected or on trial
        self._max_ejected = min(int(count * MAX_EJECTED_SHARE), count - 1)

    def is_ejected(self, index: int, now: float) -> bool:
        """Whether calls must go elsewhere. After its time the replica is on trial."""
        record = self._records[index]
        if record.is_ejected and now >= record.until:
            record.is_ejected, record.is_on_trial = False, True
            record.good = record.bad = 0.0
            record.failures = OUTLIER_FAILURES - 1
        return record.is_ejected

    def is_on_trial(self, index: int) -> bool:
        """Whether it is back from an ejection without a good answer yet; send it one call at a time."""
        return self._records[index].is_on_trial

    def succeeded(self, index: int, now: float) -> None:
        """A call was answered well."""
        record = self._faded(index, now)
        record.good += 1.0
        record.failures = 0
        if record.is_on_trial:
            record.is_on_trial = False
            self.is_calm = not any(other.is_ejected or other.is_on_trial for other in self._records)

    def failed(self, index: int, now: float) -> bool:
        """A call failed or was not answered. Returns whether that ejects the replica."""
        record = self._faded(index, now)
        record.bad += 1.0
        record.failures += 1
        if self.is_ejected(index, now) or not self._stands_out(index, now):
            return False
        if sum(self.is_ejected(other, now) for other in range(len(self._records))) >= self._max_ejected:
            return False
        self._eject(record, now)
        return True

    def try_again(self, index: int, now: float) -> None:
        """Ends the ejection of a replica that was restarted; it is then on trial."""
        record = self._records[index]
        if record.is_ejected:
            record.until = min(record.until, now)

    def ejections(self, index: int) -> int:
        """How often it was ejected."""
        return self._records[index].ejections

    def _stands_out(self, index: int, now: float) -> bool:
        record = self._records[index]
        is_in_a_row = record.failures >= OUTLIER_FAILURES
        is_often = record.good + record.bad >= MIN_CALLS and record.rate() >= FAILING_SHARE
        if not is_in_a_row and not is_often:
            return False
        rate = 1.0 if is_in_a_row else record.rate()  # good calls before the outage do not count
        others = [self._faded(other, now) for other in range(len(self._records)) if other != index]
        bad, good = sum(other.bad for other in others), sum(other.good for other in others)
        return rate >= (bad / (bad + good) if bad + good else 0.0) + MARGIN

    def _eject(self, record: _ReplicaRecord, now: float) -> None:
        if record.until:
            record.level = max(0, record.level - int(max(0.0, now - record.until) / FORGIVEN_S))
        seconds = min(self._first_s * 2.0 ** min(record.level, 60), MAX_EJECTED_S)
        record.is_ejected, record.is_on_trial, self.is_calm = True, False, False
        record.until = now + seconds * (1.0 - 0.2 * self._uniform())
        record.level += 1
        record.ejections += 1

    def _faded(self, index: int, now: float) -> _ReplicaRecord:
        record = self._records[index]
        passed_s = now - record.faded_at
        if passed_s > 0.1:  # saves a power function for each call
            keep = 0.5 ** (passed_s / HALF_LIFE_S)
            record.good, record.bad, record.faded_at = record.good * keep, record.bad * keep, now
        return record


# Error texts of: ONNX Runtime's arena and CUDA calls · torch, CUDA and TensorRT · cuBLAS and cuDNN · TensorFlow ·
# Triton's Python backend, whose tensors pass through /dev/shm · Python, numpy and C++
_OUT_OF_MEMORY = re.compile(
    r"failed to allocate memory|available memory of \d+ is smaller than requested bytes|cuda failure 2\b"
    r"|out[ _]of[ _]memory|cudaErrorMemoryAllocation|requested amount of gpu memory"
    r"|STATUS_ALLOC_FAILED"
    r"|\bOOM when allocating"
    r"|failed to increase the shared memory pool size|unable to initialize shared memory key"
    r"|failed to create new mapped region"
    r"|\bMemoryError\b|unable to allocate .{1,40} for an array|\bbad_alloc\b",
    re.IGNORECASE,
)

# Errors of Triton's Python backend with the region's key, up to the end of the JSON string or line.
_SHARED_MEMORY = re.compile(
    r"(?:failed to increase the shared memory pool size|unable to initialize shared memory key"
    r"|failed to create new mapped region)[^\"\n]*",
    re.IGNORECASE,
)
_SHARED_MEMORY_BYTES = re.compile(_SHARED_MEMORY.pattern.encode(), re.IGNORECASE)
_SHARED_MEMORY_MARK = b"shared memory"
SHARED_MEMORY_FULL = (
    "the engine has too little shared memory for this request; retry later, send less data, or give /dev/shm more room"
)


# Error texts of CUDA's runtime (torch, ONNX Runtime) and driver for a context or card that no call can use any more:
# docs.nvidia.com/cuda/cuda-runtime-api, errors after which "the process must be terminated and relaunched".
_CARD_FAULT = re.compile(
    r"CUDA failure (?:46|100|101|214|7(?:00|02|10|14|15|16|17|18|19)|999)\b"
    r"|cudaError(?:DevicesUnavailable|NoDevice|ECCUncorrectable|IllegalAddress|LaunchFailure|HardwareStackError"
    r"|MpsConnectionFailed|MpsRpcFailure|MpsServerNotReady|ContextIsDestroyed|Unknown)\b"
    r"|CUDA_ERROR_(?:DEVICE_UNAVAILABLE|NO_DEVICE|ECC_UNCORRECTABLE|ILLEGAL_ADDRESS|LAUNCH_FAILED|MPS_\w+"
    r"|CONTEXT_IS_DESTROYED|UNKNOWN|SYSTEM_NOT_READY)\b"
    r"|CUDA error: (?:an illegal memory access|unspecified launch failure|uncorrectable ECC error|unknown error"
    r"|no CUDA-capable device|all CUDA-capable devices are busy|hardware stack error|context is destroyed|MPS )"
    r"|GPU is lost|GPU has fallen off the bus",
    re.IGNORECASE,
)


def means_card_fault(reason: str) -> bool:
    """Whether the model's CUDA context is broken, so that another card may answer. reason: of a failed inference."""
    return _CARD_FAULT.search(reason) is not None


def means_out_of_memory(reason: str) -> bool:
    """Whether a smaller batch may succeed. reason: the engine's text of a failed inference."""
    return _OUT_OF_MEMORY.search(reason) is not None


def means_shared_memory_full(reason: str) -> bool:
    """Whether /dev/shm was full for Triton's Python backend. reason: the engine's text."""
    return _SHARED_MEMORY.search(reason) is not None


def redact_region_keys(piece: bytes) -> bytes:
    """The piece of an answer, with region keys removed from shared-memory errors."""
    return _SHARED_MEMORY_BYTES.sub(SHARED_MEMORY_FULL.encode(), piece) if _SHARED_MEMORY_MARK in piece else piece
