"""The MPS daemon is looked for by its control socket: as NVIDIA's has it, SOCK_SEQPACKET, left behind by a dead one."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.gpu.mps.control import PRESENCE_TTL_S, DaemonPresence, daemon_listens


@contextmanager
def daemon(pipe_directory: Path, *, waiting: int = 8) -> Iterator[None]:
    """Something that listens where the daemon does; the socket's file stays, as the daemon's does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.bind(str(pipe_directory / "control"))
        control.listen(waiting)
        yield


def test_folder_without_a_daemon_has_none(tmp_path: Path) -> None:
    """Neither an empty folder, nor a missing one, nor a file by that name, nor a path too long for a socket fails."""
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "control").touch()
    for folder in (tmp_path, tmp_path / "missing", tmp_path / "file", tmp_path / ("x" * 200)):
        assert not daemon_listens(folder)


def test_daemon_that_accepts_nothing_is_not_waited_for(tmp_path: Path) -> None:
    """With its queue of connections full, the answer is no, and at once."""
    with daemon(tmp_path, waiting=0), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(tmp_path / "control"))
        assert not daemon_listens(tmp_path)


def test_sight_of_the_daemon_is_believed_for_its_time_and_no_longer(tmp_path: Path) -> None:
    """The daemon's log has no line for each scrape, and its death is seen half a minute later."""
    now = [0.0]
    sight = DaemonPresence(tmp_path, clock=lambda: now[0])
    with daemon(tmp_path):
        assert sight.is_up()
    assert (tmp_path / "control").exists()
    assert not daemon_listens(tmp_path)
    now[0] = PRESENCE_TTL_S - 0.1
    assert sight.is_up()
    now[0] = PRESENCE_TTL_S
    assert not sight.is_up()
