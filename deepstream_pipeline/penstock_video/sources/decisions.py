"""Frame rate and freeze detection, frame numbers across restarts, and the choice of decoder. No I/O, no clock."""

import math
from collections import deque

from penstock_video.sources.protocol import FrameReady
from penstock_video.types import DecoderKind

WINDOW_S = 3.0
_BUCKET_S = 0.5
MARGIN_FPS = 10.0  # tolerated above the expected rate
RUNAWAY_S = 3  # consecutive whole seconds
CATCH_UP_S = 10.0  # frames late by up to this may arrive faster: the machine was busy


class Pace:
    """Frame rate of one process."""

    def __init__(self) -> None:
        self._begun_at: float | None = None
        self._buckets: deque[tuple[float, int]] = deque()
        self._second, self._in_second, self._seconds_too_many = 0, 0, 0
        self._owed = 0.0  # expected frames that did not arrive yet

    def count(self, now: float, frames: int, limit_fps: float | None) -> bool:
        """Counts frames. Returns whether each of the last RUNAWAY_S seconds had too many, without late frames."""
        if self._begun_at is None:
            self._begun_at = now
        if self._buckets and now - self._buckets[-1][0] < _BUCKET_S:
            begin, counted = self._buckets[-1]
            self._buckets[-1] = (begin, counted + frames)
        else:
            self._buckets.append((now, frames))
            self._forget(now)
        return self._runs_away(now - self._begun_at, frames, limit_fps)

    def fps(self, now: float) -> float:
        """Frames per second over the last WINDOW_S, or since the first frame."""
        self._forget(now)
        if not self._buckets:
            return 0.0
        return sum(count for _, count in self._buckets) / max(now - self._buckets[0][0], 1.0)

    def _runs_away(self, age_s: float, frames: int, limit_fps: float | None) -> bool:
        second = int(age_s)
        if second != self._second:
            is_too_many = limit_fps is not None and self._settle(second - self._second, limit_fps)
            is_next = second == self._second + 1
            self._seconds_too_many = self._seconds_too_many + 1 if is_too_many and is_next else 0
            self._second, self._in_second = second, 0
        self._in_second += frames
        return self._seconds_too_many >= RUNAWAY_S

    def _settle(self, seconds: int, limit_fps: float) -> bool:
        """Updates the number of late frames after a second; returns whether it had too many."""
        owed = self._owed + seconds * limit_fps - self._in_second
        self._owed = min(max(owed, 0.0), CATCH_UP_S * limit_fps)
        return owed < 0.0 and self._in_second > limit_fps + MARGIN_FPS

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0][0] >= WINDOW_S:
            self._buckets.popleft()


class Stillness:
    """Detects a source that shows the same picture for too long. at: a live source's clock, or a file's pts."""

    def __init__(self, frozen_after_s: float) -> None:
        self._frozen_after_s = frozen_after_s
        self._digest: int | None = None
        self._since = 0.0
        self.is_frozen = False

    def see(self, at: float, digest: int) -> None:
        if digest != self._digest:
            self._digest, self._since, self.is_frozen = digest, at, False
        elif at - self._since >= self._frozen_after_s:
            self.is_frozen = True


_STEP_S = 0.001  # minimum between the last frame of one process and the first of the next


class FrameNumbers:
    """frame_num: of the next frame. pts_s: of the last one."""

    def __init__(self) -> None:
        self.frame_num, self.segment = 0, 0
        self.pts_s: float | None = None
        self._captured_at = 0.0
        self._shift_s = 0.0
        self._is_first = True

    def begin(self, now: float, *, is_live: bool) -> tuple[int, float, int]:
        """First frame number, pts and segment of a process. A live source's pts includes the time in between."""
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
        """The frame's pts across processes. Raises ValueError unless number, time and segment increase."""
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


CPU_FOR_S = 3600.0  # after this, a newly opened stream tries the GPU again
CARD_GONE_FOR_S = 60.0  # the same, if the GPU and not the stream was the reason
LOSSES, LOSSES_WITHIN_S = 2, 60.0
ALONE_FOR_S = 600.0
ALONE = "alone"


class DecoderChoice:
    """Chooses the decoder of one source. absence: why no GPU decodes. refusal: why the wish cannot be met, or ""."""

    def __init__(self, wish: DecoderKind, absence: str | None) -> None:
        is_refused = wish is DecoderKind.NVDEC and absence is not None
        self.refusal = f"decoder nvdec: {absence}; choose auto or cpu" if is_refused else ""
        self.may_use_cpu = wish is not DecoderKind.NVDEC
        self._is_cpu_only = wish is DecoderKind.CPU or absence is not None
        self._cpu_until = self._alone_until = -1.0
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._lost = ""  # the process that was lost last

    def kind(self, now: float) -> DecoderKind:
        """The decoder of a new process: cpu or nvdec."""
        is_cpus = self._is_cpu_only or (self.may_use_cpu and now < self._cpu_until)
        return DecoderKind.CPU if is_cpus else DecoderKind.NVDEC

    def company(self, now: float) -> str:
        """Sources with the same company may share a process. ALONE: the source gets its own process."""
        if now < self._alone_until:
            return ALONE
        return self._lost if self._losses and now - self._losses[-1] < LOSSES_WITHIN_S else ""

    def needs_cpu(self, now: float) -> None:
        """Records that NVDEC cannot decode the stream."""
        self._cpu_until = now + CPU_FOR_S

    def has_no_card(self, now: float) -> None:
        """Records that the GPU is unavailable or full."""
        self._cpu_until = max(self._cpu_until, now + CARD_GONE_FOR_S)

    def lost_process(self, now: float, name: str) -> None:
        """Records that a shared process died; this source may be the cause."""
        self._lost = name
        self._losses.append(now)
        if len(self._losses) == LOSSES and now - self._losses[0] <= LOSSES_WITHIN_S:
            self._alone_until = now + ALONE_FOR_S

    def broke_promise(self, now: float) -> None:
        """Records that this source ended the process."""
        self._alone_until = now + ALONE_FOR_S
