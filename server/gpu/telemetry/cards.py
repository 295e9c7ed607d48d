"""What NVML says of every card: utilisation, memory, processes, errors; and GPM's activity where there is GPM."""

import time
from typing import Any

from server.gpu.telemetry.gpm import GpmMeter
from server.gpu.telemetry.line import Activity, CardLoad, Line, ProcessLoad, Source, Xid
from server.gpu.telemetry.processes import process_name, processes_of, time_shares

NOT_SUPPORTED = "this card has no GPM (Hopper and later have); a dcgm-exporter tells SM activity from Volta on"
NOT_PERMITTED = "this user may not read the card's counters (RmProfilingAdminOnly of the driver); a dcgm-exporter may"
_MOST_EVENTS = 100  # a line: a card that floods the driver's log says no more with the next hundred


class Cards:
    """Every card that the driver shows, held open. with_gpm: whether its activity is read here.

    Raises pynvml.NVMLError where NVML cannot be initialised.
    """

    def __init__(self, *, with_gpm: bool = True) -> None:
        import pynvml as nvml

        nvml.nvmlInit()
        self._nvml = nvml
        self._cards = [_Card(index, with_gpm=with_gpm) for index in range(nvml.nvmlDeviceGetCount())]
        self._events = self._watched_events()
        self._read_at_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._cards)

    def read(self) -> Line:
        """Of the time since the last call, or since it was made. A card that fails is a lost one in the line."""
        now = time.monotonic()
        seconds, self._read_at_s = now - self._read_at_s, now
        return Line(now, seconds, tuple(card.read() for card in self._cards), self._xids(), has_nvml=True)

    def _watched_events(self) -> Any | None:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        for card in self._cards:
            card.watch(events)
        return events

    def _xids(self) -> tuple[Xid, ...]:
        nvml = self._nvml
        found: list[Xid] = []
        while self._events is not None and len(found) < _MOST_EVENTS:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                found.append(Xid(nvml.nvmlDeviceGetIndex(event.device), event.eventData))
            except nvml.NVMLError:  # no more of them; or the card is lost, which its own reading says
                break
        return tuple(found)


class _Card:
    """One of them, found by its index; whatever becomes of it is in what `read` returns."""

    def __init__(self, index: int, *, with_gpm: bool) -> None:
        import pynvml as nvml

        self._nvml = nvml
        self._index = index
        self._device: Any = None
        self._gpm: GpmMeter | None = None
        self._why_no_activity = self._lost = self._uuid = self._name = ""
        self._names: dict[int, str] = {}
        self._seen_us = 0
        self._find()
        if with_gpm and self._device is not None:
            self._open_gpm()

    def _find(self) -> None:
        nvml = self._nvml
        try:
            self._device = nvml.nvmlDeviceGetHandleByIndex(self._index)
            self._uuid, self._name = nvml.nvmlDeviceGetUUID(self._device), nvml.nvmlDeviceGetName(self._device)
        except nvml.NVMLError as error:
            self._device = None
            if error.value == nvml.NVML_ERROR_NO_PERMISSION:
                self._why_no_activity = str(error)
            else:
                self._lost = str(error)

    def _open_gpm(self) -> None:
        nvml = self._nvml
        known = {nvml.NVML_ERROR_NOT_SUPPORTED: NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION: NOT_PERMITTED}
        known[nvml.NVML_ERROR_FUNCTION_NOT_FOUND] = NOT_SUPPORTED  # a driver older than GPM
        try:
            self._gpm = GpmMeter(self._device)
        except nvml.NVMLError as error:
            self._why_no_activity = known.get(error.value, str(error))

    def watch(self, events: Any) -> None:
        """Have the driver's errors of this card put there; a card or a user that may not has none."""
        nvml = self._nvml
        try:
            if self._device is not None:
                nvml.nvmlDeviceRegisterEvents(self._device, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return

    def read(self) -> CardLoad:
        """Since the last call. A lost card stays one: NVML must be initialised again to find it."""
        nvml = self._nvml
        if self._device is None:
            return self._silent()
        try:
            return self._load()
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                self._device, self._lost = None, str(error)
            else:  # such as "Unknown Error": lost if it is not to be found any more
                self._find()
                return self._silent(str(error))
        return self._silent()

    def _silent(self, why: str = "") -> CardLoad:
        """why: of this once."""
        why = self._why_no_activity or why
        return CardLoad(self._index, self._uuid, self._name, why_no_activity=why, lost=self._lost)

    def _load(self) -> CardLoad:
        nvml, device = self._nvml, self._device
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        activity = self._gpm.read() if self._gpm is not None else Activity()
        return CardLoad(
            self._index,
            self._uuid,
            self._name,
            kernel_running=self._utilization(),
            source=Source.GPM if self._gpm is not None else None,
            activity=activity,
            why_no_activity=self._why_no_activity,
            memory_used_bytes=memory.used,
            memory_bytes=memory.total,
            processes=self._processes(),
        )

    def _utilization(self) -> float | None:
        try:
            share: float = self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100
        except self._nvml.NVMLError_NotSupported:  # a card that is cut up by MIG
            return None
        return share

    def _processes(self) -> tuple[ProcessLoad, ...]:
        shares, self._seen_us = time_shares(self._nvml, self._device, self._seen_us)
        found = processes_of(self._nvml, self._device)
        self._names = {pid: self._names.get(pid) or process_name(pid) for pid in found}  # read once a process
        return tuple(
            ProcessLoad(pid, self._names[pid], held.memory_bytes, shares.get(pid), held.is_mps_client)
            for pid, held in sorted(found.items())
        )
