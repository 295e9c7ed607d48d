"""Which ports are given to a program that is yet to listen on them."""

import random
import subprocess
import sys
from collections.abc import Sequence

import pytest

from penstock.engines.triton.endpoints import PORT_TRIES, pick_free_ports
from tests.support.stack import CHECKOUT

PICKS_OF_THESE = """
import random, sys
from penstock.engines.triton.endpoints import pick_free_ports
random.SystemRandom.sample = lambda self, numbers, count: [int(word) for word in sys.argv[1:]]
try:
    print(*pick_free_ports("127.0.0.1", 1))
except OSError:
    print("none")
"""


def test_port_that_was_given_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs that are started at once, by one process or two, never get the same number."""
    numbers = random.sample(range(10_000, 30_000), PORT_TRIES)

    def same_sample(_: random.SystemRandom, __: Sequence[int], ___: int) -> list[int]:
        return numbers

    monkeypatch.setattr(random.SystemRandom, "sample", same_sample)
    first, second = pick_free_ports("127.0.0.1", 2), pick_free_ports("127.0.0.1", 2)
    assert not set(first) & set(second)
    words = [sys.executable, "-c", PICKS_OF_THESE, *map(str, (*first, *second))]
    done = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "none\n"


def test_port_of_a_process_that_ended_is_free_again() -> None:
    """What is claimed ends with the process, however it ends."""
    words = [sys.executable, "-c", PICKS_OF_THESE, "23456", "23457", "23458"]
    outputs = {
        subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, timeout=30, check=True).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1
    assert outputs != {"none\n"}
