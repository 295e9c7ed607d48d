"""Two batches of an instance in flight: the next is on its way to the GPU while one is computed.

Triton's Python backend hands an instance one batch after another. With this, it gets the next one as soon as the batch
before the last is answered, and a thread of its own waits for the GPU and answers. So the GPU does not stand still
while Triton, the Python of an instance and the way between them take their turn.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .instance import Ask, Begun, Instance, Outcome

MOST_UNANSWERED = 2
_END_S = 10.0  # for what is in flight when the model is unloaded

# (what `put` was given for the batch, one outcome a request in order, or what went wrong with all of them)
Deliver = Callable[[Any, "list[Outcome] | Exception"], None]


class Pipeline:
    """`put` by the thread that made the instance; the rest is called by a thread of the pipeline's own.

    deliver: batch for batch, in order; report: what deliver raised; enter: once, before all else.
    """

    def __init__(
        self,
        instance: Instance,
        deliver: Deliver,
        *,
        report: Callable[[Exception], object],
        enter: Callable[[], object] = lambda: None,
    ) -> None:
        self._instance = instance
        self._deliver = deliver
        self._report = report
        self._enter = enter
        self._unanswered: deque[tuple[Begun, Any]] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._answer_all, name="answers", daemon=True)
        self._thread.start()

    def put(self, asks: Sequence[Ask], whose: Any) -> None:
        """Begin a batch, and return when it is the only one that is not answered yet. Raises what begins it raises."""
        begun = self._instance.begin(asks, self._wait_until_all_are_answered)
        with self._changed:
            self._unanswered.append((begun, whose))
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._unanswered) < MOST_UNANSWERED)

    def close(self) -> None:
        """Answer what is in flight, and end."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(_END_S)

    def _wait_until_all_are_answered(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered)

    def _answer_all(self) -> None:
        self._enter()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._unanswered) or self._is_over)
                if not self._unanswered:
                    return
                begun, whose = self._unanswered[0]
            self._answer(begun, whose)
            del begun, whose  # tensors of requests, which else stayed until the next batch
            with self._changed:
                self._unanswered.popleft()
                self._changed.notify_all()

    def _answer(self, begun: Begun, whose: Any) -> None:
        outcomes: list[Outcome] | Exception
        try:
            outcomes = self._instance.finish(begun)
        except Exception as error:  # noqa: BLE001  a batch's failure is its own requests' answer
            outcomes = error
        try:
            self._deliver(whose, outcomes)
        except Exception as error:  # noqa: BLE001  the thread's root: without it no batch were answered any more
            self._report(error)
