"""A thousand sources added and removed beside one that runs: nothing grows."""

import pytest

from tests.deepstream_pipeline.sources.cycles import leak_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
MIB = 1 << 20


def test_a_thousand_sources_added_and_removed_leave_nothing() -> None:
    """Fault 53: descriptors, threads, processes and shared memory are what they were; resident memory within 8 MiB."""
    before, after = leak_of(cycles=1000, warm_up=100)
    assert (after.descriptors, after.threads, after.processes, after.rings) == (
        before.descriptors,
        before.threads,
        before.processes,
        before.rings,
    )
    assert after.resident_bytes - before.resident_bytes < 8 * MIB
