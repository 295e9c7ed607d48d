"""A process that takes a core: `… core_taker CORES SYS`, CORES as 0,1. Says what came of it, and lives on.

SYS is a folder for Linux' /sys, as `own_sys` makes it: of the cards' interrupts. After a line of standard input it
leaves its core, and says on which ones its threads may run; after the line `where` it says so, and leaves nothing.
"""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from penstock.gateway.workers.interrupt_affinity import Interrupts
from penstock_video.sources import core_pinning as own_core


def main() -> None:
    """One line of JSON; the end of standard input is its own."""
    os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
    own_core.LOOK_S = 0.05
    interrupts = Interrupts(Path(sys.argv[2]))
    taken = own_core.pin_to_own_core(interrupts)
    if taken is not None:
        taken.keep_off(interrupts)
    core = taken.number if taken is not None else None
    later: list[list[int]] = []
    thread = threading.Thread(target=lambda: later.append(sorted(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    given_on = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, check=True, text=True
    )
    event_log = {"core": core, "cores": sorted(os.sched_getaffinity(0)), "later": later[0], "given_on": given_on.stdout}
    sys.stdout.write(json.dumps(event_log) + "\n")
    sys.stdout.flush()
    while sys.stdin.readline() == "where\n":
        _say_where()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    if taken is not None:
        taken.leave()
        taken.leave()
    _say_where()
    sys.stdin.read()


def _say_where() -> None:
    tasks = []
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the one that looks for interrupts ends where the core is left
            tasks.append(sorted(os.sched_getaffinity(int(task))))
    sys.stdout.write(json.dumps({"tasks": tasks}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
