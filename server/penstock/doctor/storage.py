"""Disk space and permissions, and /dev/shm: free space and regions of killed stacks."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.doctor.engine import runs_triton
from penstock.doctor.finding import GIB, MIB, Finding, Severity, StackPlan, shown_bytes
from penstock.doctor.host import container_kind
from penstock.engines.run_directory import ENGINE_ID_VARIABLE, SHARED_MEMORY

HOME_BYTES = GIB  # a few models of the catalogue
TEMP_BYTES = 64 * MIB  # a run directory has 3 MiB; downloads and pictures are elsewhere


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder; if it is missing, the other fields describe its nearest existing parent."""

    path: Path
    exists: bool
    free_bytes: int
    is_writable: bool
    is_noexec: bool = False  # mounted with noexec
    is_shared: bool = False  # another user owns it or may write to it


@dataclass(frozen=True, slots=True)
class RepositoryFacts:
    """models: names of its folders; None if it cannot be read."""

    path: Path
    models: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """run_base: in the folder for temporary files. needs_exec: Triton's programs would run from there."""

    home: FolderFacts
    run_base: FolderFacts
    repositories: tuple[RepositoryFacts, ...]
    needs_exec: bool = True


def probe_disk(plan: StackPlan) -> DiskFacts:
    """Tests each folder by an unnamed temporary file."""
    return DiskFacts(
        folder_facts(plan.home),
        folder_facts(plan.run_base),
        tuple(_repository(path, plan) for path in plan.repositories),
        needs_exec=runs_triton(plan),
    )


def folder_facts(path: Path) -> FolderFacts:
    """Existence, free space and permissions of a folder."""
    there = next(
        folder for folder in (path, *path.absolute().parents) if os.path.isdir(folder)
    )  # Path.is_dir raises if access is denied
    status = there.stat()
    return FolderFacts(
        path=path,
        exists=os.path.isdir(path),
        free_bytes=shutil.disk_usage(there).free,
        is_writable=_can_write(there),
        is_noexec=bool(os.statvfs(there).f_flag & os.ST_NOEXEC),
        is_shared=os.path.isdir(path) and (status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)),
    )


def _can_write(folder: Path) -> bool:
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"0")
        return True
    return False


def _repository(path: Path, plan: StackPlan) -> RepositoryFacts:
    try:
        names = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return RepositoryFacts(path, () if path == plan.home / "models" else None)  # `penstock up` creates that one
    return RepositoryFacts(path, tuple(names))


def disk_findings(facts: DiskFacts) -> list[Finding]:
    """The home folder, the folder for temporary files, the model repositories."""
    return [_home(facts.home), _temp(facts.run_base, facts.needs_exec), _models(facts.repositories)]


def _home(home: FolderFacts) -> Finding:
    found = f"{shown_bytes(home.free_bytes)} free for {home.path}"
    if not home.is_writable:
        advice = "only shipped models are served; choose a folder of yours: PENSTOCK_HOME=DIR"
        return Finding("disk.home", Severity.WARNING, f"{home.path} cannot be written to", advice)
    if home.free_bytes < HOME_BYTES:
        return Finding("disk.home", Severity.WARNING, found, "make room, or choose another disk: PENSTOCK_HOME=DIR")
    return Finding("disk.home", Severity.OK, found if home.exists else f"{found} (not made yet)")


def _temp(base: FolderFacts, needs_exec: bool) -> Finding:
    elsewhere = "choose another folder: TMPDIR=DIR penstock up"
    if base.is_shared:
        found = f"{base.path} belongs to another user or others may write to it, and programs are run from it"
        return Finding("disk.temp", Severity.PROBLEM, found, f"chmod 700 {base.path}, or {elsewhere}")
    if not base.is_writable:
        return Finding("disk.temp", Severity.PROBLEM, f"{base.path} cannot be written to", elsewhere)
    if base.is_noexec and needs_exec:
        found = f"{base.path} is mounted noexec, and Triton's model processes are run from it"
        return Finding("disk.temp", Severity.PROBLEM, found, elsewhere)
    found = f"{shown_bytes(base.free_bytes)} free for {base.path}"
    if base.free_bytes < TEMP_BYTES:
        return Finding("disk.temp", Severity.WARNING, found, f"make room, or {elsewhere}")
    return Finding("disk.temp", Severity.OK, found)


