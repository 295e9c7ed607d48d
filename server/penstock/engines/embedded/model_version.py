"""One loaded version of a model: session, instance slots and threads. The gateway forms its batches."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from tritonclient.grpc import model_config_pb2

from penstock.engines.embedded.statistics import RunTimes, VersionCounters
from penstock.engines.failures import means_out_of_memory
from penstock.engines.model_io import RequestRules
from penstock.engines.ort_serving.config import OrtDeviceLost, OrtRequestError
from penstock.engines.ort_serving.cudart import exit_after
from penstock.engines.ort_serving.placement import EngineFacts
from penstock.engines.ort_serving.session import OrtModel
from penstock.logs import get_logger
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
)
from penstock.protocol.inference import (
    Array,
    InferRequest,
    InferResponse,
    Tensor,
    Timings,
    tensor_from_bytes,
    tensor_from_numpy,
)

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0


class InstanceSlots:
    """Slots for `count` concurrent requests; max_waiting more may wait. Use on one event loop."""

    def __init__(self, model_name: str, *, count: int, max_waiting: int) -> None:
        self._model_name = model_name
        self._count = count
        self._max_waiting = max_waiting
        self._free = count
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._mean_run_s = 0.0

    @property
    def waiting(self) -> int:
        return sum(not waiter.done() for waiter in self._waiters)

    async def take(self, deadline: float | None) -> None:
        """Waits for a slot. deadline: monotonic seconds. Raises Overloaded, DeadlineExceeded, or `close`'s error."""
        if deadline is not None and deadline <= time.monotonic():
            raise DeadlineExceeded(f"the deadline passed before model {self._model_name!r} could be asked")
        if self._free > 0:
            self._free -= 1
            return
        waiting = self.waiting
        if waiting >= self._max_waiting:
            raise self._overloaded(waiting)
        await self._wait(deadline)

    def give_back(self, held_s: float) -> None:
        """Passes the slot to the next waiter, or frees it. held_s: for the estimate in Overloaded."""
        self._mean_run_s = held_s if self._mean_run_s == 0 else 0.8 * self._mean_run_s + 0.2 * held_s
        self._hand_on()

    def close(self, error: InferenceError) -> None:
        """Fails all waiters with the error."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)

    async def _wait(self, deadline: float | None) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        started = time.monotonic()
        try:
            async with asyncio.timeout(None if deadline is None else deadline - started):
                await waiter
        except TimeoutError:
            self._leave(waiter)
            raise DeadlineExceeded(
                f"the deadline passed while the request waited {time.monotonic() - started:.3f} s for an instance of "
                f"model {self._model_name!r} (it has {self._count})"
            ) from None
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _leave(self, waiter: "asyncio.Future[None]") -> None:
        """Removes the waiter; passes on a slot that it got at the same moment."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif not waiter.cancelled() and waiter.exception() is None:
            self._hand_on()

    def _hand_on(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1

    def _overloaded(self, waiting: int) -> Overloaded:
        wait_s = waiting * self._mean_run_s / self._count
        retry_after_s = min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)
        return Overloaded(
            f"{waiting} requests wait for an instance of model {self._model_name!r} (limit {self._max_waiting}); "
            f"retry after {retry_after_s:.1f} s",
            retry_after_s=retry_after_s,
        )


log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class OpenedVersion:
    """An opened version. config: completed. labels: by output name."""

    model_name: str
    version: int
    config: model_config_pb2.ModelConfig
    rules: RequestRules
    ort_model: OrtModel
    instance_count: int
    labels: Mapping[str, tuple[str, ...]]
    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class _Ran:
    outputs: tuple[Tensor, ...]
    times: RunTimes


