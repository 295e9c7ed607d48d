"""Who goes first where one client asks for far more than the others. Sans-IO.

A client is light that asks for less than half of an equal share of what is asked. While requests are given up, those of
light clients are served before the others, and batches take no longer than half of the time that they are given:
whoever comes while a batch runs can then still be in the next one. Without a deadline they always go first.
"""

from server.batching.entry import Entry

LIGHT = 0.5  # of an equal share
MEMORY_ROWS = 1024.0  # asked for until what was before counts half
LEAST_ROWS = 1.0  # of a client that is remembered
OVERLOAD = 0.02  # of the rows are given up
DEEP_OVERLOAD = 0.1
WEIGHT = 0.2  # of one batch in that
BATCHES = 32  # without a light client's request, and batches are as long as they may be
PATIENCE_S = 1.0  # a request without a deadline is served as if it had this one
FAR = 1 / 32  # of a deadline's time beyond that: who gives half a minute waits a second longer than who gives none


class Shares:
    """What each client asked for lately, and what was given up."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}
        self._total = 0.0
        self._given_up = 0.0
        self._refused_rows = 0
        self._budget_s: float | None = None
        self._batches_since = 0

    @property
    def is_overloaded(self) -> bool:
        """Whether requests are given up at present."""
        return self._given_up > OVERLOAD

    @property
    def is_deeply_overloaded(self) -> bool:
        """Whether so many are given up that who comes last is told at once."""
        return self._given_up > DEEP_OVERLOAD

    def longest_s(self) -> float | None:
        """How long a batch may take for light clients to find their place in the next; None for as it may."""
        return self._budget_s / 2 if self._budget_s is not None and self.is_overloaded else None

    def asked(self, entry: Entry, latest: Entry | None) -> None:
        """The entry came; its rank is set. latest: of its client, which it must not overtake, None where none waits."""
        self._asked[entry.client] = self._asked.get(entry.client, 0.0) + entry.rows
        self._total += entry.rows
        if self._total > 2 * MEMORY_ROWS:
            self._forget()
        is_light = self._is_light(entry) and (latest is None or is_favoured(latest))
        entry.rank = _usual_rank(entry)
        if entry.deadline is None:
            entry.rank = entry.arrived_at if is_light else entry.rank
        elif is_light and self.is_overloaded:
            entry.rank = entry.arrived_at
            self._budget_s = entry.deadline - entry.arrived_at
            self._batches_since = 0

    def refused(self, rows: int) -> None:
        """So many rows were given up."""
        self._refused_rows += rows

    def formed(self, rows: int) -> None:
        """A batch of so many rows was formed."""
        lost = self._refused_rows / (self._refused_rows + rows)
        self._given_up += (lost - self._given_up) * WEIGHT
        self._refused_rows = 0
        self._batches_since += 1
        if self._batches_since > BATCHES:
            self._budget_s = None

    def _is_light(self, entry: Entry) -> bool:
        clients = len(self._asked)
        return clients > 1 and self._asked.get(entry.client, 0.0) * clients <= self._total * LIGHT

    def _forget(self) -> None:
        self._asked = {client: rows / 2 for client, rows in self._asked.items() if rows / 2 >= LEAST_ROWS}
        self._total = sum(self._asked.values())


def is_favoured(entry: Entry) -> bool:
    """Whether the entry goes before those that have as much time."""
    return entry.rank < _usual_rank(entry)


def _usual_rank(entry: Entry) -> float:
    """The deadline, and as if it were PATIENCE_S away where there is none; of one further away little more counts."""
    patient = entry.arrived_at + PATIENCE_S
    if entry.deadline is None:
        return patient
    return entry.deadline if entry.deadline <= patient else patient + (entry.deadline - patient) * FAR
