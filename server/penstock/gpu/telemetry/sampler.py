"""Mean GPU load during a benchmark or script. Blocking, with a reader thread."""

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

import msgspec

from penstock.gpu.telemetry.messages import Activity, CardLoad, ProcessLoad, TelemetryMessage

PROGRAM = (sys.executable, "-P", "-m", "penstock.gpu.telemetry")
INTERVAL_S = 0.25
FIRST_LINE_S = 30.0  # NVML's first call after boot initialises every card
STOP_S = 2.0
_MAX_MESSAGES = 100_000
_FIGURES = Activity.__struct_fields__


class TelemetryUnavailable(Exception):
    """GPU load is unknown. The message has the reason."""


class Sampler:
    """Context manager: runs the telemetry process and stores its messages. Entering raises TelemetryUnavailable."""

    def __init__(self, *, interval_s: float = INTERVAL_S, program: Sequence[str] = PROGRAM) -> None:
        self._command = (*program, "--interval", str(interval_s))
        self._lines: deque[TelemetryMessage] = deque(maxlen=_MAX_MESSAGES)
        self._changed = threading.Condition()
        self._has_ended = False
        self._process: subprocess.Popen[bytes] | None = None
        self._reading: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reading = threading.Thread(target=self._read, args=(self._process,), name="gpu-sampler", daemon=True)
        self._reading.start()
        try:
            self._wait_for_line_after(float("-inf"), FIRST_LINE_S)
            if why := self._lines[-1].why:
                raise TelemetryUnavailable(why)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def lines(self) -> tuple[TelemetryMessage, ...]:
        """The messages so far, oldest first."""
        with self._changed:
            return tuple(self._lines)

    def mean(self, begin_s: float, end_s: float) -> tuple[CardLoad, ...]:
        """Each card's means between two times of time.monotonic(). Waits for the message that covers the end.

        Partly covered messages are weighted. Memory and processes are the last message's. Raises TelemetryUnavailable.
        """
        self._wait_for_line_after(end_s, FIRST_LINE_S)
        return mean_loads(self.lines, begin_s, end_s)

    def _wait_for_line_after(self, end_s: float, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._has_line_after(end_s), timeout_s)
            if not self._has_line_after(end_s):
                why = "ended" if self._has_ended else f"has said nothing for {timeout_s:g} s"
                raise TelemetryUnavailable(f"the process that asks NVML {why}")

    def _has_line_after(self, end_s: float) -> bool:
        return bool(self._lines) and self._lines[-1].at_s >= end_s

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            line = msgspec.json.decode(text, type=TelemetryMessage)
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _stop(self) -> None:
        process, reading = self._process, self._reading
        if process is None or reading is None or process.stdin is None or process.stdout is None:
            return
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # a process that hangs in the driver may survive; it is left behind
        reading.join(STOP_S)
        if not reading.is_alive():
            process.stdout.close()
            process.wait(STOP_S)


def sample(seconds: float) -> tuple[CardLoad, ...]:
    """Each card's load over the next `seconds`. Blocks. Raises TelemetryUnavailable."""
    with Sampler(interval_s=min(INTERVAL_S, seconds)) as sampler:
        begin_s = time.monotonic()
        time.sleep(seconds)
        return sampler.mean(begin_s, time.monotonic())


def mean_loads(lines: Sequence[TelemetryMessage], begin_s: float, end_s: float) -> tuple[CardLoad, ...]:
    """See Sampler.mean. Raises TelemetryUnavailable."""
    weighed = [(min(line.at_s, end_s) - max(line.at_s - line.seconds, begin_s), line) for line in lines]
    inside = [(seconds, line) for seconds, line in weighed if seconds > 0]
    if not inside:
        raise TelemetryUnavailable("nothing was read in that time")
    return tuple(_mean_load(card, inside) for card in inside[-1][1].cards)


def _mean_load(last: CardLoad, inside: Sequence[tuple[float, TelemetryMessage]]) -> CardLoad:
    of_card = [(seconds, card) for seconds, line in inside for card in line.cards if card.index == last.index]
    activity = {
        name: _weighted_mean([(seconds, getattr(card.activity, name)) for seconds, card in of_card])
        for name in _FIGURES
    }
    running = _weighted_mean([(seconds, card.kernel_running) for seconds, card in of_card])
    processes = tuple(_mean_process(process, of_card) for process in last.processes)
    return msgspec.structs.replace(last, activity=Activity(**activity), kernel_running=running, processes=processes)


def _mean_process(last: ProcessLoad, of_card: Sequence[tuple[float, CardLoad]]) -> ProcessLoad:
    """Averages only messages that have the process's time."""
    shares = [(seconds, one.time_share) for seconds, card in of_card for one in card.processes if one.pid == last.pid]
    return msgspec.structs.replace(last, time_share=_weighted_mean(shares))


def _weighted_mean(figures: Sequence[tuple[float, float | None]]) -> float | None:
    known = [(seconds, figure) for seconds, figure in figures if figure is not None]
    whole = sum(seconds for seconds, _ in known)
    return sum(seconds * figure for seconds, figure in known) / whole if whole else None
