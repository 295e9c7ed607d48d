"""Two batches of an instance in flight: the next is on its way to the GPU while one is computed.

Triton's Python backend hands an instance one batch after another. With this, it gets the next one as soon as the batch
before the last is answered, and a thread of its own waits for the GPU and answers. So the GPU does not stand still
while Triton, the Python of an instance and the way between them take their turn.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
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
        self._begun: SimpleQueue[tuple[Begun, Any] | None] = SimpleQueue()  # None: that was all
        self._answered: SimpleQueue[None] = SimpleQueue()  # a word for each batch
        self._unanswered = 0  # as far as the thread that puts has heard
        self._thread = threading.Thread(target=self._answer_all, name="answers", daemon=True)
        self._thread.start()

    def put(self, asks: Sequence[Ask], whose: Any) -> None:
        """Begin a batch, and return when it is the only one that is not answered yet. Raises what begins it raises."""
        begun = self._instance.begin(asks, self._wait_until_all_are_answered)
        self._begun.put((begun, whose))
        self._unanswered += 1
        self._wait(MOST_UNANSWERED - 1)

    def close(self) -> None:
        """Answer what is in flight, and end."""
        self._begun.put(None)
        self._thread.join(_END_S)

    def _wait_until_all_are_answered(self) -> None:
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Until no more than so many batches are not answered."""
        while self._unanswered > most:
            self._answered.get()
            self._unanswered -= 1

    def _answer_all(self) -> None:
        self._enter()
        while (batch := self._begun.get()) is not None:
            self._answer(*batch)
            del batch  # tensors of requests, which else stayed until the next one
            self._answered.put(None)

    def _answer(self, begun: Begun, whose: Any) -> None:
        try:
            self._deliver(whose, self._finished(begun))
        except Exception as error:  # noqa: BLE001  the thread's root: without it no batch were answered any more
            self._report(error)

    def _finished(self, begun: Begun) -> list[Outcome] | Exception:
        try:
            return self._instance.finish(begun)
        except Exception as error:  # noqa: BLE001  a batch's failure is its own requests' answer
            return error  # kept in no variable here: its traceback would keep this frame, and the tensors, in a circle
