"""A decode process with several cameras, and without a decoder: each of them is a thread with a FakeChild."""

import os
import socket
import sys
from contextlib import suppress

from penstock_video.sources.child import settle
from penstock_video.sources.shared_child import serve
from tests.deepstream_pipeline.sources.fake_child import FakeChild


def run(link: socket.socket, ring_fd: int) -> int:
    """One camera's life."""
    with suppress(BrokenPipeError, ConnectionResetError):
        FakeChild(os.dup(link.fileno()), ring_fd, is_shared=True).run()
    return 0


if __name__ == "__main__":
    settle(int(sys.argv[-2]))
    with socket.socket(fileno=int(sys.argv[-1])) as control:
        os._exit(serve(control, run))
