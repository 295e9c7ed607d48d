"""Decoding off the event loop, in child processes that a bad image may kill without anyone else noticing.

A crash or a hang fails the one image that caused it; the process is replaced (about 0.15 s) and the image is remembered
and refused at once when it comes again. Nothing lies in /dev/shm by a name: the bytes travel in anonymous memory files,
one a process, and the array is copied out once, so that no process waits for a slow consumer; or it is written where
the engine reads it, into the slab, and not copied at all.

Measured on two cores of an AMD EPYC that other work shared, Python 3.11, uvloop, a 640 x 480 JPEG of 91 kB to
(3, 352, 352) float32, medians of 250 interleaved images, five runs: in this process 1.78-2.00 ms, through the pool
2.10-2.44 ms. The way there and back is 0.35-0.44 ms of that (0.27 at best), 0.26 ms of CPU in this process, 0.09 of
them for copying the array. Two processes, four callers: 495-888 images/s, where one loop in this process made 513-600.
"""

import asyncio
import contextlib
import signal
import time
from collections import deque
from dataclasses import dataclass

from server.core.errors import BackendUnavailable, InferenceError, Overloaded, UndecodableImage
from server.core.slab import SLAB_FROM_BYTES, Slab
from server.logs import get_logger
from server.vision.decode import DEFAULT_MAX_PIXELS
from server.vision.decoder import Decoder, DecoderDied, Prepared
from server.vision.quarantine import Quarantine
from server.vision.spec import PrepareSpec

