"""Names Python's threads in the kernel, as Python 3.14 does by itself, so that /proc shows the names.

For a program that the bench starts with this folder in PYTHONPATH: the interpreter imports a sitecustomize by itself.
"""

import ctypes
import threading

_PR_SET_NAME, _MOST = 15, 15  # bytes


def _name_threads() -> None:
    prctl = ctypes.CDLL(None).prctl
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def named(thread: threading.Thread) -> None:
        prctl(_PR_SET_NAME, thread.name.encode(errors="replace")[:_MOST], 0, 0, 0)
        begin(thread)

    threading.Thread._bootstrap_inner = named  # type: ignore[attr-defined]


_name_threads()
