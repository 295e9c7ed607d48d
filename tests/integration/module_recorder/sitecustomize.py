"""Records which files of this checkout a Python process enters, between two signals.

Python imports this module at start if its folder is in PYTHONPATH. SIGUSR1 begins a recording, SIGUSR2 ends it and
writes the files, one a line, to RECORD_FOLDER/PID.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType


def record(folder: Path, packages: str) -> None:
    """packages: the start of the paths that count."""
    entered: set[CodeType] = set()

    def enter(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.add(frame.f_code)

    def begin(*_: object) -> None:
        entered.clear()

    def write(*_: object) -> None:
        files = sorted({code.co_filename for code in list(entered) if code.co_filename.startswith(packages)})
        part = folder / f"{os.getpid()}.part"
        part.write_text("\n".join(files))
        part.rename(folder / str(os.getpid()))

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, write)
    threading.setprofile(enter)
    sys.setprofile(enter)


if "RECORD_FOLDER" in os.environ:
    record(Path(os.environ["RECORD_FOLDER"]), os.environ["RECORD_PACKAGES"])
