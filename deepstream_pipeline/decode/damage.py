"""What may be shown of a stream whose packets were damaged. Sans-IO."""

from enum import Enum, auto

MOST_DROPPED = 300  # frames: a stream that refreshes bit by bit never sends a keyframe


class Verdict(Enum):
    """CLEAN: as the camera saw it. CORRUPT: to be shown, but marked. DROPPED: not to be shown."""

    CLEAN = auto()
    CORRUPT = auto()
    DROPPED = auto()


class Damage:
    """A packet that could not be decoded takes the frames until the next keyframe with it: they build on nothing.

    A frame that its decoder mended is shown and marked, and so are those that build on it, until the next keyframe.
    """

    def __init__(self) -> None:
        self.bad_packets = 0
        self._is_tainted = False
        self._dropped: int | None = None  # since a packet was lost; None where none was

    def packet_failed(self) -> None:
        """A packet was damaged on its way, or could not be decoded."""
        self.bad_packets += 1
        if self._dropped is None:
            self._dropped = 0

    def begin(self) -> None:
        """The stream begins anew, with a keyframe."""
        self._is_tainted, self._dropped = False, None

    def judge(self, *, is_key: bool, is_corrupt: bool) -> Verdict:
        """Of the next frame. is_key: it builds on no other. is_corrupt: its decoder had to mend it."""
        if is_key:
            self._is_tainted, self._dropped = is_corrupt, None
        elif is_corrupt:
            self._is_tainted = True
        if self._dropped is not None and self._dropped < MOST_DROPPED:
            self._dropped += 1
            return Verdict.DROPPED
        if self._dropped is not None:
            self._is_tainted, self._dropped = True, None
        return Verdict.CORRUPT if self._is_tainted else Verdict.CLEAN
