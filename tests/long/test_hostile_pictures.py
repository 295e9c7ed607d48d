"""After 404 hostile pictures of up to 30 MB, a second round does not increase the memory in use."""

import threading
from collections import Counter

import pytest

from tests.integration.hostile_pictures import answered, hostile, private_bytes
from tests.integration.test_hostile_pictures import ALLOWED, MAY_GROW_BYTES, assert_given_back
from tests.integration.test_hostile_pictures import own_stack as own_stack
from tests.support.damage import MIB
from tests.support.stack import RunningStack

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PICTURES = 404
MAX_PEAK_BYTES = 1536 * MIB  # eight bodies of 30 MB or a hundred pictures, with their decoded data


def test_many_hostile_pictures_leave_no_memory_behind(own_stack: RunningStack) -> None:
    """No process grows in a second round; the peak of all together is bounded."""
    answered(own_stack, hostile(8, width=4000, height=3000))
    before = private_bytes(own_stack)
    peaks, is_over = [sum(before.values())], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.25):
            peaks.append(sum(private_bytes(own_stack).values()))

    watching = threading.Thread(target=watch)
    watching.start()
    grown, statuses = [], Counter[int]()
    try:
        for _ in range(2):
            statuses += answered(own_stack, hostile(PICTURES, width=4000, height=3000))
            grown.append(assert_given_back(own_stack, before, MAY_GROW_BYTES))
    finally:
        is_over.set()
        watching.join()
    more = [size // MIB for size in grown]
    summary = f"{dict(statuses)}, {peaks[0] // MIB} MiB, at most {max(peaks) // MIB}, then {more} more"
    print(summary)  # noqa: T201
    assert set(statuses) <= ALLOWED, summary
    assert max(peaks) < MAX_PEAK_BYTES, summary
