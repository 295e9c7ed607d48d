"""Triton's output as entries of our log."""

import logging
from collections.abc import Sequence

import pytest

from penstock.engines.triton.log_parser import (
    MAX_ENTRIES_PER_S,
    MAX_LINE_BYTES,
    MAX_MESSAGE_CHARS,
    LogAssembler,
    LogEntry,
    LogSink,
    one_line,
)

STAMP = "1121 02:11:27.341537 2847"


def entries_of(text: str, *, has_gpu: bool = True) -> list[LogEntry]:
    """All entries of a whole output."""
    assembler = LogAssembler(has_gpu=has_gpu)
    return assembler.feed(text.encode()) + assembler.flush()


class Recorder:
    """Takes entries as our log would."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, dict[str, str | int]]] = []

    def __call__(self, level: int, event: str, /, **fields: str | int) -> None:
        self.lines.append((level, event, fields))


@pytest.mark.parametrize(
    ("letter", "level"), [("I", logging.INFO), ("W", logging.WARNING), ("E", logging.ERROR), ("F", logging.CRITICAL)]
)
def test_header_of_each_severity_becomes_its_level(letter: str, level: int) -> None:
    """A quoted glog line gives level, source and the text between the quotes."""
    line = f'{letter}{STAMP} http_server.cc:4713] "Started HTTPService at 127.0.0.1:9000"\n'
    assert entries_of(line) == [LogEntry(level, "http_server.cc:4713", "Started HTTPService at 127.0.0.1:9000")]


def test_quoted_message_with_escapes_becomes_one_printable_line() -> None:
    """What Triton escapes as JSON is decoded, then made safe: lines joined, colours dropped, quotes kept."""
    text = r"failed to load 'm': ValueError: one\n\u001B[31mtwo\u001B[0m \"q\"\n\nAt:\n  /m/1/model.py(3): initialize\n"
    (entry,) = entries_of(f'E{STAMP} model_lifecycle.cc:642] "{text}"\n')
    assert entry.message == "failed to load 'm': ValueError: one | two \"q\" | At: | /m/1/model.py(3): initialize"


def test_unquoted_header_takes_the_lines_that_belong_to_it() -> None:
    """A stub's own lines have no quotes; the trace under them stays with them, the next line does not."""
    text = (
        f"I{STAMP} pb_stub.cc:298]  Failed to initialize: ModuleNotFoundError: No module named 'x'\n"
        "\nAt:\n  /m/1/model.py(1): <module>\n  <frozen importlib._bootstrap>(241): _call\n\nhello\n"
    )
    assert entries_of(text) == [
        LogEntry(
            logging.INFO,
            "pb_stub.cc:298",
            "Failed to initialize: ModuleNotFoundError: No module named 'x' | At: | "
            "/m/1/model.py(1): <module> | <frozen importlib._bootstrap>(241): _call",
        ),
        LogEntry(logging.INFO, "", "hello"),
    ]


def test_start_up_tables_are_at_debug_level() -> None:
    """The boxes of the start are there for who asks for them."""
    text = f"I{STAMP} server.cc:631] \n+---------+------+\n| Backend | Path |\n+---------+------+\n\n"
    assert [(entry.level, entry.message) for entry in entries_of(text)] == [
        (logging.DEBUG, "+---------+------+"),
        (logging.DEBUG, "| Backend | Path |"),
        (logging.DEBUG, "+---------+------+"),
    ]


def test_traceback_of_a_model_becomes_one_error() -> None:
    """A printed traceback is one entry, closed by its exception; what follows is another."""
    text = (
        'no newlineTraceback (most recent call last):\n  File "/m/1/model.py", line 8, in initialize\n'
        "    1/0\n    ~^~\nZeroDivisionError: division by zero\nnext\n"
    )
    first, second = entries_of(text)
    assert first.level == logging.ERROR
    assert first.message.endswith("| 1/0 | ~^~ | ZeroDivisionError: division by zero")
    assert second == LogEntry(logging.INFO, "", "next")


def test_print_without_newline_before_a_header_leaves_the_header_readable() -> None:
    """A model's half line in front of Triton's line, and one behind it, are entries of their own."""
    text = f'half I{STAMP} server.cc:1] "whole"behind\n'
    assert entries_of(text) == [
        LogEntry(logging.INFO, "", "half"),
        LogEntry(logging.INFO, "server.cc:1", "whole"),
        LogEntry(logging.INFO, "", "behind"),
    ]


@pytest.mark.parametrize("piece_bytes", [1, 7, 64])
def test_output_in_pieces_gives_the_same_entries(piece_bytes: int) -> None:
    """Where the pipe cuts does not matter, inside a character either."""
    text = f'E{STAMP} a.cc:1] "Grüße"\nTraceback (most recent call last):\n  File "x"\nE: y\nlast'.encode()
    assembler = LogAssembler(has_gpu=True)
    entries: list[LogEntry] = []
    for start in range(0, len(text), piece_bytes):
        entries += assembler.feed(text[start : start + piece_bytes])
    assert entries + assembler.flush() == entries_of(text.decode())
    assert entries[0].message == "Grüße"


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("Signal (15) received.", logging.INFO),
        ("Signal (11) received.", logging.ERROR),
        (
            "[libprotobuf ERROR /tmp/x/text_format.cc:337] Error parsing text-format inference.ModelConfig: 1:28",
            logging.ERROR,
        ),
    ],
)
def test_line_without_glog_header_has_the_level_that_it_deserves(line: str, level: int) -> None:
    """Crashes and protobuf's complaints are errors, a polite signal is not."""
    (entry,) = entries_of(line + "\n")
    assert entry.level == level


