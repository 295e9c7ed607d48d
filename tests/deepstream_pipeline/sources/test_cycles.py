"""Sources that come and go leave nothing behind; 1,000 of them in tests/long."""

from tests.deepstream_pipeline.sources.cycles import leak_of


def test_sources_added_and_removed_leave_nothing() -> None:
    """Fault 53, thirty times: no descriptor, thread, process or shared memory more, and the source beside them runs."""
    before, after = leak_of(cycles=30, warm_up=10)
    assert (after.descriptors, after.threads, after.processes, after.rings) == (
        before.descriptors,
        before.threads,
        before.processes,
        before.rings,
    )
