"""Where the system's loader searches for libraries of programs that are started from here."""

import os

VARIABLE = "LD_LIBRARY_PATH"


def leave_working_directory_out() -> None:
    """Removes empty entries: they mean the working directory, where another user may have put a library."""
    kept = ":".join(filter(None, os.environ.get(VARIABLE, "").split(":")))
    if kept:
        os.environ[VARIABLE] = kept
    else:
        os.environ.pop(VARIABLE, None)
