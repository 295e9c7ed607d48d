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
    wakeup = WakeUp()
    wires: ProcessSelector[str] = ProcessSelector(wakeup)
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
    wakeup.close()
    ours.close()
    theirs.close()
    os.close(end)


def test_wakeup_that_is_rung_while_it_is_handled_wakes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two steps of a sender no thread reads it: it would ring on, and wake its thread for ever."""
    wakeup = WakeUp()
    write, is_between = os.eventfd_write, threading.Event()

    def slow_write(descriptor: int, value: int) -> None:
        is_between.set()
        hearer.join(0.2)
        write(descriptor, value)

    hearer = threading.Thread(target=lambda: (is_between.wait(5.0), wakeup.clear()))
    monkeypatch.setattr(os, "eventfd_write", slow_write)
    hearer.start()
    wakeup.ring()
    hearer.join(5.0)
    wakeup.clear()
    assert select.select([wakeup.descriptor], [], [], 0.0)[0] == []
    monkeypatch.setattr(os, "eventfd_write", write)
    wakeup.ring()
    assert select.select([wakeup.descriptor], [], [], 0.0)[0] == [wakeup.descriptor]
    wakeup.close()
