"""What the sources' thread waits for."""

import os
import select
import socket
import threading
from unittest.mock import Mock

import pytest

from penstock_video.sources.process import ProcessLink, ProcessSelector, WakeUp


def test_end_that_is_seen_and_not_known_yet_is_asked_for_again_without_spinning() -> None:
    """A process closes its pipes before it can be reaped: until then its end is looked at ten times a second."""
    bell = WakeUp()
    wires: ProcessSelector[str] = ProcessSelector(bell)
    ours, theirs = socket.socketpair()
    end, write_end = os.pipe()
    line = Mock(spec=ProcessLink, socket=ours, pidfd=end, is_behind=False, has_hung_up=False)
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


def test_bell_that_is_rung_while_it_is_heard_wakes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two steps of who rings it nobody hears it: it would ring on, and wake its thread for ever."""
    bell = WakeUp()
    write, is_between = os.eventfd_write, threading.Event()

    def slow_write(descriptor: int, value: int) -> None:
        is_between.set()
        hearer.join(0.2)
        write(descriptor, value)

    hearer = threading.Thread(target=lambda: (is_between.wait(5.0), bell.clear()))
    monkeypatch.setattr(os, "eventfd_write", slow_write)
    hearer.start()
    bell.ring()
    hearer.join(5.0)
    bell.clear()
    assert select.select([bell.descriptor], [], [], 0.0)[0] == []
    monkeypatch.setattr(os, "eventfd_write", write)
    bell.ring()
    assert select.select([bell.descriptor], [], [], 0.0)[0] == [bell.descriptor]
    bell.close()
