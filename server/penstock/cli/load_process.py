"""Runs `penstock load` for the gateway, in a process with limits and a lower priority."""

import os
import signal
import sys

from penstock.process_limits import end_with_parent, limit_process

_NICE = 2  # below the server under test, but high enough that the driver does not measure its own delays


def main(arguments: list[str]) -> int:
    """Returns the command's exit code.

    arguments: the parent's process id, memory limit in bytes, limit of a written file in bytes; then those of
    `penstock load`.
    """
    parent, memory_bytes, file_bytes = map(int, arguments[:3])
    end_with_parent(parent)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit fails with EFBIG instead
    limit_process(memory_bytes, file_bytes=file_bytes)
    os.nice(_NICE)
    from penstock.cli.main import main as run_command  # after the limits, as its imports are large

    sys.argv = ["penstock", "load", *arguments[3:]]
    return run_command()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
