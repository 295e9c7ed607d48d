"""The engine as the pipeline's threads see it: rows in, answers back, on a thread with an event loop of its own."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import uvloop

from deepstream_pipeline.errors import GpuFailed, InferFailed, InferRefused
from deepstream_pipeline.gpu.device import Device
from deepstream_pipeline.infer.answer import Answer, failed
from deepstream_pipeline.infer.asking import ask_all, failure_of, find_network
from deepstream_pipeline.infer.calls import Call, Loaded, Row, calls_of, load
from deepstream_pipeline.infer.card_line import CardLine
from deepstream_pipeline.infer.gathering import gather_all, give_back
from deepstream_pipeline.infer.guest_line import GuestLine
from deepstream_pipeline.infer.hand_over import HandOver, HandOverChoice
from deepstream_pipeline.infer.line import Line
from deepstream_pipeline.infer.network import Network
from deepstream_pipeline.infer.outages import tell_outages
from deepstream_pipeline.infer.place import EnginePlace
from deepstream_pipeline.infer.remote_line import RemoteLine
from deepstream_pipeline.infer.trial import FIRST_S, TRIAL_S, memory_for, try_card, why_not
from deepstream_pipeline.types import DeviceRow
from server.core.errors import InferenceError

MAX_SUBMITTED = 64  # at once: who submits has bounds of its own, well below
MOST_BYTES = 32 << 20  # of one call; the gateway's limit of a message is twice that
NO_CARD = "rows lie on the card, and none of its memory is shared with the engine"
THREAD_S = 5.0  # what the thread gets to begin and to end

log = structlog.get_logger(component="video")


@dataclass(slots=True, eq=False)
class _Job:
    """What was submitted, until it is answered. refusal: it is not to be begun."""

    network: Network
    rows: Sequence[Row]
    deadline: float
    taken: Callable[[], None]
    done: Callable[[Answer], None]
    refusal: InferFailed | None = None
    is_taken: bool = False


@dataclass(slots=True)
class _Loop:
    """What lives while the thread does. card: of rows on the card, once it was tried. jobs: submitted, not answered."""

    loop: asyncio.AbstractEventLoop
    line: Line
    stop: asyncio.Event
    card: CardLine | None = None
    jobs: dict[_Job, None] = field(default_factory=dict)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)


def line_to(place: EnginePlace) -> Line:
    """As a guest where the stack is of this host, else by its ports. Inside the running loop."""
    return GuestLine(place.run_dir, place.http_url) if place.run_dir is not None else RemoteLine(place)


class Engine:
    """`start`, then `submit` from any thread, `network` from any but its own; `close` at the end, harmless again.

    The engine may go and come back meanwhile: what it had fails at once, what is submitted then fails at once, and
    what is submitted later is answered; `is_up` tells.
    """

    def __init__(self, place: EnginePlace, *, device: Device | None = None, max_submitted: int = MAX_SUBMITTED) -> None:
        """device: the card whose memory may be shared with the engine (`hand_over`); it outlives this."""
        self._place = place
        self._device = device
        self._max_submitted = max_submitted
        self._lock = threading.Lock()
        self._life: _Loop | None = None
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._failure: InferenceError | None = None

    @property
    def is_up(self) -> bool:
        """Whether the engine answers, as far as is known."""
        life = self._life
        return life is not None and life.line.is_up and (life.card is None or life.card.is_up)

    @property
    def reason(self) -> str:
        """Why it does not; empty while it does."""
        life = self._life
        if life is None:
            return "it is closed, or was not started"
        return life.line.reason or (life.card.reason if life.card is not None else "")

    @property
    def is_card_lost(self) -> bool:
        """Whether rows on the card can be handed over no more, as long as this program runs."""
        life = self._life
        return life is not None and life.card is not None and life.card.is_lost

    def start(self, timeout_s: float) -> None:
        """Returns when the engine has answered. Raises InferFailed, and is closed, where it does not in time."""
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
        """The model, waited for while it loads.

        Raises ModelUnusable where it is not there or is no image model, InferFailed where nobody answers in time.
        """
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

    def hand_over(self, network: Network, wish: HandOver) -> HandOverChoice:
        """Where the network's rows are to wait that a card makes; rows on the card are refused until it says so.

        From any thread but its own; within seconds. Raises InferFailed, with the reason, where DEVICE is wished and
        cannot be.
        """
        if wish is HandOver.HOST:
            return HandOverChoice(HandOver.HOST, "the settings say host")
        reason = self._why_not_on_card(network)
        if reason and wish is HandOver.DEVICE:
            raise InferFailed(f"rows cannot be handed over on the card: {reason}; or set gpu: hand-over: host")
        choice = HandOverChoice(HandOver.HOST, reason) if reason else HandOverChoice(HandOver.DEVICE)
        told = {"reason": reason} if reason else {}
        log.info("rows that the card makes are handed over", model=network.name, memory=choice.kind.value, **told)
        return choice

    def submit(
        self,
        network: Network,
        rows: Sequence[Row],
        *,
        deadline: float,
        taken: Callable[[], None],
        done: Callable[[Answer], None],
    ) -> None:
        """Rows without batch axis, of one shape or, where the network keeps sizes, of several. Never waits.

        deadline: monotonic seconds. taken: called once, when the rows are read. done: called once, after it. Both are
        called on the engine's thread, or, once that has ended, here; they must not block.
        """
        job = _Job(network, rows, deadline, taken, done)
        with self._lock:
            life = self._life
            if life is not None:
                if len(life.jobs) >= self._max_submitted:
                    job.refusal = InferRefused(f"{len(life.jobs)} batches are at the engine; submit fewer at once")
                life.jobs[job] = None
                life.loop.call_soon_threadsafe(self._begin, life, job)
                return
        _take(job)
        _call(job.done, failed(InferFailed("the engine is closed"), len(rows)))

    def close(self, timeout_s: float = THREAD_S) -> None:
        """What is not answered fails; every `done` has been called when this returns."""
        life, thread = self._life, self._thread
        if life is not None:
            life.loop.call_soon_threadsafe(life.stop.set)
        if thread is not None and thread.ident is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                log.error("the engine's thread does not end", seconds=timeout_s)

    def _why_not_on_card(self, network: Network) -> str:
        """What the trial says."""
        life, device = self._life, self._device
        if life is None:
            return f"the engine {self.reason}"
        if device is None:
            return "no card is in use"
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
        line, stop = line_to(self._place), asyncio.Event()
        life = _Loop(asyncio.get_running_loop(), line, stop)
        self._life = life
        self._begun.set()
        running, stopped = asyncio.create_task(line.run()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()  # it runs for ever, but for a bug of ours, which the thread's root tells
        finally:
            with self._lock:
                self._life = None
            await self._end(life, (running, stopped))

    async def _try_card(self, life: _Loop, device: Device, network: Network) -> str:
        """See try_card. The line stays where it goes well."""
        if life.card is not None:
            return await try_card(life.line, life.card, network)
        try:
            card = CardLine(self._place, device, memory_for(network))
        except (GpuFailed, InferenceError) as error:
            return error.message
        running = asyncio.create_task(card.run())
        reason = "it was given up"
        try:
            reason = await try_card(life.line, card, network)
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
        """From here on outages are told, also one that follows at once."""
        await life.line.until_up()
        life.tasks.add(asyncio.create_task(tell_outages(self, self._place.title)))

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
            calls = calls_of(job.network, job.rows, MOST_BYTES, life.card.most_bytes if life.card is not None else 0)
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
        """The root of a job's task."""
        try:
            if to_gather:
                loaded = (*loaded, *await self._gathered(life, job, loaded, to_gather))
            answer = await ask_all(loaded)
        except InferFailed as error:
            answer = failed(error, len(job.rows))
        except asyncio.CancelledError:
            answer = failed(InferFailed("the engine was closed"), len(job.rows))
        except Exception as unexpected:  # a bug of ours
            log.exception("rows could not be inferred")
            answer = failed(failure_of(unexpected), len(job.rows))
        self._finish(life, job, answer)

    @staticmethod
    async def _gathered(
        life: _Loop, job: _Job, loaded: Sequence[Loaded], to_gather: Sequence[Call]
    ) -> Sequence[Loaded]:
        """The rest of the job's calls; its rows are taken after it. Where it fails, what is loaded is given back."""
        try:
            if life.card is None:
                raise InferFailed(NO_CARD)
            gathered = await gather_all(job.network, job.rows, to_gather, life.card, job.deadline)
        except BaseException:
            give_back(loaded)
            raise
        _take(job)
        return gathered

    def _finish(self, life: _Loop, job: _Job, answer: Answer) -> None:
        with self._lock:
            if life.jobs.pop(job, job) is job:
                return
        _take(job)
        _call(job.done, answer)


def _refusal(job: _Job, life: _Loop) -> InferFailed | None:
    """Why the job is not worth beginning."""
    if not life.line.is_up:
        return InferFailed(f"the engine is not ready: {life.line.reason}")
    if any(isinstance(row, DeviceRow) for row in job.rows):
        if life.card is None:
            return InferFailed(NO_CARD)
        if not life.card.is_up:
            return InferFailed(f"the engine is not ready: {life.card.reason}")
    if job.deadline <= time.monotonic():
        return InferRefused("the deadline had passed when the rows were submitted")
    wrong = next((why for row in job.rows if (why := job.network.refusal_of(row))), "")
    return InferFailed(wrong or "no rows were submitted") if wrong or not job.rows else None


def _take(job: _Job) -> None:
    if not job.is_taken:
        job.is_taken = True
        _call(job.taken)


def _call(heard: Callable[..., None], *words: Answer) -> None:
    try:
        heard(*words)
    except Exception:  # another's code, on our thread
        log.exception("who was told of an answer failed unexpectedly")
