"""A process that takes a core: `… core_taker CORES`, CORES as 0,1. Says what came of it, and lives on.

After a line of standard input it leaves its core, and says on which ones its threads may run.
"""

import json
import os
import subprocess
import sys
import threading

from deepstream_pipeline.sources.own_core import pin_to_own_core


def main() -> None:
    """One line of JSON; the end of standard input is its own."""
    os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
    taken = pin_to_own_core()
    core = taken.number if taken is not None else None
    later: list[list[int]] = []
    thread = threading.Thread(target=lambda: later.append(sorted(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    given_on = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, check=True, text=True
    )
    told = {"core": core, "cores": sorted(os.sched_getaffinity(0)), "later": later[0], "given_on": given_on.stdout}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    if taken is not None:
        taken.leave()
        taken.leave()
    tasks = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
    sys.stdout.write(json.dumps({"tasks": tasks}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
