"""The engine as the pipeline's threads use it: rows in, results back, on a thread with its own event loop."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import uvloop

from penstock.protocol.errors import InferenceError
from penstock.vision.preprocess import Geometry
from penstock_video.errors import GpuFailed, InferFailed, InferRefused
from penstock_video.gpu.device import Device
from penstock_video.infer.calls import (
    Call,
    EngineClient,
    Loaded,
    Row,
    RowsResult,
    calls_of,
    failed,
    failure_of,
    infer_all,
    load,
    refusal_of,
)
from penstock_video.infer.clients import GatewayClient, LocalStackClient, find_network, log_outages
from penstock_video.infer.gpu_client import GpuMemoryClient, gather_all, give_back
from penstock_video.infer.gpu_trial import FIRST_S, TRIAL_S, memory_for, try_gpu, why_not
from penstock_video.infer.network import Network
from penstock_video.infer.options import EngineAddress, RowMemory, RowMemoryChoice
from penstock_video.types import DeviceRow

MAX_SUBMITTED = 64  # at once; callers have lower limits
MOST_BYTES = 32 << 20  # of one call; the gateway's message limit is twice that
NO_CARD = "rows are in GPU memory, which is not shared with the engine"
THREAD_S = 5.0  # for the thread to begin and to end

log = structlog.get_logger(component="video")


@dataclass(slots=True, eq=False)
class _Job:
    """Submitted rows until they are answered. geometries: of each, if the model takes sizes. refusal: why not to start
    it."""

    network: Network
    rows: Sequence[Row]
    deadline: float
    taken: Callable[[], None]
    done: Callable[[RowsResult], None]
    geometries: Sequence[Geometry] = ()
    refusal: InferFailed | None = None
    is_taken: bool = False


@dataclass(slots=True)
class _Loop:
    """State of the running thread. card: for rows on the GPU, after a trial. jobs: submitted, not answered."""

    loop: asyncio.AbstractEventLoop
    line: EngineClient
    stop: asyncio.Event
    card: GpuMemoryClient | None = None
    jobs: dict[_Job, None] = field(default_factory=dict)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)


def client_for(place: EngineAddress) -> EngineClient:
    """Shared memory if the stack is on this host, else its ports. Call it inside the running loop."""
    return LocalStackClient(place.run_dir, place.http_url) if place.run_dir is not None else GatewayClient(place)


class Engine:
    """Call `start`, then `submit` from any thread, `network` from any but its own, and `close`. While the engine is
    away, pending and new submissions fail at once; see `is_up`."""

    def __init__(self, place: EngineAddress, *, device: Device | None = None) -> None:
        """device: the GPU whose memory may be shared with the engine (`hand_over`); it must outlive this."""
        self._place = place
        self._device = device
        self._lock = threading.Lock()
        self._life: _Loop | None = None
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._failure: InferenceError | None = None

    @property
    def is_up(self) -> bool:
        """Whether the engine answered the last check."""
        life = self._life
        return life is not None and life.line.is_up and (life.card is None or life.card.is_up)

    @property
    def reason(self) -> str:
        """Why it does not answer; empty if it does."""
        life = self._life
        if life is None:
            return "it is closed, or was not started"
        return life.line.reason or (life.card.reason if life.card is not None else "")

    @property
    def is_card_lost(self) -> bool:
        """Whether rows in GPU memory can no longer be used in this program."""
        life = self._life
        return life is not None and life.card is not None and life.card.is_lost

    def start(self, timeout_s: float) -> None:
        """Returns when the engine has answered. Closes itself and raises InferFailed on timeout."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._begun.wait(THREAD_S)
        life = self._life
        if life is None:
            why = self._failure.message if self._failure is not None else "its thread did not begin"
            raise InferFailed(f"no engine at {self._place.name}: {why}")
        try:
            asyncio.run_coroutine_threadsafe(self._first_answer(life), life.loop).result(timeout_s)
        except TimeoutError as error:
            reason = life.line.reason
            self.close()
            raise InferFailed(
                f"no engine at {self._place.name} within {timeout_s:g} s: {reason}; start one with `penstock up`"
            ) from error

    def network(self, name: str, timeout_s: float, version: str = "") -> Network:
        """The model; waits while it loads. Raises ModelUnusable, and InferFailed on timeout."""
        life = self._life
        if life is None:
            raise InferFailed(f"the engine {self.reason}")
        asked = asyncio.run_coroutine_threadsafe(find_network(life.line, name, version, timeout_s), life.loop)
        try:
            network = asked.result(timeout_s + THREAD_S)
        except TimeoutError as error:
            asked.cancel()
            raise InferFailed(f"the engine did not say within {timeout_s:g} s what model {name!r} is") from error
        if network.unmerged:
            log.warning("frames are not batched: each runs alone", model=name, reason=network.unmerged)
        return network

    def hand_over(self, network: Network, wish: RowMemory) -> RowMemoryChoice:
        """Memory for the network's rows, by a trial of seconds. Raises InferFailed if DEVICE is required."""
        if wish is RowMemory.HOST:
            return RowMemoryChoice(RowMemory.HOST, "the settings say host")
        reason = self._why_not_on_card(network)
        if reason and wish is RowMemory.DEVICE:
            raise InferFailed(f"rows cannot be passed in GPU memory: {reason}; or set gpu: hand-over: host")
        choice = RowMemoryChoice(RowMemory.HOST, reason) if reason else RowMemoryChoice(RowMemory.DEVICE)
        why = {"reason": reason} if reason else {}
        log.info("the engine gets rows that the GPU prepared", model=network.name, memory=choice.kind.value, **why)
        return choice

    def submit(
        self,
        network: Network,
        rows: Sequence[Row],
        *,
        deadline: float,
        taken: Callable[[], None],
        done: Callable[[RowsResult], None],
        geometries: Sequence[Geometry] = (),
    ) -> None:
        """Submits rows without batch axis, of equal shape unless the network keeps sizes. Never waits. deadline:
        monotonic seconds. taken: called once, when the rows were read. done: called once, after it. Both run on the
        engine's thread, or the caller's once that has ended, and must not block. geometries: of each row, if the
        network takes sizes."""
        job = _Job(network, rows, deadline, taken, done, geometries)
        with self._lock:
            life = self._life
            if life is not None:
                if len(life.jobs) >= MAX_SUBMITTED:
                    job.refusal = InferRefused(f"{len(life.jobs)} batches are at the engine; submit fewer at once")
                life.jobs[job] = None
                life.loop.call_soon_threadsafe(self._begin, life, job)
                return
        _take(job)
        _call(job.done, failed(InferFailed("the engine is closed"), len(rows)))

    def close(self, timeout_s: float = THREAD_S) -> None:
        """Fails unanswered rows; every `done` has been called when this returns."""
        life, thread = self._life, self._thread
        if life is not None:
            life.loop.call_soon_threadsafe(life.stop.set)
        if thread is not None and thread.ident is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                log.error("the engine's thread does not end", seconds=timeout_s)

    def _why_not_on_card(self, network: Network) -> str:
        """Why rows cannot be on the GPU, by a trial."""
        life, device = self._life, self._device
        if life is None:
            return f"the engine {self.reason}"
        if device is None:
            return "no GPU is in use"
        ruled_out = why_not(self._place, network)
        if ruled_out:
            return ruled_out
        tried = asyncio.run_coroutine_threadsafe(self._try_card(life, device, network), life.loop)
        try:
            return tried.result(FIRST_S + TRIAL_S + THREAD_S)
        except TimeoutError:
            tried.cancel()
            return "the trial did not end in time"

    # the engine's thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._live())
        except InferenceError as error:
            self._failure = error
        except Exception:  # the thread's root
            log.exception("the engine's thread failed unexpectedly")
        finally:
            self._begun.set()

    async def _live(self) -> None:
        line, stop = client_for(self._place), asyncio.Event()
        life = _Loop(asyncio.get_running_loop(), line, stop)
        self._life = life
        self._begun.set()
        running, stopped = asyncio.create_task(line.run()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()  # it ends only by a bug, which is raised here
        finally:
            with self._lock:
                self._life = None
            await self._end(life, (running, stopped))

    async def _try_card(self, life: _Loop, device: Device, network: Network) -> str:
        """See try_gpu. Keeps the client on success."""
        if life.card is not None:
            return await try_gpu(life.line, life.card, network)
        try:
            card = GpuMemoryClient(self._place, device, memory_for(network))
        except (GpuFailed, InferenceError) as error:
            return error.message
        running = asyncio.create_task(card.run())
        reason = "it was given up"
        try:
            reason = await try_gpu(life.line, card, network)
        finally:
            if reason:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                await card.aclose()
            else:
                life.card = card
                life.tasks.add(running)
        return reason

    async def _first_answer(self, life: _Loop) -> None:
        """Logs outages from the first response on."""
        await life.line.until_up()
        life.tasks.add(asyncio.create_task(log_outages(self, self._place.title)))

    async def _end(self, life: _Loop, tasks: Sequence["asyncio.Task[object]"]) -> None:
        for task in (*life.tasks, *tasks):
            task.cancel()
        await asyncio.gather(*life.tasks, *tasks, return_exceptions=True)
        if life.card is not None:
            await life.card.aclose()
        await life.line.aclose()
        for job in list(life.jobs):
            self._finish(life, job, failed(InferFailed("the engine was closed"), len(job.rows)))

    def _begin(self, life: _Loop, job: _Job) -> None:
        if job not in life.jobs:
            return
        error = job.refusal or _refusal(job, life)
        if error is not None:
            self._finish(life, job, failed(error, len(job.rows)))
            return
        try:
            most_card_bytes = life.card.most_bytes if life.card is not None else 0
            calls = calls_of(job.network, job.rows, MOST_BYTES, most_card_bytes, geometries=job.geometries)
            to_gather = [call for call in calls if call.is_on_card]
            to_load = [call for call in calls if not call.is_on_card]
            loaded = [load(job.network, job.rows, call, life.line, job.deadline) for call in to_load]
        except Exception as unexpected:  # a job's root
            log.exception("rows could not be copied")
            self._finish(life, job, failed(InferFailed(f"rows could not be copied: {unexpected}"), len(job.rows)))
            return
        if not to_gather:
            _take(job)
        task = life.loop.create_task(self._serve(life, job, loaded, to_gather))
        life.tasks.add(task)
        task.add_done_callback(life.tasks.discard)

    async def _serve(self, life: _Loop, job: _Job, loaded: Sequence[Loaded], to_gather: Sequence[Call]) -> None:
        try:
            if to_gather:
                loaded = (*loaded, *await self._gathered(life, job, loaded, to_gather))
            answer = await infer_all(loaded)
        except InferFailed as error:
            answer = failed(error, len(job.rows))
        except asyncio.CancelledError:
            answer = failed(InferFailed("the engine was closed"), len(job.rows))
        except Exception as unexpected:  # an internal error
            log.exception("rows could not be inferred")
            answer = failed(failure_of(unexpected), len(job.rows))
        self._finish(life, job, answer)

    @staticmethod
    async def _gathered(
        life: _Loop, job: _Job, loaded: Sequence[Loaded], to_gather: Sequence[Call]
    ) -> Sequence[Loaded]:
        """The job's remaining calls, with its rows gathered. Releases loaded calls on failure."""
        try:
            if life.card is None:
                raise InferFailed(NO_CARD)
            gathered = await gather_all(job.network, job.rows, to_gather, life.card, job.deadline)
        except BaseException:
            give_back(loaded)
            raise
        _take(job)
        return gathered

    def _finish(self, life: _Loop, job: _Job, answer: RowsResult) -> None:
        with self._lock:
            if life.jobs.pop(job, job) is job:
                return
        _take(job)
        _call(job.done, answer)


def _refusal(job: _Job, life: _Loop) -> InferFailed | None:
    """Why the job need not be started."""
    if not life.line.is_up:
        return InferFailed(f"the engine is not ready: {life.line.reason}")
    if any(isinstance(row, DeviceRow) for row in job.rows):
        if life.card is None:
            return InferFailed(NO_CARD)
        if not life.card.is_up:
            return InferFailed(f"the engine is not ready: {life.card.reason}")
    if job.deadline <= time.monotonic():
        return InferRefused("the deadline had passed when the rows were submitted")
    wrong = next((why for row in job.rows if (why := refusal_of(job.network, row))), "")
    return InferFailed(wrong or "no rows were submitted") if wrong or not job.rows else None


def _take(job: _Job) -> None:
    if not job.is_taken:
        job.is_taken = True
        _call(job.taken)


def _call(callback: Callable[..., None], *results: RowsResult) -> None:
    try:
        callback(*results)
    except Exception:  # foreign code on our thread
        log.exception("the callback of an answer failed unexpectedly")
