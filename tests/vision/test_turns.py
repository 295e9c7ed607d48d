"""Which client's picture is decoded next: fair between clients, with bounded memory."""

import random

from penstock.vision import fair_queue as module
from penstock.vision.fair_queue import LIMITED_S, SLOW_S, FairQueue


def taken(turns: FairQueue[str], count: int, now: float = 0.0) -> list[str | None]:
    turn = (turns.take(now) for _ in range(count))
    return [None if one is None else one[1] for one in turn]


def test_turns_alternate_between_clients_however_many_items_each_has() -> None:
    """Items of one client stay in order of arrival."""
    turns = FairQueue[str](workers=99)
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        turns.add(item[0], item, 0.0)
    assert len(turns) == 6
    assert taken(turns, 7) == ["a1", "b1", "c1", "a2", "b2", "a3", None]
    assert len(turns) == 0


def test_turns_client_that_had_none_comes_before_one_that_had() -> None:
    """A new client is next while another's items wait; a stream of new clients starves neither."""
    turns = FairQueue[str](workers=99)
    for item in ("a1", "a2", "a3"):
        turns.add("a", item, 0.0)
    order = []
    for number in range(4):
        order += taken(turns, 1)
        turns.add(f"new {number}", f"n{number}", 0.0)
    assert order == ["a1", "n0", "a2", "n1"]


def test_turns_slow_client_leaves_one_worker_to_others_for_a_while() -> None:
    """So does an unknown client; a single client has all workers, and one worker alone is never reserved."""
    turns = FairQueue[str](workers=2)
    for client in ("b", "a", "a"):
        turns.add(client, client, 0.0)
    assert taken(turns, 1) == ["b"]
    turns.ended("b", 0.0, SLOW_S / 2)
    assert taken(turns, 2) == ["a", None]
    turns.ended("a", 0.0, SLOW_S / 2)
    turns.add("a", "a", 0.0)
    assert taken(turns, 2) == ["a", "a"]
    turns.ended("a", 1.0, 2 * SLOW_S)
    turns.ended("a", 1.0, SLOW_S / 2)
    for client in ("a", "a", "b"):
        turns.add(client, client, 2.0)
    assert taken(turns, 3, 2.0) == ["a", "b", None]
    assert taken(turns, 1, 1.0 + LIMITED_S) == ["a"]


def test_turns_client_alone_has_every_worker() -> None:
    """This holds for slow pictures, too, if another client's last one was long ago."""
    turns = FairQueue[str](workers=2)
    turns.add("b", "b", 0.0)
    assert taken(turns, 1) == ["b"]
    turns.ended("b", 0.0, 0.1)
    for _ in range(3):
        turns.add("a", "a", 5.0)
    assert taken(turns, 2, 5.0) == ["a", None]
    turns.ended("a", 6.0, 2 * SLOW_S)
    assert taken(turns, 2, 5.0 + LIMITED_S) == ["a", "a"]
    single = FairQueue[str](workers=1)
    single.add("b", "b", 0.0)
    single.add("a", "a", 0.0)
    assert taken(single, 2) == ["b", "a"]


def test_turns_forget_items_that_leave_and_clients_that_are_gone() -> None:
    """With thousands of clients and random events, no item is lost, served twice or left behind."""
    chance = random.Random(5)
    turns = FairQueue[int](workers=4)
    waiting: dict[int, str] = {}
    running: dict[int, str] = {}
    served: set[int] = set()
    for number in range(20_000):
        client = f"c{chance.randrange(8000)}"
        turns.add(client, number, 0.0)
        waiting[number] = client
        if chance.random() < 0.2:
            leaving = chance.choice(list(waiting))
            turns.remove(waiting.pop(leaving), leaving)
        while len(running) < 4 and (turn := turns.take(number)) is not None:
            item = turn[1]
            assert turn == (waiting[item], item)
            assert item not in served
            served.add(item)
            running[item] = waiting.pop(item)
        for item in list(running):
            if chance.random() < 0.8:
                turns.ended(running.pop(item), number, None if chance.random() < 0.1 else 0.1)
        assert len(turns) == len(waiting)
    for client in running.values():
        turns.ended(client, 0.0, 0.1)
    assert sorted(turns.clear()) == sorted(waiting)
    assert len(turns) == 0
    assert not turns._waiting
    assert not turns._running
    assert not turns._ranks
    assert len(turns._limited_until) <= module.MAX_CLIENTS
