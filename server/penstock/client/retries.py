"""Which failed requests are retried, and after what delay. Sans-IO."""

import random

from penstock.client.operations import Operation
from penstock.protocol.error_codes import codes_of
from penstock.protocol.errors import ConnectionFailed, DeadlineExceeded, InferenceError

BASE_S, LONGEST_S = 0.1, 2.0
_UNAVAILABLE = 503


def delay_before_retry(
    error: InferenceError, operation: Operation[object], *, attempt: int, retries: int, left_s: float
) -> float:
    """Seconds to wait before a retry. attempt: 0 for the first one. left_s: until the deadline.

    Raises `error` if a retry cannot help, would miss the deadline, or might repeat a request that is not idempotent.
    """
    if attempt >= retries or not _may_retry(error, operation):
        raise error
    backoff_s: float = random.uniform(0.5, 1.0) * min(LONGEST_S, BASE_S * 2.0**attempt)
    delay_s = max(backoff_s, error.retry_after_s or 0.0)
    if delay_s >= left_s:
        raise error
    return delay_s


def _may_retry(error: InferenceError, operation: Operation[object]) -> bool:
    if isinstance(error, ConnectionFailed):
        return error.is_transient and (operation.is_idempotent or not error.was_sent)
    if isinstance(error, DeadlineExceeded):
        return False
    return operation.is_idempotent and codes_of(error).http == _UNAVAILABLE and error.retry_after_s is not None
