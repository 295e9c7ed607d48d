"""Opens an address once, for its facts and one picture, in a decode process of its own."""

import select
import time
from contextlib import closing

import numpy as np

from penstock_video.decode.uri import Secrets, redacted, seems_live
from penstock_video.errors import DecodeError, PipelineError, SourceNotAllowed, SourceRefused, SourceUnavailable
from penstock_video.interfaces import ProbedSource
from penstock_video.sinks.jpeg import SoftwareJpeg
from penstock_video.sinks.osd import scaled_copy
from penstock_video.sources.options import SourcesOptions
from penstock_video.sources.process import BrokenPromise, DecodeProcess, ProcessLink
from penstock_video.sources.protocol import UP, Ended, EndReason, FrameReady, Opened, Start
from penstock_video.sources.ring import image_offset, ring_size
from penstock_video.types import ByteArray, DropPolicy, SourceConfig

START_S = 5.0  # for the process to start and to decode a picture, beyond the time to open
MAX_WIDTH = 960  # pixels of the picture
_RING_FRAMES = 2
_KILL_S = 2.0
_ERRORS: dict[EndReason, type[PipelineError]] = {
    EndReason.AUTH_FAILED: SourceRefused,
    EndReason.UNAVAILABLE: SourceUnavailable,
    EndReason.NOT_ALLOWED: SourceNotAllowed,
}


def probe(config: SourceConfig, options: SourcesOptions) -> ProbedSource:
    """Blocks for at most open_timeout_s and START_S. Raises SourceUnavailable, SourceRefused, SourceNotAllowed,
    DecodeError, with the sentence that a source has in this state."""
    secrets = Secrets(config.uri)
    try:
        process = DecodeProcess(options.command, _start(config, options), "probe")
    except OSError as error:
        raise SourceUnavailable(f"the process that opens it could not be started ({error.strerror})") from error
    with closing(process):
        try:
            return _Waiting(process, config, secrets).result(config.open_timeout_s + START_S)
        except (BrokenPromise, ValueError) as error:
            raise DecodeError(secrets.hidden_in(str(error))) from None
        finally:
            process.kill()
            process.is_reaped(_KILL_S)


class _Waiting:
    """Reads the process's messages until the first whole picture."""

    def __init__(self, process: ProcessLink, config: SourceConfig, secrets: Secrets) -> None:
        self._process, self._config, self._secrets = process, config, secrets
        self._opened: Opened | None = None

    def result(self, timeout_s: float) -> ProbedSource:
        until = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._process.socket, select.POLLIN)
        while (left_s := until - time.monotonic()) > 0:
            poller.poll(left_s * 1000)
            for message in self._process.receive():
                if (found := self._hear(message)) is not None:
                    return found
        what = "sent no picture" if self._opened is not None else "did not answer"
        raise SourceUnavailable(f"{redacted(self._config.uri)} {what} within {timeout_s:g} s")

    def _hear(self, message: UP | None) -> ProbedSource | None:
        match message:
            case None:
                raise DecodeError("the process that opened it ended without a picture")
            case Opened():
                self._opened = message
            case FrameReady() if message.is_corrupt or not message.has_image:
                self._process.release([message.slot])
            case FrameReady() if self._opened is not None:
                return self._probed(self._opened, message)
            case Ended():
                raise _ERRORS.get(message.reason, DecodeError)(self._secrets.hidden_in(message.text))
        return None

    def _probed(self, opened: Opened, frame: FrameReady) -> ProbedSource:
        shape = (frame.height, frame.width, 3)
        image: ByteArray = self._process.ring.array(frame.slot, image_offset(0), shape, np.uint8).view(np.uint8)
        return ProbedSource(
            width=frame.width,
            height=frame.height,
            fps=opened.fps,
            codec=self._secrets.hidden_in(opened.codec),
            is_live=opened.is_live,
            duration_s=opened.duration_s,
            jpeg=SoftwareJpeg().encode(scaled_copy(image, min(MAX_WIDTH, frame.width))),
            is_recordable=opened.is_recordable,
        )


def _start(config: SourceConfig, options: SourcesOptions) -> Start:
    size = ring_size(_RING_FRAMES, 0, options.max_pixels * 3)
    return Start(
        uri=config.uri,
        spec=b"",
        ring_frames=size.frames,
        slot_bytes=size.slot_bytes,
        ring_bytes=size.size_bytes,
        policy=(DropPolicy.DROP_OLDEST if seems_live(config.uri) else DropPolicy.BLOCK).value,
        wants_images=True,
        is_udp=config.is_udp,
        open_timeout_s=config.open_timeout_s,
        read_timeout_s=config.open_timeout_s,
        max_pixels=options.max_pixels,
        allowed_outbound=options.allowed_outbound,
        is_from_api=config.is_from_api,
    )
