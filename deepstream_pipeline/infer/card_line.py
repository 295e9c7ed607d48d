"""To a gateway of this host by its gRPC port, for rows on the card: gathered into memory that the engine reads."""

import asyncio
from collections.abc import Sequence

import structlog

from deepstream_pipeline.errors import GpuFailed, InferFailed, InferRefused
from deepstream_pipeline.gpu.device import Device
from deepstream_pipeline.gpu.slab import LINGER_S, DeviceLease, DeviceSlab
from deepstream_pipeline.infer.copier import Copier
from deepstream_pipeline.infer.place import EnginePlace
from deepstream_pipeline.infer.remote_line import RemoteLine
from deepstream_pipeline.types import DeviceRow, RowArray
from server.backends.triton import REGION_UNKNOWN
from server.core.errors import BackendFailed, InferenceError, InvalidRequest
from server.core.infer import InferRequest, InferResponse
from server.core.model import ModelConfig
from server.core.slab import Slab
from server.core.tensor import Place

GATHER_S = 5.0  # copies of microseconds; a card that takes so long is stuck
CALLS = 8  # at least have room at once
_GONE_S = LINGER_S + 1.0  # what the region's end may take: a call that was given up keeps it so long
_PAUSE_S = 0.1
_TAKEN, _IN_USE = "already in manager", "currently in use"  # Triton's words, and the gateway's

log = structlog.get_logger(component="video")


class CardLine:
    """See Line. Make it inside the running loop.

    The engine is told of the memory with the first call, and again when it turns out not to know it: it was started
    again, or was rid of it after an hour without use.
    """

    def __init__(self, place: EnginePlace, device: Device, size_bytes: int) -> None:
        """size_bytes: of the memory. Raises GpuFailed where the card has not so much, InvalidRequest for an address
        that is none."""
        self._device = device
        self._slab = DeviceSlab(device, size_bytes, asyncio.get_running_loop().call_later)
        self._remote = RemoteLine(place, regions=(self._slab.name,))
        self._copier = Copier("card")
        self._turn = asyncio.Lock()
        self._registrations = 0
        self._is_stuck = self._is_failing = False
        self.is_lost = False  # the card does nothing more for this process

    @property
    def is_up(self) -> bool:
        return self._remote.is_up and not self._is_stuck

    @property
    def reason(self) -> str:
        return f"the card has not copied rows within {GATHER_S:g} s" if self._is_stuck else self._remote.reason

    @property
    def slab(self) -> Slab | None:
        return None

    @property
    def most_bytes(self) -> int:
        """Of one call."""
        return self._slab.size_bytes // CALLS

    async def run(self) -> None:
        await self._remote.run()

    async def until_up(self) -> None:
        await self._remote.until_up()

    async def config(self, model_name: str, version: str) -> ModelConfig:
        return await self._remote.config(model_name, version)

    async def infer(self, request: InferRequest) -> InferResponse:
        """See Line. Its inputs lie in leases of this line."""
        seen = self._registrations or await self._register(0)
        try:
            return await self._remote.infer(request)
        except InferenceError as error:
            if REGION_UNKNOWN not in error.message:
                raise
        await self._register(seen)
        return await self._remote.infer(request)

    async def gather(self, rows: Sequence[DeviceRow]) -> DeviceLease:
        """The rows one behind the other, where the engine reads them; they may be written again then.

        Raises InferRefused where there is no room, InferFailed where the card fails.
        """
        lease = self._lease(sum(row.nbytes for row in rows))
        copying = asyncio.get_running_loop().run_in_executor(self._copier, self._gather, rows, lease)
        await self._copied(copying, lease)
        return lease

    async def put(self, row: RowArray) -> tuple[DeviceRow, DeviceLease]:
        """A row of this machine's memory as one of the card's, and what keeps its place. Raises as `gather` does."""
        lease = self._lease(row.nbytes)
        copying = asyncio.get_running_loop().run_in_executor(self._copier, self._slab.write, row, lease)
        await self._copied(copying, lease)
        return DeviceRow(lease.address, row.shape, row.dtype), lease

    def place_of(self, lease: DeviceLease) -> Place:
        """As the engine finds it."""
        return Place(self._slab.name, 1, lease.offset)

    async def aclose(self) -> None:
        """After run has ended. The engine lets go of the memory before the card has it back."""
        if self._registrations:
            await self._unregister()
        await self._remote.aclose()
        if not self._is_stuck:  # else it goes with the process
            await self._close_slab()
        self._copier.shutdown()

    async def _close_slab(self) -> None:
        """In time, and whatever the card says: who ends has more to end."""
        closing = asyncio.get_running_loop().run_in_executor(self._copier, self._slab.close)
        try:
            async with asyncio.timeout(GATHER_S):
                await asyncio.shield(closing)
        except (GpuFailed, TimeoutError) as error:
            closing.add_done_callback(lambda done: None if done.cancelled() else done.exception())
            log.debug("memory of the card was not given back", reason=str(error))

    def _lease(self, size_bytes: int) -> DeviceLease:
        lease = self._slab.lease(size_bytes)
        if lease is None:
            raise InferRefused(
                f"{size_bytes} bytes of rows find no room in the {self._slab.size_bytes} bytes of the card's memory "
                "that the engine reads; fewer at once"
            )
        return lease

    def _gather(self, rows: Sequence[DeviceRow], lease: DeviceLease) -> None:
        """The copier's."""
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
        """Told when it begins: a context that is lost fails every copy from then on."""
        if not self._is_failing:
            meanwhile = (
                "rows go through the host from now on" if self.is_lost else "their frames are lost while it lasts"
            )
            log.warning(f"rows on the card cannot be copied; {meanwhile}", reason=error.message)
        self._is_failing = True

    def _give_up(self, copying: "asyncio.Future[None]", lease: DeviceLease) -> None:
        """What was copied for nobody is over."""
        if not copying.cancelled():
            copying.exception()
        self._is_stuck = False
        lease.release()

    async def _register(self, seen: int) -> int:
        """The engine knows the memory; which registration that is. One that is newer than `seen` will do."""
        async with self._turn:
            if self._registrations == seen:
                await self._tell()
                self._registrations += 1
                if seen:
                    log.info("the engine was told again of the card's memory", region=self._slab.name)
            return self._registrations

    async def _tell(self) -> None:
        slab = self._slab
        try:
            await self._remote.share(slab.name, slab.handle, slab.device_index, slab.size_bytes)
        except (InvalidRequest, BackendFailed) as error:
            if _TAKEN in error.message:  # by ours: nobody waited for the answer
                return
            raise type(error)(
                f"the engine cannot open memory of GPU {slab.device_index} ({error.message}): it must run on "
                "that card, on this host, and see it by that number"
            ) from error

    async def _unregister(self) -> None:
        """As well as it can be done in time: what is left goes with the connection."""
        try:
            async with asyncio.timeout(_GONE_S):
                while True:
                    if await self._is_unregistered():
                        return
                    await asyncio.sleep(_PAUSE_S)
        except (InferenceError, TimeoutError) as error:
            log.debug("the engine was not told that memory of the card goes", reason=str(error))

    async def _is_unregistered(self) -> bool:
        try:
            await self._remote.unshare(self._slab.name)
            return True
        except InferenceError as error:
            if _IN_USE not in error.message:
                raise
            return False
