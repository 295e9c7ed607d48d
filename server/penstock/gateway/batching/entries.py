"""Waiting requests, ordered by priority, deadline and client. Removed entries are dropped later. Sans-IO."""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush

from penstock.protocol.inference import CloseReason, EngineTimeFit


class Stage(Enum):
    """State of an entry. GONE: not in the queue (not pushed, answered, dropped or cancelled)."""

    QUEUE = "queue"
    BATCH = "batch"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Entry:
    """One request in the queue, compared by identity. Times in monotonic seconds.

    key: entries with equal keys may share a batch; None: must run alone. priority: 0 is served first. Set by the queue:
    ahead (requests queued on arrival), stage, rank (order within the priority) and number.
    """

    key: Hashable
    rows: int
    size_bytes: int
    arrived_at: float
    deadline: float | None = None
    priority: int = 0
    client: str = ""
    ahead: int = 0
    stage: Stage = Stage.GONE
    rank: float = 0.0
    number: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Entries of one engine call, in row order. busy: other calls of the model in flight. expected_s: by the fit."""

    number: int
    entries: tuple[Entry, ...]
    rows: int
    close_reason: CloseReason
    formed_at: float
    busy: int
    fit: EngineTimeFit | None = None
    expected_s: float | None = None


SLACK = 64  # marked entries that a heap may hold beyond the waiting ones

Item = tuple[int, float, int, Entry]


class Lane:
    """Entries with one key, ordered by (priority, rank, number). They may share a batch."""

    __slots__ = ("entries", "items", "listed", "rows")

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.entries = 0
        self.rows = 0
        self.listed: Entry | None = None  # the lane's entry in the heap of heads

    def head(self) -> Item | None:
        """The first waiting entry."""
        items = self.items
        while items and items[0][3].stage is not Stage.QUEUE:
            heappop(items)
        return items[0] if items else None


class ClientEntries:
    """One client's waiting entries, in order of arrival."""

    __slots__ = ("entries", "line", "rows")

    def __init__(self) -> None:
        self.line: deque[Entry] = deque()
        self.entries = 0
        self.rows = 0

    def latest(self) -> Entry | None:
        """Its last waiting entry."""
        line = self.line
        while line and line[-1].stage is not Stage.QUEUE:
            line.pop()
        return line[-1] if line else None


class WaitingEntries:
    """All waiting entries. Adding, removing and `first` take microseconds at any size."""

    def __init__(self) -> None:
        self.entries = 0
        self.rows = 0
        self.size_bytes = 0
        self.clients: dict[str, ClientEntries] = {}
        self._lanes: dict[Hashable, Lane] = {}
        self._heads: list[tuple[int, float, int, Entry, Lane]] = []
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._dead = 0

    def __len__(self) -> int:
        return self.entries

    def __iter__(self) -> Iterator[Entry]:
        """All waiting entries, unordered."""
        return (item[3] for lane in self._lanes.values() for item in lane.items if item[3].stage is Stage.QUEUE)

    def add(self, entry: Entry) -> None:
        entry.stage = Stage.QUEUE
        key = entry if entry.key is None else entry.key
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane()
        heappush(lane.items, (entry.priority, entry.rank, entry.number, entry))
        lane.entries += 1
        lane.rows += entry.rows
        if lane.items[0][3] is entry:
            self._list(lane)
        if entry.deadline is not None:
            heappush(self._deadlines, (entry.deadline, entry.number, entry))
        client = self.clients.get(entry.client)
        if client is None:
            client = self.clients[entry.client] = ClientEntries()
        line = client.line
        line.append(entry)
        client.entries += 1
        client.rows += entry.rows
        while line[0].stage is not Stage.QUEUE:
            line.popleft()
        self.entries += 1
        self.rows += entry.rows
        self.size_bytes += entry.size_bytes

    def remove(self, entry: Entry, to: Stage) -> None:
        entry.stage = to
        self.entries -= 1
        self.rows -= entry.rows
        self.size_bytes -= entry.size_bytes
        key = entry if entry.key is None else entry.key
        lane = self._lanes[key]
        lane.entries -= 1
        lane.rows -= entry.rows
        if not lane.entries:
            del self._lanes[key]
        client = self.clients[entry.client]
        client.entries -= 1
        client.rows -= entry.rows
        if not client.entries:
            del self.clients[entry.client]
        self._dead += 1
        if not self.entries:
            self._heads.clear()
            self._deadlines.clear()
            self._dead = 0
        elif self._dead > 2 * self.entries + SLACK:
            self._sweep()

    def first(self) -> Lane | None:
        """The lane whose head is served next."""
        heads = self._heads
        while heads:
            *_, entry, lane = heads[0]
            if lane.listed is entry:
                if entry.stage is Stage.QUEUE:
                    return lane
                heappop(heads)
                self._list(lane)
            else:
                heappop(heads)
        return None

    def earliest(self) -> Entry | None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].stage is not Stage.QUEUE:
            heappop(deadlines)
        return deadlines[0][2] if deadlines else None

    def heaviest(self) -> ClientEntries | None:
        return max(self.clients.values(), key=lambda client: client.rows, default=None)

    def _list(self, lane: Lane) -> None:
        head = lane.head()
        if head is None:
            lane.listed = None
        elif lane.listed is not head[3]:
            lane.listed = head[3]
            heappush(self._heads, (*head, lane))

    def _sweep(self) -> None:
        self._heads = []
        for lane in self._lanes.values():
            lane.items = [item for item in lane.items if item[3].stage is Stage.QUEUE]
            heapify(lane.items)
            lane.listed = None
            self._list(lane)
        self._deadlines = [item for item in self._deadlines if item[2].stage is Stage.QUEUE]
        heapify(self._deadlines)
        for client in self.clients.values():
            client.line = deque(entry for entry in client.line if entry.stage is Stage.QUEUE)
        self._dead = 0
