"""Decodes images in child processes, off the event loop.

A crash, or too much CPU time, fails only its image, which is then quarantined. An image that times out is not, because
the host may be slow. The process is replaced in either case (about 0.15 s). Clients take turns.

Encoded bytes go through an anonymous memory file per process. The array is copied out, or written to a shared-memory
slab that the engine reads.

Errors must not refer to tasks or futures that refer back to them, nor have a TimeoutError as context: such a cycle
retains images of up to 60 MB until the garbage collector runs.
"""

import asyncio
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from penstock.engines.torch_serving.picture_header import MAX_PIXELS
from penstock.logs import get_logger
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InferenceError, Overloaded, UndecodableImage
from penstock.protocol.shared_memory import SLAB_FROM_BYTES, Lease, Slab
from penstock.vision.decoder_process import DecoderDied, DecoderProcess, PreparedImage
from penstock.vision.fair_queue import FairQueue, Quarantine
from penstock.vision.spec import PrepareSpec

__all__ = ["DecodePool", "PoolStatistics", "PreparedImage"]

_SHORTEST_RUN_S = 0.25  # minimum time before a process is killed, because a restart takes as long
_CPU_SHARE = 0.9  # share of an image's time limit: with so much CPU time, the host did not cause the delay
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# Signals that the image caused. SIGKILL is excluded: it may come from the OOM killer or an operator.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}

log = get_logger("decode")


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """waiting: images without a free process. restarts: processes replaced since start()."""

    waiting: int
    busy: int
    restarts: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class _QueuedImage:
    data: bytes | memoryview
    spec: PrepareSpec
    slab: Slab | None
    client: str
    deadline: float | None

    def lease(self) -> Lease | None:
        """Space in the slab for the array, or None if the array is small or the slab is full."""
        row_bytes = self.spec.row_bytes
        return self.slab.lease(row_bytes) if self.slab is not None and row_bytes >= SLAB_FROM_BYTES else None


