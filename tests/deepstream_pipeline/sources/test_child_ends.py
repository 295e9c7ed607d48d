"""How a decode process ends: with its parent, with its source, in words, and without a password in them."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock_video.sources.protocol import Beat, Ended, EndReason, Hold, Release, encode
from tests.deepstream_pipeline.clips import truncated, write_clip
from tests.deepstream_pipeline.decode.web import web
from tests.deepstream_pipeline.sources.child_parent import DEADLINE_S, FRAMES, child, ended


@pytest.mark.parametrize("held_by", ["slots", "hold"])
def test_process_ends_with_its_parent(tmp_path: Path, held_by: str) -> None:
    """Its socket closes: it ends, whether it waits for a slot or for a command to continue."""
    with child(write_clip(tmp_path / "a.ts", frames=400, size=(320, 192))) as parent:
        parent.frame()
        if held_by == "hold":
            parent.say(Hold(True))
        parent.until(lambda record: isinstance(record, Beat))
        parent.socket.close()
        parent.process.wait(DEADLINE_S)


def test_process_that_waits_for_its_stream_ends_with_the_program(tmp_path: Path) -> None:
    """The program is killed, and the process reads nothing: it is killed with it."""
    clip = write_clip(tmp_path / "a.ts", frames=400, size=(320, 192))
    with web() as site:
        site.pages["/a.ts"] = clip.read_bytes()
        how: dict[str, Any] = {"is_process": True, "has_program": True, "read_timeout_s": 2 * DEADLINE_S}
        with child(site.url("/a.ts/stops"), policy="drop-newest", **how) as parent:
            parent.frame()
            assert isinstance(parent.process, subprocess.Popen)
            parent.process.kill()
            with suppress(ConnectionResetError):
                parent.rest()


def test_process_whose_program_ended_before_it_began_ends() -> None:
    """It does not wait for its socket, which another process may still hold."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(DEADLINE_S)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-m", "penstock_video.sources.child", *map(str, (gone.pid, theirs.fileno(), 0))]
        answer = subprocess.run(
            command, pass_fds=(theirs.fileno(),), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    assert (answer.returncode, answer.stderr) == (1, "the program that started this decode process has ended\n")


def test_process_that_is_killed_takes_nothing_with_it(tmp_path: Path) -> None:
    """Its parent hears the end of the socket, and what lies in the ring can still be read."""
    with child(write_clip(tmp_path / "a.mp4", frames=FRAMES), is_process=True) as parent:
        assert isinstance(parent.process, subprocess.Popen)
        frame = parent.frame()
        parent.process.kill()
        parent.process.wait(DEADLINE_S)
        assert parent.row_number(frame) == 0
        with pytest.raises((AssertionError, ConnectionResetError)):
            parent.until(lambda record: isinstance(record, Ended))


def test_interrupt_is_the_parents_to_decide(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal: this one goes on until its parent ends it."""
    with child(write_clip(tmp_path / "a.mp4", frames=FRAMES), is_process=True) as parent:
        assert isinstance(parent.process, subprocess.Popen)
        parent.say(Release((parent.frame().slot,)))
        parent.process.send_signal(signal.SIGINT)
        assert len(parent.rest()) == FRAMES - 1
        assert parent.process.wait(DEADLINE_S) == 0


def test_password_stands_in_no_argument_and_no_word() -> None:
    """Neither /proc nor what it says of a camera that is off holds the user or the password."""
    with child("rtsp://anna:hunter2@127.0.0.1:1/1", policy="drop-oldest", is_process=True) as parent:
        assert isinstance(parent.process, subprocess.Popen)
        line = Path(f"/proc/{parent.process.pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{parent.process.pid}/environ").read_bytes()
        parent.rest()
        assert ended(parent).reason is EndReason.UNAVAILABLE
        stderr = parent.process.stderr.read() if parent.process.stderr else b""
    assert b"hunter2" not in line + environment + stderr
    assert b"hunter2" not in b"".join(encode(record) for record in parent.event_log)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder / "missing.mp4", EndReason.UNAVAILABLE),
        (lambda folder: folder, EndReason.NOT_ALLOWED),
        (lambda folder: "concat:a|b", EndReason.NOT_ALLOWED),
        (lambda folder: truncated(folder / "b.mp4", write_clip(folder / "a.mp4")), EndReason.DECODE),
    ],
)
def test_source_that_cannot_be_opened_says_why(
    tmp_path: Path, make: Callable[[Path], object], reason: EndReason
) -> None:
    """One word for the program, a sentence for people, exit 0: it is no fault of the process."""
    with child(make(tmp_path)) as parent:
        assert parent.rest() == []
        assert parent.process.wait(DEADLINE_S) == 0
    assert ended(parent).reason is reason
    assert len(ended(parent).text) > 10


def test_server_that_refuses_the_password_is_distinguished() -> None:
    """401 is no ordinary failure: it is asked again slowly."""
    with web() as site, child(site.url("/status/401", "anna:hunter2@"), policy="drop-oldest") as parent:
        parent.rest()
        assert ended(parent).reason is EndReason.AUTH_FAILED
        assert "hunter2" not in ended(parent).text


def test_process_without_a_parent_says_what_it_is() -> None:
    """Someone who starts it by hand gets a sentence, and no traceback."""
    command = [sys.executable, "-m", "penstock_video.sources.child"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert answer.returncode == 2
    assert "penstock video" in answer.stderr


def test_process_imports_nothing_it_does_not_need() -> None:
    """Two hundred cameras start two hundred of them."""
    heavy = "{'scipy', 'onnxruntime', 'fastapi', 'grpc', 'pydantic', 'supervision', 'trackers', 'asyncio', 'structlog'}"
    program = f"""import sys; from penstock_video.sources import child, child_work
raise SystemExit(' '.join({heavy} & set(sys.modules)) or None)"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