@pytest.mark.parametrize(("has_gpu", "level"), [(False, logging.DEBUG), (True, logging.ERROR)])
def test_complaint_about_a_missing_gpu_counts_only_where_there_is_one(has_gpu: bool, level: int) -> None:
    """A laptop's start shows no errors; a GPU machine's broken driver does."""
    (entry,) = entries_of(f'E{STAMP} server.cc:241] "CudaDriverHelper has not been initialized."\n', has_gpu=has_gpu)
    assert entry.level == level


def test_line_beyond_the_limit_is_cut_and_counted() -> None:
    """A line of a megabyte costs neither memory nor the log."""
    assembler = LogAssembler(has_gpu=True)
    entries: list[LogEntry] = []
    for _ in range(16):
        entries += assembler.feed(b"x" * MAX_LINE_BYTES)
    entries += assembler.feed(b"\nnext\n")
    assert len(entries[0].message) < MAX_MESSAGE_CHARS + 50
    assert entries[1].message == "next"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("a\x00b\x07", "a\\x00b\\x07"),
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07", "red"),
        ("one\r\ntwo\rthree\x0bfour", "one | two | three | four"),
        ("left\u202eright", "left\\u202eright"),
    ],
)
def test_control_characters_cannot_reach_the_terminal(text: str, safe: str) -> None:
    """Colours are dropped, line breaks joined, everything else that controls is escaped."""
    assert one_line(text) == safe


def test_sink_emits_with_source_and_remembers_the_last_errors() -> None:
    """The last words of a Triton that died are its last errors, each once, or else its last line."""
    recorder = Recorder()
    sink = LogSink(recorder, has_gpu=True, remembered=2)
    sink.feed(b"cannot do that\n", 0.0)
    assert sink.last_errors() == "cannot do that"
    for text in ("first", "second", "third", "third"):
        sink.feed(f'E{STAMP} main.cc:1] "{text}"\n'.encode(), 0.0)
    assert recorder.lines[1] == (logging.ERROR, "first", {"source": "main.cc:1"})
    assert sink.last_errors() == "third"


@pytest.mark.parametrize(
    ("head", "source", "level"),
    [
        ("I", "python_be.cc:2249", logging.DEBUG),
        ("I", "server.cc:345", logging.DEBUG),
        ("W", "server.cc:333", logging.WARNING),
        ("E", "backend_model.cc:692", logging.ERROR),
        ("I", "model_lifecycle.cc:839", logging.INFO),
        ("I", "model.py:67", logging.INFO),
    ],
)
def test_sink_leaves_the_servers_notes_of_itself_to_who_debugs(head: str, source: str, level: int) -> None:
    """A start shows which models are loaded and what they say, not sixty lines in which nothing is wrong."""
    recorder = Recorder()
    LogSink(recorder, has_gpu=True).feed(f'{head}{STAMP} {source}] "text"\n'.encode(), 0.0)
    assert recorder.lines == [(level, "text", {"source": source})]


def test_sink_over_its_rate_drops_counts_and_still_remembers_errors() -> None:
    """A model that prints in a loop fills no log; the next second says how much is missing."""
    recorder = Recorder()
    sink = LogSink(recorder, has_gpu=True)
    sink.feed(b"spam\n" * (MAX_ENTRIES_PER_S + 30), 10.2)
    sink.feed(f'E{STAMP} a.cc:1] "the cause"\n'.encode(), 10.9)
    assert len(recorder.lines) == MAX_ENTRIES_PER_S
    assert sink.last_errors() == "the cause"
    sink.feed(b"calm\n", 11.0)
    assert [event for _, event, _ in recorder.lines[-2:]] == ["Triton writes too fast; log lines dropped", "calm"]
    assert recorder.lines[-2][2] == {"dropped": 31}


def test_sink_whose_log_cannot_be_written_keeps_reading() -> None:
    """A closed terminal must not stop the pipe from being read."""

    def broken(level: int, event: str, /, **fields: str | int) -> None:
        raise BrokenPipeError("gone")

    sink = LogSink(broken, has_gpu=True)
    sink.feed(f'E{STAMP} a.cc:1] "the cause"\n'.encode(), 0.0)
    assert sink.last_errors() == "the cause"


def test_half_a_line_is_pending_until_flushed() -> None:
    """The reader knows when an idle moment should give out what waits."""
    recorder = Recorder()
    sink = LogSink(recorder, has_gpu=True)
    sink.feed(b"prompt> ", 0.0)
    assert sink.is_pending
    sink.flush(0.2)
    assert not sink.is_pending
    assert messages(recorder.lines) == ["prompt>"]


def messages(lines: Sequence[tuple[int, str, dict[str, str | int]]]) -> list[str]:
    """The texts alone."""
    return [event for _, event, _ in lines]
