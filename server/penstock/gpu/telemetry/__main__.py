"""The telemetry process: writes one JSON line per interval until its standard input closes.

`python -m penstock.gpu.telemetry [--interval 1.0] [--dcgm http://host:9400/metrics]`. If nothing can be read, it writes
one line with the reason and exits. It also exits after a line with a lost GPU: only a new process can find it again.
"""

import argparse
import select
import sys
import time

import msgspec

from penstock.gpu.telemetry.cards import Cards
from penstock.gpu.telemetry.dcgm import DcgmUnavailable, read_dcgm, with_dcgm_activity
from penstock.gpu.telemetry.messages import TelemetryMessage

INTERVAL_S = 1.0


class TelemetrySource:
    """NVML, a dcgm-exporter or both. why: NVML's error, or empty."""

    def __init__(self, dcgm_url: str) -> None:
        self._dcgm_url = dcgm_url
        self._read_at_s = time.monotonic()
        self._cards, self.why = _open_cards(with_gpm=not dcgm_url)

    def read(self) -> TelemetryMessage:
        """Values since the last call, or since construction."""
        line = self._of_nvml()
        if not self._dcgm_url:
            return line
        try:
            cards = with_dcgm_activity(line.cards, read_dcgm(self._dcgm_url))
        except DcgmUnavailable as error:
            cards = tuple(msgspec.structs.replace(card, why_no_activity=str(error)) for card in line.cards)
            return msgspec.structs.replace(line, cards=cards, why="" if cards else str(error))
        return msgspec.structs.replace(line, cards=cards, why="")

    def _of_nvml(self) -> TelemetryMessage:
        if self._cards is not None:
            return self._cards.read()
        now = time.monotonic()
        seconds, self._read_at_s = now - self._read_at_s, now
        return TelemetryMessage(now, seconds, why=self.why)


def _open_cards(*, with_gpm: bool) -> tuple[Cards | None, str]:
    try:
        import pynvml as nvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        cards = Cards(with_gpm=with_gpm)
    except nvml.NVMLError as error:
        return None, f"NVML: {error}"
    return (cards, "") if len(cards) else (None, "the driver sees no GPU")


def write_lines(interval_s: float, dcgm_url: str) -> None:
    """Writes until standard input closes, nothing can be read, or a card is lost."""
    asker = TelemetrySource(dcgm_url)
    if asker.why and not dcgm_url:
        _write(asker.read())
        return
    while not select.select([sys.stdin], [], [], interval_s)[0]:
        line = asker.read()
        _write(line)
        if any(card.lost for card in line.cards):
            return


def _write(line: TelemetryMessage) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m penstock.gpu.telemetry", description=__doc__)
    parser.add_argument("--interval", type=float, default=INTERVAL_S)
    parser.add_argument("--dcgm", default="")
    arguments = parser.parse_args()
    write_lines(arguments.interval, arguments.dcgm)


if __name__ == "__main__":
    _main()
