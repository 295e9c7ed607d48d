"""Unix sockets in folders with long names."""

import os
import socket
from pathlib import Path

from server.local.socket_folder import MAX_PATH_BYTES, reachable


def test_socket_in_a_folder_with_a_long_name_is_reached_by_another_process(tmp_path: Path) -> None:
    """Each process has a short way of its own to the same socket."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    one, other = reachable(folder), reachable(folder)
    assert one != other
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(one / "core-batch.sock"))
        listener.listen()
        client.connect(str(other / "core-batch.sock"))
    assert (folder / "core-batch.sock").is_socket()
    for path in (one, other):
        os.close(int(path.name))


def test_folder_with_a_short_name_is_itself() -> None:
    """Nothing is opened where nothing needs it."""
    short = Path("/" + "x" * (MAX_PATH_BYTES - 40))
    assert reachable(short) is short
