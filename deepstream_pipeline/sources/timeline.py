"""Where the counting of a source's frames stands, across its processes. Sans-IO.

Nothing that a process says is believed before it was looked at: who counts backwards breaks a promise that trackers,
and files that are written, rely on.
"""

import math

from deepstream_pipeline.sources.messages import FrameReady

_STEP_S = 0.001  # between the last frame of one process and the first of the next, at least


class Timeline:
    """frame_num: of the next frame. pts_s: of the last one."""

    def __init__(self) -> None:
        self.frame_num, self.segment = 0, 0
        self.pts_s: float | None = None
        self._captured_at = 0.0
        self._shift_s = 0.0
        self._is_first = True

    def begin(self, now: float, *, is_live: bool) -> tuple[int, float, int]:
        """A process begins: its first frame number, pts and segment. A live source's time went on meanwhile."""
        self._is_first, self._shift_s = True, 0.0
        if self.pts_s is None:
            return 0, 0.0, 0
        self.segment += 1
        return (
            self.frame_num,
            self.pts_s + (max(now - self._captured_at, _STEP_S) if is_live else _STEP_S),
            self.segment,
        )

    def place(self, ready: FrameReady, *, is_live: bool) -> float:
        """The frame's pts in the source's life. Raises ValueError where number, time or segment do not rise."""
        if not math.isfinite(ready.pts_s) or not math.isfinite(ready.captured_at):
            raise ValueError("a time that is no number")
        if ready.frame_num < self.frame_num or ready.segment < self.segment:
            raise ValueError(f"frame {ready.frame_num} of segment {ready.segment} after {self.frame_num - 1}")
        if self._is_first and self.pts_s is not None and is_live:  # opening took time, too
            self._shift_s = max(0.0, self.pts_s + ready.captured_at - self._captured_at - ready.pts_s)
        pts_s = ready.pts_s + self._shift_s
        if self.pts_s is not None and pts_s <= self.pts_s:
            raise ValueError(f"a pts of {pts_s:.6f} s after {self.pts_s:.6f} s")
        self._is_first = False
        self.pts_s, self._captured_at = pts_s, ready.captured_at
        self.frame_num, self.segment = ready.frame_num + 1, ready.segment
        return pts_s
