"""An answer on its way to its reader: counted until it is taken, and given up where nobody takes it.

gRPC takes an answer from us at once and keeps it, and the request with it, as long as its client opens no window.
"""

import asyncio
from collections.abc import Callable

from server.admission import Admission
from server.grpc.sturdy import GIVEN_UP

WATCHED_FROM_BYTES = 16 << 10
LEAST_BYTES_PER_S = 256 << 10


def watch_reader(admission: Admission, size_bytes: int, patience_s: float, given_up: Callable[[], None]) -> None:
    """To be called by the task that serves the call, right before it ends with the answer.

    size_bytes: of the answer and its request, in flight until the reader has the answer. patience_s: how long that may
    take, and a second more for each LEAST_BYTES_PER_S; then the call ends as CANCELLED, and given_up is told.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("calls are served by tasks")

    def give_up() -> None:
        given_up()
        task.cancel(GIVEN_UP)

    timer = asyncio.get_running_loop().call_later(patience_s + size_bytes / LEAST_BYTES_PER_S, give_up)

    def taken(_: object) -> None:
        timer.cancel()
        admission.release(size_bytes)

    admission.hold(size_bytes)
    task.add_done_callback(taken)
