"""One operation with its deadline and retries, as a sequence of attempts. Sans-IO."""

from typing import Generic, TypeVar

from penstock.client.operations import API_KEY_HEADER, TIMEOUT_HEADER, Operation
from penstock.client.options import ClientOptions
from penstock.client.replies import Attempt
from penstock.client.retries import delay_before_retry
from penstock.protocol.errors import DeadlineExceeded, InferenceError

T = TypeVar("T")


class Exchange(Generic[T]):
    """The state of one operation. Send what `attempt` returns; if that fails, wait `delay_s` and repeat."""

    def __init__(self, operation: Operation[T], options: ClientOptions, *, now: float, deadline: float) -> None:
        """now, deadline: monotonic seconds. A deadline of infinity means none: no deadline is sent to the gateway."""
        self._operation, self._options, self._deadline = operation, options, deadline
        wait_s = options.timeout_s if operation.max_wait_s is None else operation.max_wait_s
        self._until = min(deadline, now + wait_s)
        self._has_deadline = self._until == deadline
        self._number = 0

    def attempt(self, now: float) -> Attempt:
        """The next request. Raises DeadlineExceeded if the deadline has expired."""
        left_s = self._until - now
        if left_s <= 0:
            raise DeadlineExceeded(
                f"the deadline expired before the request to {self._options.url} was sent: allow more time"
            )
        headers = dict(self._operation.headers)
        if self._options.api_key:
            headers[API_KEY_HEADER] = self._options.api_key
        if self._has_deadline:
            headers[TIMEOUT_HEADER] = f"{left_s * 1e3:.3f}"
        return Attempt(self._operation, self._options.prefix + self._operation.target, headers, left_s)

    def delay_s(self, error: InferenceError, now: float) -> float:
        """Seconds to wait before the next attempt. Raises `error` if it must not be retried."""
        delay_s = delay_before_retry(
            error, self._operation, attempt=self._number, retries=self._options.retries, left_s=self._until - now
        )
        self._number += 1
        return delay_s