class LoadedVersion:
    """Serves one version until it is retired. Use on the event loop. max_waiting: requests in the queue."""

    def __init__(self, opened: OpenedVersion, *, max_waiting: int) -> None:
        self.version = opened.version
        self.config = opened.config
        self.rules = opened.rules
        self.labels = opened.labels
        self.facts = opened.facts
        self.statistics = VersionCounters()
        self.drained = asyncio.Event()
        self._name = opened.model_name
        self._ort_model = opened.ort_model
        self._places = InstanceSlots(opened.model_name, count=opened.instance_count, max_waiting=max_waiting)
        self._threads = ThreadPoolExecutor(opened.instance_count, thread_name_prefix=f"model-{opened.model_name}")
        self._callers = 0
        self._runs: set[Run] = set()
        self._is_retired = False
        self._closed: EngineUnavailable | None = None

    @property
    def pending(self) -> int:
        """Requests that wait for an instance."""
        return self._places.waiting

    async def infer(self, request: InferRequest) -> InferResponse:
        """See Engine.infer. Cancellation or the deadline ends the run at its next node, and then frees its slot."""
        arrived = time.monotonic_ns()
        self._callers += 1
        try:
            rows = self.rules.check(request)
            try:
                await self._places.take(request.deadline)
                ran = await self._finish(Run(self._ort_model, self.rules, request), arrived)
            except (InferenceError, asyncio.CancelledError) as error:
                self.statistics.failed(error, time.monotonic_ns() - arrived)
                raise
            self.statistics.succeeded(rows, ran.times)
            return self._response(request, rows, ran)
        finally:
            self._callers -= 1
            self._release_if_idle()

    def retire(self) -> None:
        """Accepts no more requests. After the last one, frees the session and sets `drained`."""
        self._is_retired = True
        self._release_if_idle()

    def stop(self, error: EngineUnavailable) -> None:
        """Retires at once: runs end at their next node, and all requests get the error."""
        self._closed = error
        self._places.close(error)
        for run in self._runs:
            run.stop()
        self.retire()

    def abandon(self, error: EngineUnavailable) -> list["Run"]:
        """As `stop`, but clients of hanging runs get the error now. Returns those runs."""
        self.stop(error)
        runs = list(self._runs)
        for run in runs:
            if run.future is not None:
                run.future.cancel()  # the thread continues
        return runs

    async def _finish(self, run: "Run", arrived_ns: int) -> _Ran:
        """The run's result. The slot is given back when the thread ends, not when the wait does."""
        started = time.monotonic()
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, run.execute, arrived_ns)
        except RuntimeError as error:  # no thread can be started; the run stays queued for a later one
            run.stop()
            self._places.give_back(0.0)
            raise EngineUnavailable(f"model {self._name!r} cannot run: {error}") from error
        self._runs.add(run)
        run.future = future
        future.add_done_callback(partial(self._ended, run, started))
        deadline = run.request.deadline
        try:
            await asyncio.wait((future,), timeout=None if deadline is None else deadline - started)
        except asyncio.CancelledError:
            run.stop()
            raise
        if not future.done():
            run.stop()
            raise DeadlineExceeded(
                f"model {self._name!r} did not answer in time: it ran for {time.monotonic() - started:.3f} s"
            )
        if self._closed is not None:
            raise self._closed
        return future.result()

    def _ended(self, run: "Run", started: float, future: "asyncio.Future[_Ran]") -> None:
        self._runs.discard(run)
        self._places.give_back(time.monotonic() - started)
        if not future.cancelled():
            future.exception()  # marked as retrieved: the caller may have been cancelled
        self._release_if_idle()

    def _release_if_idle(self) -> None:
        if not self._is_retired or self._callers or self._runs or self.drained.is_set():
            return
        self.drained.set()
        try:
            self._threads.submit(self._free)
        except RuntimeError:  # no thread can be started: freed with this object
            log.warning("no thread to free a model in", model=self._name)
        self._threads.shutdown(wait=False)

    def _free(self) -> None:
        """Runs in a thread, because freeing a large session takes long."""
        memory = self._ort_model.memory
        self._ort_model.close()
        del self._ort_model
        if memory is not None:
            memory.release()

    def _response(self, request: InferRequest, rows: int, ran: _Ran) -> InferResponse:
        infer_ns = ran.times.total - ran.times.queue
        timings = Timings(queue=ran.times.queue / 1e9, infer=infer_ns / 1e9, batch_size=rows)
        return InferResponse(self._name, str(self.version), ran.outputs, request.id, timings=timings)


class Run:
    """One request in a thread of the version."""

    def __init__(self, ort_model: OrtModel, rules: RequestRules, request: InferRequest) -> None:
        self.request = request
        self._ort_model = ort_model
        self._rules = rules
        self._options = ort_model.run_options()
        self.future: asyncio.Future[_Ran] | None = None
        self.is_over = False

    def stop(self) -> None:
        """Ends the run at its next node and discards its error. Thread-safe."""
        self._options.terminate = True

    def execute(self, arrived_ns: int) -> _Ran:
        """Thread root, called once: raises only InferenceError."""
        try:
            return self._execute(arrived_ns)
        except OrtDeviceLost as error:
            log.error("the GPU is lost to this process, which ends and is started again", reason=str(error))
            exit_after()
            raise EngineUnavailable(f"model {self.request.model_name!r}: {error}") from error
        except OrtRequestError as error:
            raise _kind_of(error)(f"model {self.request.model_name!r}: {error}") from error
        except InferenceError:
            raise
        except MemoryError as error:
            raise OutOfMemory(
                f"model {self.request.model_name!r}: too little memory for the outputs; retry later, or send fewer rows"
            ) from error
        except Exception as error:
            log.exception("an inference failed in the engine", model=self.request.model_name)
            raise EngineFailed(
                f"model {self.request.model_name!r}: {type(error).__name__} in the engine, see the gateway's log"
            ) from error
        finally:
            self.is_over = True
            del self._ort_model  # the engine's list of hung runs must not keep the session and its memory

    def _execute(self, arrived_ns: int) -> _Ran:
        began = time.monotonic_ns()
        arrays = self._rules.arrays_of(self.request)
        names = self._rules.wanted(self.request)
        ready = time.monotonic_ns()
        results = self._ort_model.run(names, arrays, self._options)
        ran = time.monotonic_ns()
        outputs = tuple(self._tensor(name, array) for name, array in zip(names, results, strict=True))
        return _Ran(outputs, RunTimes(began - arrived_ns, ready - began, ran - ready, time.monotonic_ns() - ran))

    def _tensor(self, name: str, array: Array) -> Tensor:
        shaped = array.reshape(self._rules.shape_of_output(name, array.shape))
        if shaped.dtype.kind != "O":
            return tensor_from_numpy(name, shaped)
        return tensor_from_bytes(name, [text.encode() for text in shaped.ravel().tolist()], shaped.shape)


def _kind_of(error: OrtRequestError) -> type[InferenceError]:
    if error.is_client_error:
        return InvalidRequest
    return OutOfMemory if means_out_of_memory(str(error)) else EngineFailed
