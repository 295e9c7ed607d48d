"""What an HLS playlist says, as text: a window of segments that slides (RFC 8216). No I/O."""

import math
from collections import deque
from dataclasses import dataclass


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
    """The newest segments.

    The target duration is fixed when the first segment is added. A segment that was removed from the list stays on disk
    for its own duration plus that of the longest list that contained it (RFC 8216, 6.2.2).
    """

    def __init__(self, *, segment_s: float, list_size: int) -> None:
        self._segment_s = segment_s
        self._list_size = max(1, list_size)
        self._segments: deque[Segment] = deque()
        self._behind: deque[tuple[Segment, float]] = deque()  # with the time from which it may be deleted
        self._gaps_behind = 0
        self._published_s = self._longest_list_s = 0.0
        self.target_s = math.ceil(segment_s)

    def fit(self, step_s: float) -> None:
        """Allows for frames step_s apart, which make longer segments. No effect after the first segment."""
        if not self._published_s:
            self.target_s = max(self.target_s, round(self._segment_s + step_s))

    def has_room(self, duration_s: float) -> bool:
        """Whether a segment may have this duration."""
        return round(duration_s) <= self.target_s

    def add(self, segment: Segment) -> list[str]:
        """Names of files that may be deleted."""
        self._segments.append(segment)
        self._published_s += segment.duration_s
        gone = [self._segments.popleft() for _ in range(len(self._segments) - self._list_size)]
        self._longest_list_s = max(self._longest_list_s, sum(one.duration_s for one in self._segments))
        for one in gone:
            self._gaps_behind += one.has_gap
            self._behind.append((one, self._published_s + one.duration_s + self._longest_list_s))
        deletable = []
        while self._behind and self._behind[0][1] <= self._published_s:
            deletable.append(self._behind.popleft()[0].name)
        return deletable

    def text(self, *, is_over: bool = False) -> str:
        """The playlist's file."""
        first = self._segments[0].number if self._segments else 0
        lines = [
            "#EXTM3U",
            "#EXT-X-VERSION:6",
            f"#EXT-X-TARGETDURATION:{self.target_s}",
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
