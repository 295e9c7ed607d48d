"""Client for rows in GPU memory that is shared with an engine on this host."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

import structlog

from penstock.engines.triton.client import REGION_UNKNOWN
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import EngineFailed, InferenceError, InvalidRequest
from penstock.protocol.inference import InferRequest, InferResponse, SlabAddress
from penstock.protocol.shared_memory import Slab
from penstock_video.errors import GpuFailed, InferFailed, InferRefused
from penstock_video.gpu.device import Device
from penstock_video.gpu.memory import LINGER_S, DeviceLease, DeviceSlab
from penstock_video.infer.calls import Call, Loaded, Row, gathered
from penstock_video.infer.clients import GatewayClient
from penstock_video.infer.network import Network
from penstock_video.infer.options import EngineAddress
from penstock_video.types import DeviceRow, RowArray

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Copier(Executor):
    """An executor with one thread, which program exit does not wait for, since a stuck GPU would block it."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> "Future[Result]":
        future: Future[Result] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the thread after its queue; does not wait for it."""
        self._calls.put(None)

    def _run(self, *_: Any) -> None:
        while (call := self._calls.get()) is not None:
            call()


GATHER_S = 5.0  # copies take microseconds; a GPU that takes this long is stuck
CALLS = 8  # minimum number of concurrent calls with room
_GONE_S = LINGER_S + 1.0  # for unregistration: an abandoned call delays it
_PAUSE_S = 0.1
_TAKEN, _IN_USE = "already in manager", "currently in use"  # Triton's messages, and the gateway's

log = structlog.get_logger(component="video")


class GpuMemoryClient:
    """See EngineClient. Create it inside the running loop. Registers the memory at the first call, and again if the
    engine lost it: by a restart, or after an hour without use."""

    def __init__(self, place: EngineAddress, device: Device, size_bytes: int) -> None:
        """size_bytes: of the memory. Raises GpuFailed if the GPU has too little, InvalidRequest for the address."""
        self._device = device
        self._slab = DeviceSlab(device, size_bytes, asyncio.get_running_loop().call_later)
        self._remote = GatewayClient(place, regions=(self._slab.name,))
        self._copier = Copier("card")
        self._turn = asyncio.Lock()
        self._registrations = 0
        self._is_stuck = self._is_failing = False
        self.is_lost = False  # the GPU is unusable for this process

    @property
    def is_up(self) -> bool:
        return self._remote.is_up and not self._is_stuck

    @property
    def reason(self) -> str:
        return f"the GPU has not copied rows within {GATHER_S:g} s" if self._is_stuck else self._remote.reason

    @property
    def slab(self) -> Slab | None:
        return None

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of one call."""
        return self._slab.size_bytes // CALLS

    async def run(self) -> None:
        await self._remote.run()

    async def until_up(self) -> None:
        await self._remote.until_up()

    async def config(self, model_name: str, version: str) -> ModelConfig:
        return await self._remote.config(model_name, version)

    async def infer(self, request: InferRequest) -> InferResponse:
        """See EngineClient. Inputs must be in leases of this client."""
        seen = self._registrations or await self._register(0)
        try:
            return await self._remote.infer(request)
        except InferenceError as error:
            if REGION_UNKNOWN not in error.message:
                raise
        await self._register(seen)
        return await self._remote.infer(request)

    async def gather(self, rows: Sequence[DeviceRow]) -> DeviceLease:
        """Copies the rows into shared memory. Raises InferRefused if there is no room, InferFailed if the GPU fails."""
        lease = self._lease(sum(row.nbytes for row in rows))
        copying = asyncio.get_running_loop().run_in_executor(self._copier, self._gather, rows, lease)
        await self._copied(copying, lease)
        return lease

    async def put(self, row: RowArray) -> tuple[DeviceRow, DeviceLease]:
        """A host row copied to the GPU, and its lease. Raises as `gather` does."""
        lease = self._lease(row.nbytes)
        copying = asyncio.get_running_loop().run_in_executor(self._copier, self._slab.write, row, lease)
        await self._copied(copying, lease)
        return DeviceRow(lease.address, row.shape, row.dtype), lease

    def place_of(self, lease: DeviceLease) -> SlabAddress:
        """The region and offset for the engine."""
        return SlabAddress(self._slab.name, 1, lease.offset)

    async def aclose(self) -> None:
        """Call it after run has ended. The engine releases the memory before it is freed."""
        if self._registrations:
            await self._unregister()
        await self._remote.aclose()
        if not self._is_stuck:  # else it is freed with the process
            await self._close_slab()
        self._copier.shutdown()

    async def _close_slab(self) -> None:
        """Closes the slab within a timeout, even if the GPU is stuck."""
        closing = asyncio.get_running_loop().run_in_executor(self._copier, self._slab.close)
        try:
            async with asyncio.timeout(GATHER_S):
                await asyncio.shield(closing)
        except (GpuFailed, TimeoutError) as error:
            closing.add_done_callback(lambda done: None if done.cancelled() else done.exception())
            log.debug("GPU memory was not freed", reason=str(error))

    def _lease(self, size_bytes: int) -> DeviceLease:
        lease = self._slab.lease(size_bytes)
        if lease is None:
            raise InferRefused(
                f"{size_bytes} bytes of rows do not fit into the {self._slab.size_bytes} bytes of GPU memory that the "
                "engine reads; send fewer rows at once"
            )
        return lease

    def _gather(self, rows: Sequence[DeviceRow], lease: DeviceLease) -> None:
        """Runs on the copier's thread."""
        try:
            self._slab.gather(rows, lease)
        except GpuFailed:
            self.is_lost = self.is_lost or self._device.is_lost()
            raise

    async def _copied(self, copying: "asyncio.Future[None]", lease: DeviceLease) -> None:
        try:
            async with asyncio.timeout(GATHER_S):
                await asyncio.shield(copying)
        except BaseException as error:
            copying.add_done_callback(lambda done: self._give_up(done, lease))
            if isinstance(error, TimeoutError):
                self._is_stuck = True
                raise InferFailed(self.reason) from error
            if isinstance(error, GpuFailed):
                self._note_failure(error)
                raise InferFailed(error.message) from error
            raise
        self._is_failing = False

    def _note_failure(self, error: GpuFailed) -> None:
        """Logs the first failure: a lost context fails every later copy."""
        if not self._is_failing:
            meanwhile = (
                "rows go through the host from now on" if self.is_lost else "their frames are lost while it lasts"
            )
            log.warning(f"rows in GPU memory cannot be copied; {meanwhile}", reason=error.message)
        self._is_failing = True

    def _give_up(self, copying: "asyncio.Future[None]", lease: DeviceLease) -> None:
        """Ends a copy that its caller abandoned."""
        if not copying.cancelled():
            copying.exception()
        self._is_stuck = False
        lease.release()

    async def _register(self, seen: int) -> int:
        """Registers the memory; returns the registration's number. A newer one than `seen` is reused."""
        async with self._turn:
            if self._registrations == seen:
                await self._tell()
                self._registrations += 1
                if seen:
                    log.info("re-registered CUDA shared memory", region=self._slab.name)
            return self._registrations

    async def _tell(self) -> None:
        slab = self._slab
        try:
            await self._remote.share(slab.name, slab.handle, slab.device_index, slab.size_bytes)
        except (InvalidRequest, EngineFailed) as error:
            if _TAKEN in error.message:  # by an earlier call of ours whose response was lost
                return
            raise type(error)(
                f"the engine cannot open memory of GPU {slab.device_index} ({error.message}): it must run on "
                "that GPU, on this host, and see it under that number"
            ) from error

    async def _unregister(self) -> None:
        """Unregisters within a timeout; otherwise the connection's end does."""
        try:
            async with asyncio.timeout(_GONE_S):
                while True:
                    if await self._is_unregistered():
                        return
                    await asyncio.sleep(_PAUSE_S)
        except (InferenceError, TimeoutError) as error:
            log.debug("CUDA shared memory was not unregistered", reason=str(error))

    async def _is_unregistered(self) -> bool:
        try:
            await self._remote.unshare(self._slab.name)
            return True
        except InferenceError as error:
            if _IN_USE not in error.message:
                raise
            return False


async def gather_all(
    network: Network, rows: Sequence[Row], calls: Sequence[Call], card: GpuMemoryClient, deadline: float
) -> list[Loaded]:
    """Calls for the rows on the GPU, all or none. The rows may be overwritten afterwards. Raises InferFailed."""
    loaded: list[Loaded] = []
    try:
        for call in calls:
            lease = await card.gather([row for index in call.members if isinstance(row := rows[index], DeviceRow)])
            loaded.append(gathered(network, call, card, card.place_of(lease), lease, deadline))
    except BaseException:
        give_back(loaded)
        raise
    return loaded


def give_back(loaded: Sequence[Loaded]) -> None:
    """Releases calls that were not sent."""
    for one in loaded:
        if one.lease is not None:
            one.lease.release()
