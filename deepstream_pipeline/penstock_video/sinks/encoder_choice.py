"""Chooses the encoder of a sink's streams: NVENC if allowed and present, otherwise libx264, and after a failure."""

from collections.abc import Callable
from typing import TypeVar

import structlog

from penstock_video.errors import SinkFailed
from penstock_video.sinks.encoder import H264, EncoderKind, EncoderRefused, NvencAnswer, nvenc_here

RETRY_S = 10.0
T = TypeVar("T")

log = structlog.get_logger(component="video")


class Encoders:
    """The encoders of one sink. Raises SinkFailed if NVENC is required and unavailable. lost: dropped pictures."""

    def __init__(self, kind: EncoderKind, sink: str, *, clock: Callable[[], float]) -> None:
        """sink: its name in the log. Probes NVENC, once per program, unless the CPU is configured."""
        self.lost = 0
        self._sink = sink
        self._is_must = kind is EncoderKind.NVENC
        self._clock = clock
        self._has_warned = False
        self._failure, self._again_at = "", 0.0
        answer = NvencAnswer() if kind is EncoderKind.CPU else nvenc_here()
        self._has_nvenc = kind is not EncoderKind.CPU and not answer.why_not
        if self._is_must and not self._has_nvenc:
            raise SinkFailed(_refusal(sink, answer))
        why = {"why_not_nvenc": answer.why_not} if answer.why_not else {"card": answer.card} if answer.card else {}
        log.info("video encoder", sink=sink, encoder=self.codec.value, **why)

    @property
    def codec(self) -> H264:
        """The codec for the next stream."""
        return H264.NVENC if self._has_nvenc else H264.X264

    def open(self, make: Callable[[H264], T]) -> T:
        """`make` with NVENC, else with x264. Raises SinkFailed if a required NVENC fails, until RETRY_S later."""
        if not self._has_nvenc:
            return make(H264.X264)
        if self._failure and self._clock() < self._again_at:
            self._lose()
        try:
            made = make(H264.NVENC)
        except EncoderRefused as refused:
            self._refuse(f"NVENC opens for no further stream ({refused})")
            return make(H264.X264)
        self._failure = ""
        return made

    def broke(self, refused: EncoderRefused) -> None:
        """Ends the use of NVENC after it failed in a stream. Raises SinkFailed if NVENC is required."""
        self._refuse(f"NVENC broke off ({refused})")
        self._has_nvenc = False

    def _refuse(self, failure: str) -> None:
        """Logs the failure once if the CPU takes over; raises it if NVENC is required."""
        if self._is_must:
            self._failure, self._again_at = failure, self._clock() + RETRY_S
            self._lose()
        tell = log.debug if self._has_warned else log.warning
        tell("video is encoded on the cpu", sink=self._sink, why=failure)
        self._has_warned = True

    def _lose(self) -> None:
        self.lost += 1
        raise SinkFailed(f"{self._failure}; tried again every {RETRY_S:g} s; encoder: auto would go on with the CPU")


def _refusal(sink: str, answer: NvencAnswer) -> str:
    where = f" on {answer.card}" if answer.card else ""
    return (
        f"the {sink} sink's encoder is nvenc, and NVENC does not open{where}: {answer.why_not}; "
        "A100, H100, H200 and B200 have none; say encoder: auto, or cpu"
    )
