"""The entries that wait: by order of service, by deadline and by client. Sans-IO.

Whoever leaves is only marked; what is left of it in the heaps is thrown away when it comes up, when it is too much, or
when nobody waits: it holds its request's tensors.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush

from server.batching.entry import Entry, Stage

SLACK = 64  # marks that may lie about beyond the number of those that wait

Item = tuple[int, float, int, Entry]


class Lane:
    """Entries of one key, which may share a batch, by (priority, rank, number)."""

    __slots__ = ("entries", "items", "listed", "rows")

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.entries = 0
        self.rows = 0
        self.listed: Entry | None = None  # the one that stands for the lane among the heads

    def head(self) -> Item | None:
        """The first that still waits."""
        items = self.items
        while items and items[0][3].stage is not Stage.QUEUE:
            heappop(items)
        return items[0] if items else None


class Client:
    """What one client has waiting, in the order in which it came."""

    __slots__ = ("entries", "line", "rows")

    def __init__(self) -> None:
        self.line: deque[Entry] = deque()
        self.entries = 0
        self.rows = 0

    def latest(self) -> Entry | None:
        """Its last one that still waits."""
        line = self.line
        while line and line[-1].stage is not Stage.QUEUE:
            line.pop()
        return line[-1] if line else None


class Waiting:
    """Adding, removing and looking at the first cost a few microseconds, however many wait."""

    def __init__(self) -> None:
        self.entries = 0
        self.rows = 0
        self.size_bytes = 0
        self.clients: dict[str, Client] = {}
        self._lanes: dict[Hashable, Lane] = {}
        self._heads: list[tuple[int, float, int, Entry, Lane]] = []
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._dead = 0

    def __len__(self) -> int:
        return self.entries

    def __iter__(self) -> Iterator[Entry]:
        """All of them, in no order."""
        return (item[3] for lane in self._lanes.values() for item in lane.items if item[3].stage is Stage.QUEUE)

    def add(self, entry: Entry) -> None:
        """The entry waits; its rank and number are set."""
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
            client = self.clients[entry.client] = Client()
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
        """The entry waits no longer; it must have waited."""
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
        """The one with the earliest deadline."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].stage is not Stage.QUEUE:
            heappop(deadlines)
        return deadlines[0][2] if deadlines else None

    def heaviest(self) -> Client | None:
        """The client with the most waiting rows."""
        return max(self.clients.values(), key=_rows_of, default=None)

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


def _rows_of(client: Client) -> int:
    return client.rows
