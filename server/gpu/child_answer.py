"""What a driver says, asked from a process of its own: a call into a sick one may never return."""

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

_REAP_S = 1.0  # a killed process that is stuck in the driver is not waited for; it is reaped when another is started

T = TypeVar("T")


class NoAnswer(Exception):
    """The process gave none; the text says why. is_late: it gave none in time."""

    def __init__(self, detail: str, *, is_late: bool = False) -> None:
        super().__init__(detail)
        self.is_late = is_late


def ask_child(program: Sequence[str], kind: type[T], timeout_s: float) -> T:
    """The one JSON object that the program prints. Blocks for timeout_s, and a second, at most. Raises NoAnswer."""
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise NoAnswer(str(error)) from error
    try:
        said, complaint = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_REAP_S)
        for stream in filter(None, (child.stdout, child.stderr)):
            stream.close()
        raise NoAnswer(f"{timeout_s:g} s", is_late=True) from None
    try:
        return msgspec.json.decode(said, type=kind)
    except msgspec.DecodeError:
        last = complaint.decode(errors="replace").strip().splitlines()[-1:]
        raise NoAnswer(last[0] if last else f"the process ended with {child.returncode}") from None
