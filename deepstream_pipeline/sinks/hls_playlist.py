"""What an HLS playlist says, as text: a window of segments that slides (RFC 8216). No I/O."""

import math
from collections import deque
from dataclasses import dataclass

KEPT_BEHIND = 3  # segments that the playlist names no more, and a viewer may still be reading


@dataclass(frozen=True, slots=True)
class Segment:
    """number: rises by one. has_gap: times or sizes do not go on from the segment before. time: of its first picture,
    ISO 8601."""

    number: int
    duration_s: float
    time: str
    has_gap: bool = False

    @property
    def name(self) -> str:
        """Of its file."""
        return f"segment-{self.number}.ts"


class Playlist:
    """The newest segments."""

    def __init__(self, *, segment_s: float, list_size: int) -> None:
        self._target_s = math.ceil(segment_s)
        self._list_size = max(1, list_size)
        self._segments: deque[Segment] = deque()
        self._behind: deque[Segment] = deque()
        self._gaps_behind = 0

    def add(self, segment: Segment) -> list[str]:
        """Names of files that nobody needs any more."""
        self._segments.append(segment)
        self._target_s = max(self._target_s, round(segment.duration_s))
        while len(self._segments) > self._list_size:
            gone = self._segments.popleft()
            self._gaps_behind += gone.has_gap
            self._behind.append(gone)
        return [self._behind.popleft().name for _ in range(len(self._behind) - KEPT_BEHIND)]

    def text(self, *, is_over: bool = False) -> str:
        """The playlist's file."""
        first = self._segments[0].number if self._segments else 0
        lines = [
            "#EXTM3U",
            "#EXT-X-VERSION:6",
            f"#EXT-X-TARGETDURATION:{self._target_s}",
            f"#EXT-X-MEDIA-SEQUENCE:{first}",
            f"#EXT-X-DISCONTINUITY-SEQUENCE:{self._gaps_behind}",
            "#EXT-X-INDEPENDENT-SEGMENTS",
        ]
        for segment in self._segments:
            if segment.has_gap:
                lines.append("#EXT-X-DISCONTINUITY")
            lines += [
                f"#EXT-X-PROGRAM-DATE-TIME:{segment.time}",
                f"#EXTINF:{segment.duration_s:.3f},",
                segment.name,
            ]
        if is_over:
            lines.append("#EXT-X-ENDLIST")
        return "\n".join(lines) + "\n"
