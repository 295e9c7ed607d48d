"""How commands speak to a person: errors are one sentence on standard error."""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer
from rich.console import Console

if TYPE_CHECKING:  # other commands need no bar
    from rich.progress import Progress, ProgressColumn

NO_WIDTH_LIMIT = 10_000
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on standard output, for programs")]
_STOPPED = 130  # 128 + SIGINT, as shells have it
_GRACE_S = 3.0
_MAX_MESSAGE = 8000  # characters: a message may quote a name of a file, which has no limit


def table_console() -> Console:
    """Standard output for tables: as wide as the terminal, and as wide as its table where a program reads it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = NO_WIDTH_LIMIT
    return console


def program_name(called: Path) -> str:
    """How this shell can call penstock: by its path where it is not on the search path. called: the program's file."""
    return "penstock" if called.name != "penstock" or shutil.which("penstock") else os.path.relpath(called)


def progress_bar(*columns: "ProgressColumn") -> "Progress":
    """A bar on standard error where that is a terminal. columns: behind the bar; by default the parts and the time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    shown = columns or (MofNCompleteColumn(), TimeElapsedColumn())
    leading = (TextColumn("{task.description}"), BarColumn())
    return Progress(*leading, *shown, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """On a terminal, shows what the command waits for, and for how long."""
    from rich.progress import TimeElapsedColumn

    with progress_bar(TimeElapsedColumn()) as bar:
        bar.add_task(text, total=None)
        yield


def print_json(value: object) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


class Failed(typer.Exit):
    """The command ends with this code, after it has said why. message: one sentence."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(code)
        self.message = message


def fail(message: str, *, code: int = 2) -> NoReturn:
    """Say what is wrong and end with the code. Raises Failed."""
    print_failure(message)
    raise Failed(message, code)


@contextmanager
def stoppable(what_is_left: str, *, runs_models: bool = False) -> Iterator[None]:
    """Ctrl-C in the block ends the command with this sentence and the shell's code for it.

    runs_models: this thread runs models, whose loops may never end; then the process is ended.
    """
    sentence = f"stopped: {what_is_left}"
    try:
        with _ended_if_stuck(sentence) if runs_models else nullcontext():
            yield
    except KeyboardInterrupt:
        fail(sentence, code=_STOPPED)


@contextmanager
def _ended_if_stuck(sentence: str) -> Iterator[None]:
    """Ends the process if Python does not handle Ctrl-C within _GRACE_S, because a library does not return.

    The block's own cleaning may take longer.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    is_handled = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def handle(number: int, frame: FrameType | None) -> None:
        is_handled.set()
        signal.default_int_handler(number, frame)

    def watch() -> None:
        while signals := os.read(reader, 1):
            if signals[0] == signal.SIGINT and not is_handled.wait(_GRACE_S):
                print_failure(sentence)
                os._exit(_STOPPED)  # threads of the library would abort an orderly exit
        os.close(reader)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(other)
        is_handled.set()
        os.close(writer)
        thread.join()


def print_failure(message: str) -> None:
    """One line, whatever is in the message: what answered may have sent anything."""
    text = one_line(message)
    if len(text) > _MAX_MESSAGE:
        text = f"{text[:_MAX_MESSAGE]}… ({len(text)} characters)"
    sys.stderr.write(f"penstock: {text}\n")


def one_line(text: str) -> str:
    """The text without line breaks, runs of blanks, and control characters that a terminal would obey."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """The text with its blanks, without control characters: a model's tensors and a picture may have any name."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
