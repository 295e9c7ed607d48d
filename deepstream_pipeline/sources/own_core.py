"""A core of its own for a decode process: its code and its cameras' data stay in that core's cache.

Measured on an H200's host (16 vCPUs), 16 cameras of 720p H.264 at 30/s in one process, CPU of it a frame: 826 µs where
its threads may run on any core, 713 µs on two, 582 µs on one; p50 of a frame's way 2.8 and 1.9 ms, p99 4.2 and 3.7. A
thread that wakes on a cold core pays 220 to 270 µs for a call of the decoder's library that costs 59 µs on a warm one.

Which core is chance; that no other decode process of this user has it is a lock on a file, which the system gives back
for whoever dies with it. Programs that see another folder for temporary files, as in another container, are not seen.
"""

import fcntl
import os
import random
import tempfile
from pathlib import Path

LEAST_CORES = 4  # on fewer, the engine and the rest of this program want each of them
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def pin_to_own_core(least_cores: int = LEAST_CORES) -> int | None:
    """The core on which this thread, and what it starts from now on, stays until the process ends.

    None, and all is as it was, where there are fewer cores to use, each has its process, or the system has no lock or
    no pinning for us. Called once, before any other thread: those that there are keep their cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < least_cores:
        return None
    try:
        folder = _locks_folder()
    except OSError:
        return None
    for core in random.sample(cores, len(cores)):
        if _has_taken(core, folder / f"core-{core}.lock"):
            return core
    return None


def _has_taken(core: int, path: Path) -> bool:
    """Whether it is this process's now. Its descriptor is left open then: the lock lasts as long as that."""
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.sched_setaffinity(0, {core})
    except OSError:  # another process has it, or the system refuses
        os.close(descriptor)
        return False
    return True


def _locks_folder() -> Path:
    """This user's, as that of `decode.turns`; made where it is not there. Raises OSError where there is none."""
    folder = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
