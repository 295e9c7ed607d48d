"""Lines of the library about pictures that it mended."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock_video.decode.nvdec_errors import DecodeErrors


class Pipe:
    """Lines are written into it; a test sets the time."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.now_s = 100.0
        self.errors = DecodeErrors(self.read_end, lambda: self.now_s)

    def say(self, *numbers: int) -> None:
        """The library does."""
        for number in numbers:
            self.write(f"Decode Error occurred for picture {number}\n".encode())

    def write(self, text: bytes) -> None:
        """Anything."""
        os.write(self.write_end, text)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe."""
    pipe = Pipe()
    yield pipe
    os.close(pipe.read_end)
    os.close(pipe.write_end)


def test_line_is_taken_by_whose_picture_it_names(pipe: Pipe) -> None:
    """Once; others' lines stay."""
    pipe.say(5, 9)
    assert pipe.errors.take({4, 5}) == {5}
    assert pipe.errors.take({4, 5}) == set()
    assert pipe.errors.take({9}) == {9}
    assert pipe.errors.unclaimed == 0


def test_two_lines_of_one_number_are_two_cameras(pipe: Pipe) -> None:
    """Each takes one."""
    pipe.say(5, 5)
    assert [pipe.errors.take({5}) for _ in range(3)] == [{5}, {5}, set()]


def test_line_that_no_one_takes_is_dropped_and_counted(pipe: Pipe) -> None:
    """After a second."""
    pipe.say(5)
    assert pipe.errors.take({1}) == set()
    pipe.now_s += 1.5
    assert pipe.errors.take({1}) == set()
    assert pipe.errors.unclaimed == 1
    assert pipe.errors.take({5}) == set()


def test_lines_are_bounded(pipe: Pipe) -> None:
    """Whatever a camera makes the library say, no more than so many lines are kept."""
    for number in range(3000):
        pipe.say(number)
        if number % 500 == 0:
            pipe.errors.take({-1})
    assert pipe.errors.take({2999}) == {2999}
    assert pipe.errors.unclaimed == 3000 - 1024


def test_other_text_and_half_lines_are_no_matter(pipe: Pipe) -> None:
    """A line may come in two parts; whatever else is printed is passed over."""
    pipe.write(b"Session Initialization Time: 3 ms\n\xff\xfe" + b"x" * 5000 + b"\nDecode Error occurred for pic")
    assert pipe.errors.take({7}) == set()
    pipe.write(b"ture 7\n")
    assert pipe.errors.take({7}) == {7}


PROGRAM = """
import ctypes, os
from penstock_video.decode.nvdec_errors import watch_stdout
errors = watch_stdout()
libc = ctypes.CDLL(None)
libc.printf(b"Decode Error occurred for picture %d\\n", 41)
os.write(2, repr(errors.take({41})).encode())
for _ in range(5000):
    libc.printf(b"Decode Error occurred for picture %d\\n", 1)
os.write(2, repr(errors.take({1})).encode())
os.write(2, repr(errors.take({2})).encode())
libc.printf(b"Decode Error occurred for picture %d\\n", 3)
os.write(2, repr(errors.take({3})).encode())
"""


def test_standard_output_of_a_process_is_watched_and_never_blocks() -> None:
    """What C code prints is there at once, without a flush; a full pipe costs its lines, and later ones come again."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=30, check=True)
    assert (done.stdout, done.stderr.decode()) == (b"", "{41}{1}set(){3}")
