"""Parts of the core's slab for workers and client processes, and limits of client processes."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.gateway.workers.slab import SharedSlab, SlabLease, SlabPart, map_slab_part
from penstock.gateway.workers.slab_registration import RegionReader
from penstock.logs import get_logger
from penstock.protocol.errors import EngineUnavailable, InvalidRequest
from penstock.protocol.inference import Datatype, InferRequest, SlabAddress, Tensor
from penstock.protocol.shared_memory import SLAB_FROM_BYTES, Lease, Slab

MAX_CLIENT_PROCESSES = 8
MAX_CLIENT_CALLS = 256  # inferences in flight of one client process
MAX_DEADLINE_S = 24 * 3600.0  # a later one counts as none, as over gRPC
MAX_NAME = 64  # characters of a client process's name
GREETING_BYTES = 4096  # limit of the first message, which identifies the peer
GREETING_S = 5.0  # time until it arrives
MAX_CLIENT_MESSAGE_BYTES = 128 << 20  # without a part of the slab: a 4K picture in floats has 95 MiB
CLIENT_UNREAD_BYTES = 64 << 20  # unread answers of a client process; beyond, its requests are rejected
CLIENT_STALLED_BYTES = CLIENT_UNREAD_BYTES + (4 << 20)  # beyond, the connection is closed
USE_AGAIN_S = 1.0  # a part's region that an engine has lost; the core registers it again within LOOK_S
CLIENT_SLAB_PARTS = 2  # of the slab, for one engine; later client processes send every byte until one is free
_PART_DIVISOR = 4  # of the gateway's own slab: 64 MiB of its 256


def client_slab_part_bytes(slab_bytes: int) -> int:
    """Size of a client process's part, for a gateway whose own slab has this size."""
    return slab_bytes // _PART_DIVISOR


def client_slab_parts(engine_count: int) -> int:
    """Number of parts. The core copies all rows of a client process without one, and cannot do so for several cards."""
    return CLIENT_SLAB_PARTS if engine_count < 2 else MAX_CLIENT_PROCESSES


def slab_bytes_with_client_parts(slab_bytes: int, engine_count: int = 1) -> int:
    """Size of the memory for the gateway's own slab and the client processes' parts."""
    return slab_bytes + client_slab_parts(engine_count) * client_slab_part_bytes(slab_bytes)


_LEFT_OUT = memoryview(b"")
_LENGTH_BYTES = 4  # before an element of BYTES
log = get_logger("slab")


@dataclass(frozen=True, slots=True)
class _GrantedPart:
    region: str
    generation: int
    lease: SlabLease


