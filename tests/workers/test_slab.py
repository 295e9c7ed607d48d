"""Memory in leases: no lease overlaps another, and all of it comes back."""

import fcntl
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.workers.slab import LINGER_S, STEP_BYTES, SharedSlab, anonymous_memory, named_memory
from penstock.gateway.workers.slab_allocator import ALIGNMENT, MIN_CYCLE_BYTES, Extents
from penstock.protocol.inference import SlabAddress
from penstock.protocol.shared_memory import is_slab_name

SIZE = 64 * ALIGNMENT


@dataclass
class Later:
    """An event loop's call_later, by hand."""

    due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def __call__(self, delay_s: float, call: Callable[[], None]) -> None:
        self.due.append((delay_s, call))


def new_slab(size_bytes: int = SIZE) -> SharedSlab:
    slab = SharedSlab(Later())
    slab.renew(anonymous_memory(size_bytes))
    return slab


@given(st.lists(st.one_of(st.integers(1, SIZE // 3), st.integers(-20, -1)), max_size=60))
def test_extents_never_overlap_and_all_of_them_come_back(steps: list[int]) -> None:
    """Whatever is taken (a size) and given back (a negative index), in whatever order; nothing beyond the end."""
    extents, taken = Extents(SIZE), list[tuple[int, int]]()
    for step in steps:
        if step < 0 and taken:
            extents.give_back(taken.pop(step % len(taken))[0])
        elif step > 0 and (begin := extents.take(step)) is not None:
            taken.append((begin, begin + step))
        ordered = sorted(taken)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))
        assert all(begin % ALIGNMENT == 0 and end <= SIZE for begin, end in ordered)
    for begin, _ in taken:
        extents.give_back(begin)
    assert (len(extents), extents.taken_bytes) == (0, 0)
    assert extents.take(SIZE) == 0, "nothing is left in pieces"


def test_extents_taken_one_after_the_other_lie_side_by_side() -> None:
    """Also where others before them were given back meanwhile: a batch of neighbours needs no copy."""
    extents = Extents(SIZE)
    first, second = extents.take(ALIGNMENT), extents.take(ALIGNMENT)
    assert (first, second) == (0, ALIGNMENT)
    extents.give_back(0)
    assert [extents.take(ALIGNMENT) for _ in range(3)] == [2 * ALIGNMENT, 3 * ALIGNMENT, 4 * ALIGNMENT]


def test_few_callers_use_few_pages() -> None:
    """A steady little load turns in a small part of a large slab, and does not drag all of it through the caches."""
    extents, ends = Extents(16 * MIN_CYCLE_BYTES), set[int]()
    size = MIN_CYCLE_BYTES // 16
    waiting = [extents.take(size), extents.take(size)]
    for _ in range(200):
        begin = extents.take(size)
        assert begin is not None
        ends.add(begin + size)
        waiting.append(begin)
        oldest = waiting.pop(0)
        assert oldest is not None
        extents.give_back(oldest)
    assert max(ends) <= MIN_CYCLE_BYTES + size


def test_lease_is_anothers_only_after_the_last_hold() -> None:
    """A lease is held while it is read; a release too many is an error, since it would free another's bytes."""
    slab = new_slab()
    lease = slab.lease(SIZE)
    assert lease is not None
    assert slab.lease(1) is None
    lease.hold()
    lease.release()
    assert slab.lease_of(lease.place) is lease
    lease.release()
    assert slab.statistics().leases == 0
    assert slab.lease_of(lease.place) is None
    with pytest.raises(ValueError, match="once too often"):
        lease.release()


def test_lease_of_a_call_that_was_given_up_lingers() -> None:
    """Its engine may read the bytes a moment longer."""
    later = Later()
    slab = SharedSlab(later)
    slab.renew(anonymous_memory(SIZE))
    lease = slab.lease(SIZE)
    assert lease is not None
    lease.release_later()
    assert slab.lease(1) is None
    ((delay_s, release),) = later.due
    assert delay_s == LINGER_S
    release()
    assert slab.lease(1) is not None


def test_place_of_an_earlier_generation_is_not_found() -> None:
    """Its bytes stay its holder's own, in the memory that they were written to."""
    slab = new_slab()
    former = slab.lease(4)
    assert former is not None
    former.view[:] = b"old."
    slab.renew(anonymous_memory(SIZE))
    later = slab.lease(4)
    assert later is not None
    later.view[:] = b"new."
    assert (former.place.offset, later.place.offset) == (0, 0)
    assert former.place != later.place
    assert slab.lease_of(former.place) is None
    assert bytes(former.view) == b"old."
    with pytest.raises(ValueError, match="generation 2"):
        slab.window(former.place, 4)
    former.release()
    assert slab.statistics().leases == 1


def test_slab_without_memory_has_no_room() -> None:
    """Before the engine came, or where it cannot open ours."""
    slab = SharedSlab(Later())
    assert slab.lease(1) is None
    assert slab.lease_of(SlabAddress("r", 0, 0)) is None
    assert slab.statistics().leases == 0


def test_memory_that_the_machine_does_not_have_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /dev/shm makes leases fewer; a page that is not there would end the process."""
    slab = new_slab(4 * STEP_BYTES)
    first = slab.lease(STEP_BYTES)
    assert first is not None

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert slab.lease(STEP_BYTES) is None
    first.release()
    again = slab.lease(STEP_BYTES)
    assert again is not None
    assert (again.place.offset, slab.statistics().reserved_bytes) == (0, STEP_BYTES)


def test_half_of_the_machines_shared_memory_stays_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's /dev/shm is small, and the engine's models live in it."""
    slab = new_slab(16 * STEP_BYTES)
    blocks = 16 * STEP_BYTES // 4096
    taken = 0

    def little(_: int) -> SimpleNamespace:
        return SimpleNamespace(f_frsize=4096, f_blocks=blocks, f_bavail=blocks - taken // 4096)

    monkeypatch.setattr("os.fstatvfs", little)
    while slab.lease(STEP_BYTES) is not None:
        taken = slab.statistics().reserved_bytes
    assert taken == 8 * STEP_BYTES


def test_pages_are_had_when_they_are_needed() -> None:
    """A large unused slab costs nothing."""
    memory = anonymous_memory(8 * STEP_BYTES)
    slab = SharedSlab(Later())
    slab.renew(memory)
    assert os.fstat(memory.descriptor).st_blocks == 0
    slab.lease(10)
    assert os.fstat(memory.descriptor).st_blocks * 512 == STEP_BYTES


def test_file_has_a_name_within_the_block_only(tmp_path: Path) -> None:
    """What a process that was killed within its block left goes with the next one; what another has locked stays."""
    left, locked, other = (tmp_path / name for name in ("penstock_00_slab", "penstock_01_slab", "penstock_02_x"))
    for path in (left, locked, other):
        path.touch()
    with locked.open() as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with named_memory(SIZE, tmp_path) as memory:
            assert is_slab_name(memory.name)
            assert {path.name for path in tmp_path.iterdir()} == {memory.name, locked.name, other.name}
            memory.view[:2] = b"ok"
            assert (tmp_path / memory.name).read_bytes()[:2] == b"ok"
    assert {path.name for path in tmp_path.iterdir()} == {locked.name, other.name}


@pytest.mark.parametrize("times", [1, 3])
def test_file_that_another_clears_away_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A gateway that starts in that moment takes it for a dead one's; an engine that gets its name finds it."""
    cleared: list[str] = []
    lock = fcntl.flock

    def clear_first(descriptor: int, how: int) -> None:
        if len(cleared) < times:
            (path,) = tmp_path.iterdir()
            path.unlink()
            cleared.append(path.name)
        lock(descriptor, how)

    monkeypatch.setattr("fcntl.flock", clear_first)
    with named_memory(SIZE, tmp_path) as memory:
        assert (tmp_path / memory.name).stat().st_size == SIZE
    assert (len(cleared), list(tmp_path.iterdir())) == (times, [])


def test_file_that_is_always_cleared_away_is_not_made_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something on this machine removes them: that is reported, and no descriptor is left open."""
    monkeypatch.setattr("fcntl.flock", lambda *_: next(tmp_path.iterdir()).unlink())
    gc.collect()  # closes what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="removed"), named_memory(SIZE, tmp_path):
        pytest.fail("a file without a name was handed out")
    assert len(os.listdir("/proc/self/fd")) == before


def test_last_lease_closes_a_former_memory() -> None:
    """Engines that come and go leave no descriptor behind."""
    slab = new_slab()
    lease = slab.lease(1)
    assert lease is not None
    descriptor, file = lease.descriptor, os.fstat(lease.descriptor).st_ino
    slab.renew(anonymous_memory(SIZE))
    assert os.fstat(descriptor).st_ino == file
    lease.release()
    del lease
    assert not _is_open(descriptor, file)


def _is_open(descriptor: int, file: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == file
    except OSError:
        return False
