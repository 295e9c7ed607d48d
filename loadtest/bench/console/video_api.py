"""The video program's real API over many made streams and a real event store; its URL is its first line of output.

python -m loadtest.bench.console.video_api FOLDER STREAMS EVENTS
"""

import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np

from penstock_video.api.options import ApiOptions
from penstock_video.api.server import ApiServer
from penstock_video.errors import UnknownSource
from penstock_video.interfaces import FULL_VIEW, PipelineControl, SourceStatistics, View
from penstock_video.metrics import VideoMetrics
from penstock_video.store.database import StoreFolder
from penstock_video.store.reader import EventArchive, EventReader
from penstock_video.store.statements import write_events
from penstock_video.types import SourceState

DAY_S = 86_400.0
SNAPSHOTS = 2_000
COUNTER = "pictures"  # a source that is not listed: its frames are the pictures that were sent
RULES = {"line-crossing/door.in": 3, "line-crossing/door.out": 5, "objects/person": 4}


def made_jpeg(width: int, height: int) -> bytes:
    """A picture with noise, as large as one of a camera."""
    noise = np.random.default_rng(1).integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
    done, encoded = cv2.imencode(".jpg", cv2.resize(noise, (width, height)), [cv2.IMWRITE_JPEG_QUALITY, 75])
    assert done
    return encoded.tobytes()


@dataclass
class MadeStreams:
    """What the API reads of a pipeline, and the pictures. Other calls are not made by this bench."""

    count: int
    jpeg: bytes = field(default_factory=lambda: made_jpeg(320, 180), repr=False)
    pictures: int = 0

    def statistics(self) -> tuple[SourceStatistics, ...]:
        return tuple(map(self._source, range(self.count)))

    def source(self, source_id: str) -> SourceStatistics:
        """Raises UnknownSource."""
        if source_id == COUNTER:
            return replace(self._source(0), frames=self.pictures)
        number = source_id.removeprefix("cam-")
        if not number.isdecimal() or int(number) >= self.count:
            raise UnknownSource(f"there is no source {source_id!r}")
        return self._source(int(number))

    def rules(self, source_id: str) -> object:
        return {"line-crossing": [{"name": "door", "line": [[0.1, 0.5], [0.9, 0.5]]}]}

    def wait(self, source_id: str, after: int, timeout_s: float, view: View = FULL_VIEW) -> tuple[int, bytes]:
        """The picture, at once."""
        self.pictures += 1
        return self.pictures, self.jpeg

    def _source(self, number: int) -> SourceStatistics:
        return SourceStatistics(
            source_id=f"cam-{number:03}", camera_name=f"Camera {number}", uri=f"rtsp://192.0.2.1/{number}",
            state=SourceState.RUNNING, fps=25.0, frames=int(time.monotonic() * 25), inferred=int(time.monotonic() * 25),
            drops={"too_old": 0}, width=1280, height=720, codec="h264", is_live=True, latency_s=0.04, counts=RULES,
            decoder="nvdec",
        )  # fmt: skip


def fill(folder: Path, events: int, streams: int) -> None:
    """A store of that many events over the last day; the newest have pictures."""
    store = StoreFolder(folder)
    connection = store.open()
    now, jpeg = time.time(), made_jpeg(960, 540)

    def row(number: int) -> tuple[Any, ...]:
        at, source = now - DAY_S * (1 - number / events), f"cam-{number % streams:03}"
        snapshot = number if events - number <= SNAPSHOTS else None
        way = "in" if number % 2 else "out"
        box = (100.0, 100.0, 200.0, 300.0)
        return (
            number, at, source, "line-crossing", "door", way, "person", 0, number, 1.0, 0.8, *box, 1280, 720, number,
            at - now + DAY_S, snapshot,
        )  # fmt: skip

    pictures = ((number, now, jpeg) for number in range(max(events - SNAPSHOTS, 0) + 1, events + 1))
    connection.execute("BEGIN")
    write_events(connection, map(row, range(1, events + 1)), pictures)
    connection.execute("COMMIT")
    connection.close()
    store.close()


def main() -> None:
    """Serves until SIGTERM."""
    folder, streams, events = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    fill(folder, events, streams)
    made = MadeStreams(streams)
    archive = EventArchive(EventReader(folder), None, str)
    server = ApiServer(cast(PipelineControl, made), made, VideoMetrics(), ApiOptions(port=0), archive)
    server.start()
    print(server.url, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop(2.0)


if __name__ == "__main__":
    main()