__all__ = ["DecodePool", "PoolStatistics", "Prepared"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# Deaths that nobody but the image is to blame for. SIGKILL is not among them: it may be the OOM killer or an operator.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}

log = get_logger("decode")


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """waiting: images for which no process was free. restarts: processes replaced since start()."""

    waiting: int
    busy: int
    restarts: int
    quarantined: int


class DecodePool:
    """`workers` decoder processes and a bounded queue in front of them, first come, first served.

    job_timeout_s: after this long over one image a process is killed. max_waiting: images that may wait for a process.
    max_pixels: an image's limit; it also bounds the memory that a process may take.
    """

    def __init__(
        self,
        *,
        workers: int,
        job_timeout_s: float = 5.0,
        max_waiting: int = 512,
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> None:
        self._worker_count = workers
        self._job_timeout_s = job_timeout_s
        self._max_waiting = max_waiting
        self.max_pixels = max_pixels
        # Progressive coefficients, the pixels, a turned copy and one float32 array, with room to spare.
        self._memory_limit_bytes = (512 << 20) + 24 * max_pixels
        self._idle: list[Decoder] = []
        self._waiting: deque[asyncio.Future[Decoder]] = deque()
        self._jobs: set[asyncio.Task[Prepared]] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._quarantine = Quarantine()
        self._restarts = 0
        self._is_open = False

    async def start(self) -> None:
        """Returns when every process is ready. Raises OSError or RuntimeError where they do not come up."""
        starting = [asyncio.create_task(Decoder.start(self._memory_limit_bytes)) for _ in range(self._worker_count)]
        results = await asyncio.gather(*starting, return_exceptions=True)
        decoders = [result for result in results if isinstance(result, Decoder)]
        if len(decoders) < self._worker_count:
            await asyncio.gather(*(decoder.aclose() for decoder in decoders))
            reason = next(result for result in results if isinstance(result, BaseException))
            raise RuntimeError(f"a decoder process did not come up: {str(reason) or repr(reason)}") from reason
        self._is_open = True
        self._idle = decoders
        self._keepers = [asyncio.create_task(self._keep(decoder)) for decoder in decoders]

    async def prepare(self, data: bytes | memoryview, spec: PrepareSpec, slab: Slab | None = None) -> Prepared:
        """Decodes and preprocesses one image. A cancelled caller gives up its place; a started image is finished for
        nobody.

        slab: where the array may lie, without having been copied; what came with a lease is the caller's to release.
        Raises UnsupportedMedia, TooLarge, UndecodableImage; Overloaded where the queue is full, memory is short or the
        pool is closed; BackendUnavailable where the process was killed from outside.
        """
        if not self._is_open:
            raise Overloaded("the decoders are stopped", reason="draining")
        if self._quarantine.holds(data, time.monotonic()):
            raise UndecodableImage("this image has crashed or hung a decoder before; it is refused for ten minutes")
        decoder = await self._acquire()
        job = asyncio.create_task(self._run(decoder, data, spec, slab))
        self._jobs.add(job)
        job.add_done_callback(self._done)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(_let_go)
            raise

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(len(self._waiting), len(self._jobs), self._restarts, len(self._quarantine))

    async def aclose(self) -> None:
        """Refuses what waits, drops what runs, and leaves no process behind."""
        self._is_open = False
        for place in self._waiting:
            if not place.done():
                place.set_exception(Overloaded("the decoders are stopped", reason="draining"))
        self._waiting.clear()
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*self._jobs, return_exceptions=True)

    async def _acquire(self) -> Decoder:
        while self._idle:
            decoder = self._idle.pop()
            if not decoder.is_gone:
                return decoder
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} images wait for a decoder (limit {self._max_waiting}); retry later")
        place: asyncio.Future[Decoder] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.cancelled():
                with contextlib.suppress(ValueError):  # _release() may have passed over it already
                    self._waiting.remove(place)
            elif place.exception() is None:  # it was handed over in the moment in which the caller left
                self._release(place.result())
            raise

    def _done(self, job: "asyncio.Task[Prepared]") -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # its caller may have left; asyncio complains of an error that nobody has looked at

    def _release(self, decoder: Decoder) -> None:
        if decoder.is_gone or not self._is_open:
            return
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(decoder)
                return
        self._idle.append(decoder)

    async def _run(self, decoder: Decoder, data: bytes | memoryview, spec: PrepareSpec, slab: Slab | None) -> Prepared:
        lease = slab.lease(spec.row_bytes) if slab is not None and spec.row_bytes >= SLAB_FROM_BYTES else None
        prepared: Prepared | None = None
        try:
            async with asyncio.timeout(self._job_timeout_s):
                prepared = await decoder.prepare(data, spec, self.max_pixels, lease)
            return prepared
        except TimeoutError:
            decoder.kill()
            await decoder.ended()
            raise self._poison(data, f"the decoder hung on this image for {self._job_timeout_s:g} s") from None
        except DecoderDied:
            raise await self._blame(decoder, data) from None
        except OSError as error:
            raise Overloaded(f"no memory for an image of {len(data)} bytes ({error.strerror}); retry later") from error
        except InferenceError as error:
            if type(error) is InferenceError:
                log.error("decoder failed", error=error.message, size_bytes=len(data))
            raise
        finally:  # what a decoder may still write to is leased: it has answered, or it has ended
            if lease is not None and (prepared is None or prepared.lease is None):
                lease.release()
            self._release(decoder)

    async def _blame(self, decoder: Decoder, data: bytes | memoryview) -> InferenceError:
        status = await decoder.ended()
        if -status in _CRASHES:
            return self._poison(data, f"the decoder died on this image ({signal.Signals(-status).name})")
        return BackendUnavailable("the decoder process was ended from outside; send the image again")

    def _poison(self, data: bytes | memoryview, what: str) -> UndecodableImage:
        self._quarantine.add(data, time.monotonic())
        log.warning("image quarantined", reason=what, size_bytes=len(data))
        return UndecodableImage(what)

    async def _keep(self, decoder: Decoder) -> None:
        """One place in the pool: whoever dies in it is replaced."""
        try:
            while True:
                status = await decoder.ended()
                await decoder.aclose()
                self._restarts += 1
                log.warning("decoder died; starting another", pid=decoder.pid, status=status)
                decoder = await self._replacement()
                self._release(decoder)
        finally:
            await decoder.aclose()

    async def _replacement(self) -> Decoder:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await Decoder.start(self._memory_limit_bytes)
            except (OSError, DecoderDied, TimeoutError) as error:
                log.error("no decoder process; trying again", error=repr(error), pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _let_go(job: "asyncio.Task[Prepared]") -> None:
    """Nobody waits for the array any more."""
    if not job.cancelled() and job.exception() is None and (lease := job.result().lease) is not None:
        lease.release()
