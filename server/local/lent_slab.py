"""The slab between the core and its fronts: a part for each, and tensors that pass between them by their place."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from server.core.errors import BackendUnavailable, InvalidRequest
from server.core.infer import InferRequest
from server.core.slab import SLAB_FROM_BYTES, Lease, Slab
from server.core.tensor import Datatype, Place, Tensor
from server.local.guests import GuestRoom
from server.local.slab import SharedSlab, SlabLease
from server.local.slab_memory import Lent, lent_memory
from server.local.slab_registration import RegionReader
from server.logs import get_logger

_LEFT_OUT = memoryview(b"")
_LENGTH_BYTES = 4  # before an element of BYTES
log = get_logger("slab")


@dataclass(frozen=True, slots=True)
class _Part:
    region: str
    generation: int
    lease: SlabLease


class Lender:
    """The core's side. part_bytes: of each front's part. guests: what guests may have besides."""

    def __init__(self, slab: SharedSlab, part_bytes: int, guests: GuestRoom | None = None) -> None:
        self._slab = slab
        self._part_bytes = part_bytes
        self._guests = guests
        self._parts: dict[Hashable, _Part] = {}
        self._guest_parts: list[_Part] = []

    def due(self, borrower: Hashable, *, is_guest: bool = False) -> Lent | None:
        """A part for who has none of the memory that there is now; None where there is nothing to tell."""
        generation = self._slab.generation
        part = self._parts.get(borrower)
        if not generation or (part is not None and part.generation == generation):
            return None
        found = self._lend_to_guest(generation) if is_guest else self._slab.lend(self._part_bytes)
        if found is None:
            return None
        lent, lease = found
        self._parts[borrower] = _Part(lent.region, generation, lease)
        if is_guest:
            self._guest_parts.append(self._parts[borrower])
        return lent

    def _lend_to_guest(self, generation: int) -> tuple[Lent, SlabLease] | None:
        """One more part where there is one: those of guests that are gone count until nobody reads them."""
        self._guest_parts = [part for part in self._guest_parts if part.generation == generation and part.lease.is_held]
        if self._guests is None or len(self._guest_parts) >= self._guests.parts:
            return None
        return self._slab.lend(self._guests.part_bytes)

    def gone(self, borrower: Hashable) -> None:
        """It reads and writes no more; its part comes back when the engine has read what was there."""
        part = self._parts.pop(borrower, None)
        if part is not None:
            part.lease.release_later()

    def in_full(self, request: InferRequest, borrower: Hashable) -> InferRequest:
        """The request with the bytes that were left out.

        Raises BackendUnavailable where they are of former times, InvalidRequest where they are not in that one's part.
        """
        if not [tensor for tensor in request.inputs if tensor.place is not None]:
            return request
        part = self._parts.get(borrower)
        return InferRequest(  # each picture passes here: `replace` costs more than twice as much
            request.model_name,
            tuple([self._found(tensor, part) for tensor in request.inputs]),
            request.model_version,
            request.id,
            request.outputs,
            request.parameters,
            request.deadline,
            request.metadata,
        )

    def _found(self, tensor: Tensor, part: _Part | None) -> Tensor:
        place = tensor.place
        if place is None:
            return tensor
        if tensor.data.nbytes:
            return replace(tensor, place=None)  # the engine would read there, and not these bytes
        generation = self._slab.generation
        if part is None or not place.generation == part.generation == generation or place.region != part.region:
            if self._slab.lease_of(place) is None:
                raise BackendUnavailable("the engine was restarted while the request was on its way; send it again")
            raise InvalidRequest(f"tensor {tensor.name!r} does not lie in the memory that its sender was lent")
        size_bytes = self._size_bytes(tensor, place)
        if not part.lease.holds(place.offset, size_bytes):
            raise InvalidRequest(f"tensor {tensor.name!r} does not lie in the memory that its sender was lent")
        return Tensor(tensor.name, tensor.datatype, tensor.shape, self._slab.window(place, size_bytes), place)

    def _size_bytes(self, tensor: Tensor, place: Place) -> int:
        """Of BYTES one element may lie there, an encoded picture, which says itself how long it is."""
        element_bytes = tensor.datatype.size_bytes
        if element_bytes is not None:
            return tensor.element_count * element_bytes
        if tensor.element_count != 1:
            raise InvalidRequest(f"tensor {tensor.name!r} is BYTES: send its elements, or one by its place")
        return _LENGTH_BYTES + int.from_bytes(self._slab.window(place, _LENGTH_BYTES), "little")


class BorrowedSlab(SharedSlab):
    """A front's or guest's side: room in its part of the core's slab. reader: its own way to the engine, if any."""

    def __init__(
        self, call_later: Callable[[float, Callable[[], None]], object], reader: RegionReader | None = None
    ) -> None:
        super().__init__(call_later)
        self._reader = reader
        self._region = ""

    def borrow(self, lent: Lent) -> None:
        """Leases are of this part from now on."""
        self.forget()
        try:
            memory = lent_memory(lent)
        except OSError as error:
            log.warning("the core's memory cannot be opened; it is sent every byte", reason=error.strerror)
            return
        self.renew(memory, lent.generation)
        self._region = lent.region
        if self._reader is not None:
            self._reader.use_region(lent.region, _core_will_know)

    def forget(self) -> None:
        """The core that lent it is gone, or the engine: there is no room."""
        self.renounce()
        if self._reader is not None and self._region:
            self._reader.drop_region(self._region)
        self._region = ""


def _core_will_know() -> None:
    """An engine that lost the region gets another from the core, and the front a part of that."""


def by_place(request: InferRequest, slab: Slab) -> tuple[InferRequest, list[Lease]]:
    """The request without the bytes of what lies, or finds room, in the slab; and what is to be released after it."""
    leases: list[Lease] = []
    try:
        inputs = tuple([_by_place(tensor, slab, leases) for tensor in request.inputs])
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    return (replace(request, inputs=inputs), leases) if leases else (request, leases)


def _by_place(tensor: Tensor, slab: Slab, leases: list[Lease]) -> Tensor:
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
