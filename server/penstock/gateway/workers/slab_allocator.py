"""Next-fit allocator of a bounded range of bytes. Pure."""

from bisect import bisect_left, bisect_right

ALIGNMENT = 64  # a cache line; image rows are multiples of it, so consecutive ones are adjacent
MIN_CYCLE_BYTES = 16 << 20
CYCLE_PER_TAKEN = 4


class Extents:
    """Next fit: consecutive allocations are adjacent if there is room.

    The cursor returns to the front when all is free, and after a few times the allocated size, so that a small load
    uses few pages, which stay in the CPU's caches.
    """

    def __init__(self, end: int, begin: int = 0) -> None:
        """Bytes from begin to end; begin is a multiple of ALIGNMENT."""
        self._front = begin
        self._end = end
        self._begins = [begin]
        self._ends = [end]
        self._taken: dict[int, int] = {}
        self._lasting: dict[int, int] = {}
        self._cursor = begin
        self.taken_bytes = 0

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, size_bytes: int) -> int | None:
        """Offset of a new allocation; None if no free piece is large enough."""
        size = _aligned(size_bytes)
        turn = max(MIN_CYCLE_BYTES, CYCLE_PER_TAKEN * self.taken_bytes)
        if not self._taken or self._cursor - self._front >= turn:
            self._cursor = self._front
        begin = self._fit(size)
        if begin is not None:
            self._taken[begin] = size
            self.taken_bytes += size
            self._cursor = begin + size
        return begin

    def take_last(self, size_bytes: int) -> int | None:
        """Offset of a permanent allocation, as far back as possible; not counted in taken_bytes."""
        size = _aligned(size_bytes)
        for index in reversed(range(len(self._begins))):
            begin = (self._ends[index] - size) // ALIGNMENT * ALIGNMENT
            if begin >= self._begins[index]:
                self._cut(index, begin, begin + size)
                self._lasting[begin] = size
                return begin
        return None

    def give_back(self, offset: int) -> None:
        """Frees the allocation at this offset. Raises KeyError if there is none."""
        size = self._lasting.pop(offset, 0)
        if not size:
            size = self._taken.pop(offset)
            self.taken_bytes -= size
        end = min(offset + size, self._end)
        if offset < end:
            self._free(offset, end)

    def cut_off(self, end: int) -> None:
        """Allocates nothing from `end` on; existing allocations stay."""
        self._end = end
        index = bisect_left(self._begins, end)
        del self._begins[index:], self._ends[index:]
        if self._ends and self._ends[-1] > end:
            self._ends[-1] = end

    def _fit(self, size: int) -> int | None:
        """Searches from the cursor, then from the front."""
        count = len(self._begins)
        first = bisect_right(self._ends, self._cursor)
        for index in range(first, count):
            begin = max(self._begins[index], self._cursor)
            if self._ends[index] - begin >= size:
                self._cut(index, begin, begin + size)
                return begin
        for index in range(min(first + 1, count)):
            begin = self._begins[index]
            if self._ends[index] - begin >= size:
                self._cut(index, begin, begin + size)
                return begin
        return None

    def _cut(self, index: int, begin: int, end: int) -> None:
        """Removes [begin, end) from this free piece."""
        free_begin, free_end = self._begins[index], self._ends[index]
        if begin == free_begin and end == free_end:
            del self._begins[index], self._ends[index]
        elif begin == free_begin:
            self._begins[index] = end
        else:
            self._ends[index] = begin
            if end < free_end:
                self._begins.insert(index + 1, end)
                self._ends.insert(index + 1, free_end)

    def _free(self, begin: int, end: int) -> None:
        """Adds a free piece, joined with its neighbours."""
        index = bisect_left(self._begins, begin)
        if index < len(self._begins) and self._begins[index] == end:
            end = self._ends[index]
            del self._begins[index], self._ends[index]
        if index and self._ends[index - 1] == begin:
            self._ends[index - 1] = end
        else:
            self._begins.insert(index, begin)
            self._ends.insert(index, end)


def _aligned(size_bytes: int) -> int:
    return max(-(-size_bytes // ALIGNMENT), 1) * ALIGNMENT