class SlabPartitions:
    """The core's side. part_bytes: of each worker. client_part_bytes: of each client process, 0 for no parts."""

    def __init__(
        self, slab: SharedSlab, part_bytes: int, client_part_bytes: int = 0, client_parts: int = CLIENT_SLAB_PARTS
    ) -> None:
        self._slab = slab
        self._part_bytes = part_bytes
        self._client_part_bytes = client_part_bytes
        self._most_client_parts = client_parts
        self._parts: dict[Hashable, _GrantedPart] = {}
        self._client_parts: list[_GrantedPart] = []

    def due(self, peer: Hashable, *, is_client_process: bool = False) -> SlabPart | None:
        """A part for a peer that has none of the current memory; None if it has one, or there is no room."""
        generation = self._slab.generation
        part = self._parts.get(peer)
        if not generation or (part is not None and part.generation == generation):
            return None
        found = self._grant_to_client(generation) if is_client_process else self._slab.grant_part(self._part_bytes)
        if found is None:
            return None
        lent, lease = found
        self._parts[peer] = _GrantedPart(lent.region, generation, lease)
        if is_client_process:
            self._client_parts.append(self._parts[peer])
        return lent

    def _grant_to_client(self, generation: int) -> tuple[SlabPart, SlabLease] | None:
        """A new part, or None at the limit. A part of an ended process counts while it is read."""
        self._client_parts = [
            part for part in self._client_parts if part.generation == generation and part.lease.is_held
        ]
        if not self._client_part_bytes or len(self._client_parts) >= self._most_client_parts:
            return None
        granted = self._slab.grant_part(self._client_part_bytes)
        return None if granted is None else (replace(granted[0], token=b""), granted[1])

    def gone(self, peer: Hashable) -> None:
        """Frees the part of an ended peer when the engine has read it."""
        part = self._parts.pop(peer, None)
        if part is not None:
            part.lease.release_later()

    def in_full(self, request: InferRequest, peer: Hashable) -> InferRequest:
        """The request with the bytes of tensors passed by address. Raises EngineUnavailable, InvalidRequest."""
        if not [tensor for tensor in request.inputs if tensor.place is not None]:
            return request
        part = self._parts.get(peer)
        return InferRequest(  # on the hot path, where `replace` costs more than twice as much
            request.model_name,
            tuple([self._found(tensor, part) for tensor in request.inputs]),
            request.model_version,
            request.id,
            request.outputs,
            request.parameters,
            request.deadline,
            request.metadata,
        )

    def _found(self, tensor: Tensor, part: _GrantedPart | None) -> Tensor:
        place = tensor.place
        if place is None:
            return tensor
        if tensor.data.nbytes:
            return replace(tensor, place=None)  # else the engine would read there instead of these bytes
        generation = self._slab.generation
        if part is None or not place.generation == part.generation == generation or place.region != part.region:
            if self._slab.lease_of(place) is None:
                raise EngineUnavailable("the engine was restarted while the request was on its way; send it again")
            raise InvalidRequest(f"tensor {tensor.name!r} is outside of its sender's part of the slab")
        size_bytes = self._size_bytes(tensor, place)
        if not part.lease.holds(place.offset, size_bytes):
            raise InvalidRequest(f"tensor {tensor.name!r} is outside of its sender's part of the slab")
        return Tensor(tensor.name, tensor.datatype, tensor.shape, self._slab.window(place, size_bytes), place)

    def _size_bytes(self, tensor: Tensor, place: SlabAddress) -> int:
        """BYTES may have a single element there, an encoded picture, after its length."""
        element_bytes = tensor.datatype.size_bytes
        if element_bytes is not None:
            return tensor.element_count * element_bytes
        if tensor.element_count != 1:
            raise InvalidRequest(f"tensor {tensor.name!r} is BYTES: send its elements, or the address of a single one")
        return _LENGTH_BYTES + int.from_bytes(self._slab.window(place, _LENGTH_BYTES), "little")


class ClientSlab(SharedSlab):
    """A peer's side: room in its part of the core's slab. readers: its own connections to engines, if any."""

    def __init__(
        self, call_later: Callable[[float, Callable[[], None]], object], readers: Sequence[RegionReader] = ()
    ) -> None:
        super().__init__(call_later)
        self._readers = readers
        self._region = ""

    def borrow(self, lent: SlabPart) -> None:
        """Leases from this part from now on."""
        self.forget()
        try:
            memory = map_slab_part(lent)
        except OSError as error:
            log.warning("cannot map the core's shared memory; sending all bytes", reason=error.strerror)
            return
        self.renew(memory, lent.generation, lent.token)
        self._region = lent.region
        for reader in self._readers:
            self._use(reader, lent.region)

    def _use(self, reader: RegionReader, region: str) -> None:
        """An engine that lost the region gets bytes, until the core has registered it there again."""

        def lost() -> None:
            self._call_later(USE_AGAIN_S, partial(self._use, reader, region))

        if region == self._region:
            reader.use_region(region, lost)

    def forget(self) -> None:
        """Leases nothing from now on, because the core or the engine is gone."""
        self.renounce()
        for reader in self._readers if self._region else ():
            reader.drop_region(self._region)
        self._region = ""


def move_to_slab(request: InferRequest, slab: Slab) -> tuple[InferRequest, list[Lease]]:
    """The request with tensors in the slab replaced by their addresses, and the leases to release after the call."""
    leases: list[Lease] = []
    try:
        inputs = tuple([_tensor_to_slab(tensor, slab, leases) for tensor in request.inputs])
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    return (replace(request, inputs=inputs), leases) if leases else (request, leases)


def _tensor_to_slab(tensor: Tensor, slab: Slab, leases: list[Lease]) -> Tensor:
    size_bytes = tensor.data.nbytes
    lease = slab.lease_of(tensor.place) if tensor.place is not None else None
    if lease is not None:
        lease.hold()
        leases.append(lease)
    else:
        is_sent = size_bytes < SLAB_FROM_BYTES or tensor.datatype is Datatype.BYTES
        lease = None if is_sent else slab.lease(size_bytes)
        if lease is None:
            return tensor if tensor.place is None else replace(tensor, place=None)
        leases.append(lease)
        lease.view[:size_bytes] = tensor.data
    return replace(tensor, data=_LEFT_OUT, place=lease.place)
