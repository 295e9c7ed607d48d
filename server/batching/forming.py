"""Which of those that wait go to the engine now, and which are given up for their sake. Sans-IO.

In the order of service, as many as the earliest deadline among them allows. Where that deadline is so near that it
forces a small batch, the entry is given up instead (as Nexus does): an engine that is kept at small batches by late
entries makes everybody late. A search that tried every choice against 100 to 300 random futures answered 0.2 % more at
best (2,500 Poisson arrivals a second, 7 ms, the profile of a V100).
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

from server.batching.entry import Entry
from server.batching.shares import is_favoured
from server.batching.waiting import Item, Lane
from server.core.batching import CloseReason, Fit

SKIPPED = 8  # entries of lower priority whose own deadline is too near for the batch; they stay where they are
FAVOURED_COST = 3  # a favoured entry may make the batch so many times smaller before it is given up


@dataclass(frozen=True, slots=True)
class Terms:
    """What binds a batch that is formed now.

    begin: when an instance takes it, monotonic seconds. fit: None where it is not known what calls take. max_rows: at
    most. rate: rows that come in a second. next_begin: when another instance takes a call too.
    """

    begin: float
    fit: Fit | None
    max_rows: int
    rate: float
    next_begin: float = float("inf")


@dataclass(slots=True)
class Choice:
    """entries: of the batch, in order. given_up: those whose deadline was in the way. reason: why it took no more.

    least_s: the shortest time that a member has from the batch's begin to its deadline.
    """

    entries: list[Entry] = field(default_factory=list)
    given_up: list[Entry] = field(default_factory=list)
    rows: int = 0
    reason: CloseReason = CloseReason.SLOT_FREE
    least_s: float = float("inf")


def choose(lane: Lane, terms: Terms) -> Choice:
    """Take the batch's entries, and those that it gives up, out of the lane's order; they are not marked yet."""
    choice = Choice()
    if terms.fit is not None:
        _give_up(lane, terms, choice)
    _fill(lane, terms, choice)
    return choice


def _give_up(lane: Lane, terms: Terms, choice: Choice) -> None:
    """Give up entries at the head until the first one allows for all the others, or as many as fit a batch.

    kept: those that go first, which may bind the batch.
    """
    kept: list[Item] = []
    left, cap = lane.rows, terms.max_rows
    last: Item | None = None
    last_rows = 0
    while (item := lane.head()) is not None:
        entry = item[3]
        if entry.deadline is None:
            break
        allowed = _allowed(terms, entry.deadline)
        wanted = min(left, cap)
        if is_favoured(entry) and allowed * FAVOURED_COST >= wanted:
            kept.append(heappop(lane.items))
            cap = min(cap, allowed)
            continue
        if allowed >= wanted or (last is None and not kept and _rest_can_wait(lane, terms, allowed, left)):
            break
        heappop(lane.items)
        if last is not None:
            choice.given_up.append(last[3])
        last, last_rows = item, allowed
        left -= entry.rows
    if last is not None:
        if last_rows >= min(left, cap):  # it would have allowed as many
            kept.append(last)
        else:
            choice.given_up.append(last[3])
    for item in kept:
        heappush(lane.items, item)


def _rest_can_wait(lane: Lane, terms: Terms, allowed: int, left: int) -> bool:
    """Whether those that find no place beside the head, and who comes meanwhile, can be served together after it."""
    fit = terms.fit
    if fit is None or not 0 < allowed < left:
        return False
    after = min(terms.begin + fit.seconds(allowed), max(terms.next_begin, terms.begin))
    rest = min(left - allowed + int(terms.rate * (after - terms.begin)) + 1, terms.max_rows)
    taken: list[Item] = []
    rows = 0
    while (item := lane.head()) is not None and rows < allowed:
        rows += item[3].rows
        taken.append(heappop(lane.items))
    for one in taken:
        heappush(lane.items, one)
    deadline = None if item is None else item[3].deadline
    return deadline is None or after + fit.told_s(rest) + fit.guard_s <= deadline


def _allowed(terms: Terms, deadline: float) -> int:
    """Rows of the largest batch whose answers are told before the deadline."""
    fit = terms.fit
    if fit is None:
        return terms.max_rows
    room_s = deadline - terms.begin - fit.guard_s - fit.alpha_s
    row_s = fit.beta_s + fit.deliver_s
    if room_s < row_s:
        return 0
    if row_s <= 0.0:
        return terms.max_rows
    return min(int(room_s / row_s + 1e-6), terms.max_rows)


def _fill(lane: Lane, terms: Terms, choice: Choice) -> None:
    max_rows, due = terms.max_rows, float("inf")
    entries, rows = choice.entries, 0
    skipped: list[Item] = []
    while (item := lane.head()) is not None:
        entry = item[3]
        own = float("inf") if entry.deadline is None else entry.deadline
        total = rows + entry.rows
        if entries:
            if total > max_rows:
                choice.reason = CloseReason.FULL
                break
            if terms.fit is not None:
                end = terms.begin + terms.fit.told_s(total) + terms.fit.guard_s - 1e-9
                if end > due or (end > own and len(skipped) == SKIPPED):
                    choice.reason = CloseReason.DEADLINE
                    break
                if end > own:
                    skipped.append(heappop(lane.items))
                    continue
        heappop(lane.items)
        entries.append(entry)
        rows, due = total, min(due, own)
    for item in skipped:
        heappush(lane.items, item)
    choice.rows, choice.least_s = rows, due - terms.begin
    if rows >= max_rows and lane.head() is not None:
        choice.reason = CloseReason.FULL
