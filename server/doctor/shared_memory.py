"""/dev/shm: room for what Triton's Python backend passes to its models, and what killed stacks left there."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server.backends.reaper import ENGINE_ID_VARIABLE, SHARED_MEMORY
from server.doctor.engine import runs_triton
from server.doctor.finding import MIB, Finding, Status, shown_bytes
from server.doctor.host import container_kind
from server.doctor.plan import Plan

# The python backend of Triton 2.51 makes a region of 1 MiB an instance and grows it by as much when requests need it
# (its own message: "requires at least 1 MB of shared memory"; seen so in /dev/shm). Older releases start with 64 MB.
INSTANCE_BYTES = MIB
CONTAINER_DEFAULT_BYTES = 64 * MIB
_REGION = re.compile(r"penstock_(?P<engine_id>[0-9a-f]{12})_.*")
_RUN = "run-"


@dataclass(frozen=True, slots=True)
class Leftover:
    """Regions of an engine whose stack is gone. will_be_cleared: the next `penstock up` finds its run directory."""

    engine_id: str
    regions: int
    size_bytes: int
    will_be_cleared: bool


@dataclass(frozen=True, slots=True)
class SharedMemoryFacts:
    """size_bytes: 0 where there is none. in_container: the kind, "" for none. needs_it: Triton is to run here."""

    size_bytes: int
    free_bytes: int
    is_writable: bool
    in_container: str
    leftovers: tuple[Leftover, ...]
    needs_it: bool = True


def probe(plan: Plan) -> SharedMemoryFacts:
    """Looks at the file system, this user's regions in it, and who owns them."""
    if not SHARED_MEMORY.is_dir():
        return SharedMemoryFacts(0, 0, False, container_kind(), (), runs_triton(plan))
    usage = shutil.disk_usage(SHARED_MEMORY)
    return SharedMemoryFacts(
        size_bytes=usage.total,
        free_bytes=usage.free,
        is_writable=os.access(SHARED_MEMORY, os.W_OK | os.X_OK),
        in_container=container_kind(),
        leftovers=find_leftovers(SHARED_MEMORY, plan.run_base),
        needs_it=runs_triton(plan),
    )


def find_leftovers(shared_memory: Path, run_base: Path) -> tuple[Leftover, ...]:
    """This user's regions with our prefix whose stack does not run any more."""
    regions: dict[str, list[int]] = {}
    for path in shared_memory.glob("penstock_*"):
        name = _REGION.fullmatch(path.name)
        with contextlib.suppress(OSError):
            status = path.stat()
            if name is not None and status.st_uid == os.geteuid():
                regions.setdefault(name["engine_id"], []).append(status.st_size)
    if not regions:
        return ()
    carried = _carried_ids()
    return tuple(
        Leftover(engine_id, len(sizes), sum(sizes), will_be_cleared)
        for engine_id, sizes in sorted(regions.items())
        for will_be_cleared in _abandoned(run_base, engine_id, carried)
    )


def _abandoned(run_base: Path, engine_id: str, carried: set[str]) -> Iterator[bool]:
    """One word where the stack is gone: whether its run directory is still there. None where it runs."""
    run = run_base / f"{_RUN}{engine_id}"
    if os.path.isdir(run):
        with _shared_lock(run_base / ".lock") as is_quiet, _shared_lock(run / "owner") as is_ownerless:
            if is_quiet and is_ownerless:
                yield True
    elif engine_id not in carried:  # a stack with another TMPDIR is told by its processes
        yield False


@contextlib.contextmanager
def _shared_lock(path: Path) -> Iterator[bool]:
    """Whether no living process holds it; a start that wants it meanwhile waits this moment."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def _carried_ids() -> set[str]:
    """The engine ids in the environments of the processes that we may look into."""
    mark = re.compile(rb"(?:^|\0)" + ENGINE_ID_VARIABLE.encode() + rb"=([0-9a-f]{12})(?:\0|$)")
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found.update(match.decode() for match in mark.findall(path.read_bytes()))
    return found


def findings_of(facts: SharedMemoryFacts) -> list[Finding]:
    """Room, and leftovers."""
    return [_room(facts), _leftovers(facts)]


def _room(facts: SharedMemoryFacts) -> Finding:
    fatal = Status.PROBLEM if facts.needs_it else Status.NOTE
    if not facts.size_bytes or not facts.is_writable:
        found = "there is no /dev/shm" if not facts.size_bytes else "/dev/shm cannot be written to"
        advice = "mount it: mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm (docker run --shm-size=1g)"
        return Finding("shm.room", fatal, f"{found}: Triton's models are fed through it", advice)
    found = f"{shown_bytes(facts.free_bytes)} of {shown_bytes(facts.size_bytes)} free in /dev/shm"
    larger = "docker run --shm-size=1g" if facts.in_container else "mount -o remount,size=1g /dev/shm"
    if facts.free_bytes < INSTANCE_BYTES:
        found += f"; an instance of a model needs {shown_bytes(INSTANCE_BYTES)} to start"
        return Finding("shm.room", fatal, found, f"make it larger or empty it: {larger}")
    if facts.free_bytes <= CONTAINER_DEFAULT_BYTES:
        found += "; large batches will not fit"
        status = Status.WARNING if facts.needs_it else Status.NOTE
        return Finding("shm.room", status, found, f"a container's default is 64 MiB; make it larger: {larger}")
    return Finding("shm.room", Status.OK, found)


def _leftovers(facts: SharedMemoryFacts) -> Finding:
    if not facts.leftovers:
        return Finding("shm.leftovers", Status.OK, "nothing of killed stacks")
    count, size = sum(one.regions for one in facts.leftovers), sum(one.size_bytes for one in facts.leftovers)
    found = f"{count} regions ({shown_bytes(size)}) of {len(facts.leftovers)} killed stacks"
    kept = [f"/dev/shm/penstock_{one.engine_id}_*" for one in facts.leftovers if not one.will_be_cleared]
    if not kept:
        return Finding("shm.leftovers", Status.NOTE, found, "the next `penstock up` clears them away")
    return Finding("shm.leftovers", Status.WARNING, found, f"nothing else will: rm {' '.join(kept)}")
