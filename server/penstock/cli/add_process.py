"""Runs `penstock models add`, `inspect` or `check` for the gateway, in a process that limits itself first."""

import os
import signal
import sys

from penstock.process_limits import end_with_parent, limit_process

_NICE = 10  # inference comes first


def main(arguments: list[str]) -> int:
    """Returns the command's exit code.

    arguments: the parent's process id, memory limit in bytes, CPU limit in seconds, limit of a written file in bytes;
    add, inspect or check; then the arguments of that command.
    """
    parent, memory_bytes, cpu_s, file_bytes = map(int, arguments[:4])
    end_with_parent(parent)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit fails with EFBIG instead
    limit_process(memory_bytes, cpu_s=cpu_s, file_bytes=file_bytes)
    os.nice(_NICE)
    from penstock.cli.main import main as run_command  # after the limits, as its imports are large

    sys.argv = ["penstock", "models", *arguments[4:]]
    return run_command()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
