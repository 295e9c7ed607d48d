"""What the sources' thread waits for."""

import os
import socket
from unittest.mock import Mock

from deepstream_pipeline.sources.line import Line
from deepstream_pipeline.sources.wires import Bell, Wires


def test_end_that_is_seen_and_not_known_yet_is_asked_for_again_without_spinning() -> None:
    """A process closes its pipes before it can be reaped: until then its end is looked at ten times a second."""
    bell = Bell()
    wires: Wires[str] = Wires(bell)
    ours, theirs = socket.socketpair()
    end, write_end = os.pipe()
    line = Mock(spec=Line, socket=ours, pidfd=end, is_behind=False, has_hung_up=False)
    wires.connect(line, "a")
    os.close(write_end)
    assert wires.wait(1.0) == [("a", line, False)]
    wires.poll(line, "a")
    wires.poll(line, "a")
    assert wires.wait(60.0) == [("a", line, False)]
    wires.cut(line)
    assert wires.wait(0.0) == []
    wires.close()
    bell.close()
    ours.close()
    theirs.close()
    os.close(end)
