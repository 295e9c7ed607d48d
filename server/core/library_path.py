"""Where the system's loader looks for libraries of the programs that are started from here."""

import os

VARIABLE = "LD_LIBRARY_PATH"


def leave_working_directory_out() -> None:
    """An empty member is the working directory, where another user may have put one; OpenCV's import leaves one."""
    kept = ":".join(filter(None, os.environ.get(VARIABLE, "").split(":")))
    if kept:
        os.environ[VARIABLE] = kept
    else:
        os.environ.pop(VARIABLE, None)
