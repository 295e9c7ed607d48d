"""A decode process with several cameras: `python -m deepstream_pipeline.sources.shared_child CARD FD_CONTROL`.

Over its control socket come cameras, each as three descriptors: its socket, its ring, and a pipe into which a byte is
written when it is over. What it is to open stands in no argument and no variable. The process ends where its control
socket does, and its parent may kill it at any moment; Linux does so when the thread that started it is over.
"""

import os
import socket
import sys

from deepstream_pipeline.sources.child import settle


def main(arguments: list[str]) -> int:
    """0 where it ended in order; what was wrong with a camera is said over that one's socket, as Ended."""
    if len(arguments) != 2 or not all(word.isdecimal() for word in arguments):
        sys.stderr.write("this is a part of `penstock video`, which starts it with a card's number and a descriptor\n")
        return 2
    settle()
    from deepstream_pipeline.decode.decode_errors import watch_stdout  # after the variable that is set: numpy comes
    from deepstream_pipeline.sources.shared_cameras import serve
    from deepstream_pipeline.sources.shared_work import Card

    with socket.socket(fileno=int(arguments[1])) as control:
        status = serve(control, Card(int(arguments[0]), watch_stdout()).run)
    sys.stderr.flush()
    os._exit(status)  # the driver's own threads, and what hangs, are not waited for


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