class DecodePool:
    """`workers` decoder processes with a bounded queue, in which clients take turns.

    job_timeout_s: for one image, also limited by its deadline; then its process is killed. max_waiting: queue length.
    max_pixels: for one image; also bounds a process's memory.
    """

    def __init__(
        self, *, workers: int, job_timeout_s: float = 5.0, max_waiting: int = 512, max_pixels: int = MAX_PIXELS
    ) -> None:
        self._worker_count = workers
        self._job_timeout_s = job_timeout_s
        self._cpu_limit_s = _CPU_SHARE * job_timeout_s
        self._max_waiting = max_waiting
        self.max_pixels = max_pixels
        # Progressive coefficients, the pixels, a rotated copy and one float32 array, with a margin.
        self._memory_limit_bytes = (512 << 20) + 24 * max_pixels
        self._idle: list[DecoderProcess] = []
        self._turns = FairQueue[asyncio.Future[DecoderProcess]](workers)
        self._jobs: set[asyncio.Task[PreparedImage]] = set()
        self._supervisor_tasks: list[asyncio.Task[None]] = []
        self._quarantine = Quarantine()
        self._restarts = 0
        self._is_open = False

    async def start(self) -> None:
        """Starts all processes and waits until they are ready. Raises OSError or RuntimeError on failure."""
        starting = [asyncio.create_task(self._start_decoder()) for _ in range(self._worker_count)]
        results = await asyncio.gather(*starting, return_exceptions=True)
        decoders = [result for result in results if isinstance(result, DecoderProcess)]
        if len(decoders) < self._worker_count:
            await asyncio.gather(*(decoder.aclose() for decoder in decoders))
            reason = next(result for result in results if isinstance(result, BaseException))
            raise RuntimeError(f"a decoder process did not come up: {str(reason) or repr(reason)}") from reason
        self._is_open = True
        self._idle = decoders
        self._supervisor_tasks = [asyncio.create_task(self._keep(decoder)) for decoder in decoders]

    async def prepare(
        self,
        data: bytes | memoryview,
        spec: PrepareSpec,
        slab: Slab | None = None,
        *,
        client: str = "",
        deadline: float | None = None,
    ) -> PreparedImage:
        """Decodes and preprocesses one image.

        slab: where the array may be written without a copy; the caller releases its lease. client: for fair queueing.
        deadline: monotonic seconds. If the caller is cancelled, a started image is finished and discarded.
        Raises UnsupportedMedia, TooLarge, UndecodableImage, DeadlineExceeded; Overloaded if the queue is full, memory
        is short or the pool is closed; EngineUnavailable if something else killed the process.
        """
        if not self._is_open:
            raise Overloaded("the decoders are stopped", reason="draining")
        if self._quarantine.holds(data, time.monotonic()):
            raise UndecodableImage("this image has crashed or hung a decoder before; it is refused for ten minutes")
        decoder = await self._acquire(client, deadline)
        job = asyncio.create_task(self._run(decoder, _QueuedImage(data, spec, slab, client, deadline)))
        self._jobs.add(job)
        job.add_done_callback(self._done)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(_let_go)
            raise
        finally:
            del job  # avoids a reference cycle: its error's traceback refers to this frame

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(len(self._turns), len(self._jobs), self._restarts, len(self._quarantine))

    async def aclose(self) -> None:
        """Rejects waiting images and ends all processes, which fails running images."""
        self._is_open = False
        for slot in self._turns.clear():
            if not slot.done():
                slot.set_exception(Overloaded("the decoders are stopped", reason="draining"))
        for task in self._supervisor_tasks:
            task.cancel()
        await asyncio.gather(*self._supervisor_tasks, return_exceptions=True)
        await asyncio.gather(*self._jobs, return_exceptions=True)

    async def _acquire(self, client: str, deadline: float | None) -> DecoderProcess:
        slot: asyncio.Future[DecoderProcess] = asyncio.get_running_loop().create_future()
        self._turns.add(client, slot, time.monotonic())
        self._hand_over()
        if slot.done():
            return slot.result()
        if len(self._turns) > self._max_waiting:
            self._turns.remove(client, slot)
            raise Overloaded(f"{self._max_waiting} images wait for a decoder (limit {self._max_waiting}); retry later")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                    return await slot
        except asyncio.CancelledError:
            self._leave(client, slot)
            raise
        self._leave(client, slot)
        raise DeadlineExceeded("the deadline passed while the image waited for a decoder; allow more time")

    def _leave(self, client: str, slot: asyncio.Future[DecoderProcess]) -> None:
        self._turns.remove(client, slot)
        if slot.done() and not slot.cancelled() and slot.exception() is None:
            self._release(slot.result(), client, None)  # assigned just when the client stopped waiting

    def _done(self, job: "asyncio.Task[PreparedImage]") -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # the caller may be gone; asyncio logs errors that were never retrieved

    def _release(self, decoder: DecoderProcess, client: str, took_s: float | None) -> None:
        """took_s: how long the client used the decoder, or None if it did not use it."""
        self._turns.ended(client, time.monotonic(), took_s)
        self._add_idle(decoder)

    def _add_idle(self, decoder: DecoderProcess) -> None:
        if decoder.needs_replacement:
            decoder.kill()  # the pool starts another
        elif not decoder.is_gone and self._is_open:
            self._idle.append(decoder)
        self._hand_over()

    def _hand_over(self) -> None:
        self._idle = [decoder for decoder in self._idle if not decoder.is_gone]
        now = time.monotonic()
        while self._idle and (turn := self._turns.take(now)) is not None:
            client, slot = turn
            if slot.done():  # its client is leaving
                self._turns.ended(client, now, None)
            else:
                slot.set_result(self._idle.pop())

    async def _run(self, decoder: DecoderProcess, job: "_QueuedImage") -> PreparedImage:
        lease = job.lease()
        prepared: PreparedImage | None = None
        started = time.monotonic()
        longest_s = _longest(self._job_timeout_s, job.deadline, started)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(longest_s):
                    prepared = await decoder.prepare(job.data, job.spec, self.max_pixels, lease)
                    return prepared
            decoder.kill()
            await decoder.ended()
            raise _late(longest_s, is_deadline=longest_s < self._job_timeout_s)
        except DecoderDied:
            raise await self._blame(decoder, job.data) from None
        except OSError as error:
            what = f"no memory for an image of {len(job.data)} bytes ({error.strerror}); retry later"
            raise Overloaded(what) from error
        except InferenceError as error:
            if type(error) is InferenceError:
                log.error("decoder failed", error=error.message, size_bytes=len(job.data))
            raise
        finally:  # the lease is released only when the decoder can no longer write to it
            if lease is not None and (prepared is None or prepared.lease is None):
                lease.release()
            self._release(decoder, job.client, time.monotonic() - started)

    async def _blame(self, decoder: DecoderProcess, data: bytes | memoryview) -> InferenceError:
        status = await decoder.ended()
        if -status == signal.SIGPROF:
            return self._poison(data, f"the decoder used {self._cpu_limit_s:g} s of CPU time on this image")
        if -status in _CRASHES:
            return self._poison(data, f"the decoder died on this image ({signal.Signals(-status).name})")
        return EngineUnavailable("the decoder process was ended from outside; send the image again")

    def _poison(self, data: bytes | memoryview, what: str) -> UndecodableImage:
        self._quarantine.add(data, time.monotonic())
        log.warning("image quarantined", reason=what, size_bytes=len(data))
        return UndecodableImage(what)

    async def _keep(self, decoder: DecoderProcess) -> None:
        """Replaces a decoder whenever it ends."""
        try:
            while True:
                status = await decoder.ended()
                await decoder.aclose()
                self._restarts += 1
                if decoder.needs_replacement:
                    log.info("decoder uses too much memory; starting another", pid=decoder.pid)
                else:
                    log.warning("decoder died; starting another", pid=decoder.pid, status=status)
                decoder = await self._replacement()
                self._add_idle(decoder)
        finally:
            await decoder.aclose()

    async def _start_decoder(self) -> DecoderProcess:
        return await DecoderProcess.start(self._memory_limit_bytes, self._cpu_limit_s)

    async def _replacement(self) -> DecoderProcess:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._start_decoder()
            except (OSError, DecoderDied, TimeoutError) as error:
                log.error("no decoder process; trying again", error=repr(error), pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _longest(job_timeout_s: float, deadline: float | None, now: float) -> float:
    return job_timeout_s if deadline is None else min(job_timeout_s, max(deadline - now, _SHORTEST_RUN_S))


def _late(longest_s: float, *, is_deadline: bool) -> DeadlineExceeded:
    if is_deadline:
        return DeadlineExceeded("the deadline passed while the image was decoded; allow more time")
    what = f"the image was not decoded within {longest_s:g} s (decode_timeout_s)"
    return DeadlineExceeded(f"{what}: the host is busy, or the image is too large; retry later, or send a smaller one")


def _let_go(job: "asyncio.Task[PreparedImage]") -> None:
    """Releases the array's lease after the caller left."""
    if not job.cancelled() and job.exception() is None and (lease := job.result().lease) is not None:
        lease.release()