def _models(repositories: tuple[RepositoryFacts, ...]) -> Finding:
    missing = [one.path for one in repositories if one.models is None]
    if missing:
        advice = "give an existing folder: penstock up --model-repository DIR"
        return Finding("disk.models", Severity.PROBLEM, f"the model repository {missing[0]} cannot be read", advice)
    names = [name for one in repositories for name in one.models or ()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        where = [str(one.path / twice[0]) for one in repositories if twice[0] in (one.models or ())]
        found = f"the model {twice[0]} stands in two repositories"
        return Finding("disk.models", Severity.PROBLEM, found, f"remove one of {' and '.join(where)}")
    if not names:
        return Finding("disk.models", Severity.NOTE, "no model yet", "penstock models pull yolox-nano")
    return Finding("disk.models", Severity.OK, f"models: {', '.join(sorted(names))}")


# Triton 2.51's python backend creates a region of 1 MiB per instance and grows it by as much on demand ("requires at
# least 1 MB of shared memory"). Older releases start with 64 MB.
INSTANCE_BYTES = MIB
CONTAINER_DEFAULT_BYTES = 64 * MIB
_REGION = re.compile(r"penstock_(?P<engine_id>[0-9a-f]{12})_.*")
_RUN = "run-"


@dataclass(frozen=True, slots=True)
class Leftover:
    """Regions of an engine whose stack has ended. will_be_cleared: the next `penstock up` removes them."""

    engine_id: str
    regions: int
    size_bytes: int
    will_be_cleared: bool


@dataclass(frozen=True, slots=True)
class SharedMemoryFacts:
    """size_bytes: 0 without /dev/shm. in_container: the kind, or empty. needs_it: Triton would run here."""

    size_bytes: int
    free_bytes: int
    is_writable: bool
    in_container: str
    leftovers: tuple[Leftover, ...]
    needs_it: bool = True


def probe_shared_memory(plan: StackPlan) -> SharedMemoryFacts:
    """Reads the file system, this user's regions in it, and their owners."""
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
    """This user's regions with our prefix whose stack has ended."""
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
    """Yields nothing if the stack runs; else one value: whether its run directory still exists."""
    run = run_base / f"{_RUN}{engine_id}"
    if os.path.isdir(run):
        with _shared_lock(run_base / ".lock") as is_quiet, _shared_lock(run / "owner") as is_ownerless:
            if is_quiet and is_ownerless:
                yield True
    elif engine_id not in carried:  # a stack with another TMPDIR is found by its processes
        yield False


@contextlib.contextmanager
def _shared_lock(path: Path) -> Iterator[bool]:
    """Whether no living process holds the lock. A starting stack may wait for this test."""
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
    mark = re.compile(rb"(?:^|\0)" + ENGINE_ID_VARIABLE.encode() + rb"=([0-9a-f]{12})(?:\0|$)")
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found.update(match.decode() for match in mark.findall(path.read_bytes()))
    return found


def shared_memory_findings(facts: SharedMemoryFacts) -> list[Finding]:
    """Free space, and leftover regions."""
    return [_space(facts), _leftovers(facts)]


def _space(facts: SharedMemoryFacts) -> Finding:
    fatal = Severity.PROBLEM if facts.needs_it else Severity.NOTE
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
        status = Severity.WARNING if facts.needs_it else Severity.NOTE
        return Finding("shm.room", status, found, f"a container's default is 64 MiB; make it larger: {larger}")
    return Finding("shm.room", Severity.OK, found)


def _leftovers(facts: SharedMemoryFacts) -> Finding:
    if not facts.leftovers:
        return Finding("shm.leftovers", Severity.OK, "nothing of killed stacks")
    count, size = sum(one.regions for one in facts.leftovers), sum(one.size_bytes for one in facts.leftovers)
    regions, stacks = _counted(count, "region"), _counted(len(facts.leftovers), "killed stack")
    found = f"{regions} of shared memory ({shown_bytes(size)}) left over from {stacks}"
    remaining = [f"/dev/shm/penstock_{one.engine_id}_*" for one in facts.leftovers if not one.will_be_cleared]
    if not remaining:
        return Finding("shm.leftovers", Severity.NOTE, found, "the next `penstock up` removes them")
    return Finding("shm.leftovers", Severity.WARNING, found, f"no later start removes these: rm {' '.join(remaining)}")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
