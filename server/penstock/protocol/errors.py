"""The error tree of the gateway and its client, with raisers and HTTP status (error_codes.py); retry delays."""

import math
import random
import re


class InferenceError(Exception):
    """A request failed. The message reaches the client: value and fix, no secret. reason: for logs and metrics."""

    reason = "internal"
    retry_after_s: float | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(InferenceError):
    """Malformed, wrong names, shapes or counts, an undecodable image. By codecs, vision, dataplane. 400."""

    reason = "invalid"


class UndecodableImage(InvalidRequest):
    """An image of a known format whose bytes cannot be decoded. By vision. 400."""

    reason = "undecodable_image"


class TooLarge(InvalidRequest):
    """Body, decompressed body or pixels over the limit. By rest, grpc, vision. 413 / RESOURCE_EXHAUSTED."""

    reason = "too_large"


class UnsupportedMedia(InvalidRequest):
    """Not a supported image format. By rest and vision. 415 / INVALID_ARGUMENT."""

    reason = "unsupported_media"


class HostNotAllowed(InvalidRequest):
    """A client without a key uses a Host name that is not the server's. By port_policy. 421."""

    reason = "host_not_allowed"


class BodyTooSlow(InvalidRequest):
    """The body did not arrive in time. By rest. 408."""

    reason = "body_too_slow"


class Unauthenticated(InferenceError):
    """No API key or token, or an unknown one. By auth. 401 / UNAUTHENTICATED."""

    reason = "unauthenticated"
    client = ""


class AccessUnavailable(InferenceError):
    """The key or token cannot be verified now. By auth. 503 with Retry-After."""

    reason = "access_unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PermissionDenied(InferenceError):
    """The client's roles do not allow this. By auth. 403 / PERMISSION_DENIED. client: its name, if it has one."""

    reason = "permission_denied"

    def __init__(self, message: str, *, client: str = "") -> None:
        super().__init__(message)
        self.client = client


class OriginNotAllowed(PermissionDenied):
    """A page of another origin made a browser send the request. By port_policy. 403."""

    reason = "origin_not_allowed"


class QuotaExceeded(InferenceError):
    """The client's rate or share is used up. By auth. 429 / RESOURCE_EXHAUSTED, with Retry-After."""

    reason = "quota"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelNotFound(InferenceError):
    """No such model or version. By dataplane and backends; not retried, and no sign of a failing engine. 404."""

    reason = "model_not_found"


class ModelRefused(ModelNotFound):
    """The model's options are invalid, so it is not served; retrying does not help. By admission. 404, like Triton."""

    reason = "model_refused"


class RegionNotFound(ModelNotFound):
    """No such shared-memory region, or none that this client may use. By shared_memory and backends. 404."""

    reason = "region_not_found"


class LoadRunNotFound(ModelNotFound):
    """No such load test run, or it has no such file. By load. 404."""

    reason = "load_run_not_found"


class Conflict(InferenceError):
    """Another operation of the kind is under way, and there can be only one. By load. 409 / ABORTED."""

    reason = "conflict"


class RegionTaken(InvalidRequest):
    """A shared-memory region of that name is registered. By shared_memory. 400 / ALREADY_EXISTS."""

    reason = "region_taken"


class ModelNotReady(InferenceError):
    """Known, but not loaded or still loading. By dataplane and backends. 503."""

    reason = "model_not_ready"


class ModelUnavailable(ModelNotReady):
    """The model is loaded but hangs or fails; other models are served. 503, with Retry-After if waiting helps."""

    reason = "model_unavailable"

    def __init__(self, message: str, *, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(InferenceError):
    """The engine is down, restarting, or the connection to it broke. By backends. 503 with Retry-After."""

    reason = "engine_down"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(InferenceError):
    """A limit is reached, or the gateway drains. By admission. 503 with Retry-After. reason: such as `full`."""

    def __init__(self, message: str, *, reason: str = "full", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class StorageFull(InferenceError):
    """The disk has no room for an uploaded model. By model_uploads, model_adder. 507 / RESOURCE_EXHAUSTED."""

    reason = "storage_full"


class DeadlineExceeded(InferenceError):
    """The request's deadline passed, at any stage. By dataplane and backends. 504."""

    reason = "deadline"


class NotSupported(InferenceError):
    """The gateway or this engine cannot do that. By rest, grpc, backends. 501 / UNIMPLEMENTED."""

    reason = "not_supported"


class EngineFailed(InferenceError):
    """The engine returned an error, or output that does not match the model. By backends and vision. 500."""

    reason = "engine_failed"


class OutOfMemory(EngineFailed):
    """The engine had too little memory for the call; fewer rows may fit. By backends. 503 / RESOURCE_EXHAUSTED."""

    reason = "engine_out_of_memory"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConnectionFailed(InferenceError):
    """No usable answer: the connection broke, TLS failed, or the server is not a gateway. By client.

    was_sent: whether the gateway may have received the request. is_transient: whether another attempt may succeed.
    """

    reason = "connection_failed"

    def __init__(self, message: str, *, was_sent: bool = True, is_transient: bool = False) -> None:
        super().__init__(message)
        self.was_sent, self.is_transient = was_sent, is_transient


class GatewayUnreachable(ConnectionFailed):
    """Nothing listens at the gateway's address. By client."""

    reason = "unreachable"

    def __init__(self, message: str) -> None:
        super().__init__(message, was_sent=False, is_transient=True)


_OPENCV_NO_MEMORY = -4  # cv2.error.code
_NO_THREAD = "can't start new thread"  # of RuntimeError


def error_for_client(error: BaseException) -> InferenceError:
    """The client's error for an unexpected exception: Overloaded for too little memory, else "internal error".

    Python, NumPy and OpenCV each have their own exception for too little memory of this process.
    """
    is_opencv = type(error).__module__ == "cv2" and getattr(error, "code", 0) == _OPENCV_NO_MEMORY
    if is_opencv or isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD):
        text = "the gateway has too little memory for this request; retry later, or send fewer or smaller pictures"
        return Overloaded(text, reason="memory")
    return InferenceError("internal error")


MAX_SPREAD_S = 5.0


def retry_after_s(known_s: float) -> float:
    """A random delay from known_s to twice that, at most MAX_SPREAD_S later, rounded to milliseconds."""
    return round(known_s + random.uniform(0.0, min(known_s, MAX_SPREAD_S)), 3)


def retry_after_whole_s(known_s: float) -> int:
    """The same in whole seconds, at least 1, as for HTTP's Retry-After."""
    least = max(1, math.ceil(known_s))
    return random.randint(least, least + min(least, int(MAX_SPREAD_S)))


MAX_REASON_LENGTH = 500
_TRACEBACK_MARK = "\n\nAt:\n"


_TRACEBACK = re.compile(r"\n\nAt:\n(?: .*(?:\n|$))*")


def without_traceback(text: str) -> str:
    """An engine's text without the Python tracebacks of its backends, which have paths."""
    return _TRACEBACK.sub("", text)


def reason_line(text: str) -> str:
    """An engine's reason on one line, without the Python traceback, at most MAX_REASON_LENGTH characters."""
    line = " ".join(text.partition(_TRACEBACK_MARK)[0].split()).rstrip("; ")
    return line if len(line) <= MAX_REASON_LENGTH else f"{line[:MAX_REASON_LENGTH]}…"
