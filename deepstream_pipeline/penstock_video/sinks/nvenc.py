"""Whether NVENC encodes on this machine, and the choice between it and x264.

`python -m penstock_video.sinks.nvenc` tries it, in a process of its own because a call into a broken driver may hang.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import av
import av.logging
import msgspec
import numpy as np
import structlog

from penstock.gpu.nvml import ChildProcessFailed, run_json_child
from penstock_video.errors import SinkFailed
from penstock_video.sinks.encoder import H264, KEY_EVERY_S, Encoder, EncoderRefused, Quality, lone_encoder
from penstock_video.types import EncoderKind

TRIAL_S = 20.0  # the first call after boot initialises every GPU: seconds without the persistence daemon
TRIAL_SIZE = (320, 240)  # not smaller than NVENC's minimum
_PROGRAM = (sys.executable, "-P", "-m", "penstock_video.sinks.nvenc")
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of the driver; of Windows' WSL
_CARD = re.compile(r"GPU #\d+ - < (.+?) >")
_KEYS = (True, False, True, False)  # which of the tried pictures are requested as keyframes
T = TypeVar("T")

log = structlog.get_logger(component="video")


class NvencTrial(msgspec.Struct, frozen=True):
    """card: its name from the driver; several with commas. why_not: empty if NVENC encodes."""

    card: str = ""
    why_not: str = ""


@functools.cache
def nvenc_here() -> NvencTrial:
    """The trial of this machine, made once."""
    return ask_nvenc()


def ask_nvenc(
    timeout_s: float = TRIAL_S, *, program: tuple[str, ...] = _PROGRAM, devices: Iterable[Path] = _DEVICES
) -> NvencTrial:
    """Tries NVENC, for timeout_s and a second at most; failures are in the result. Needs a driver's device in /dev."""
    if not any(device.exists() for device in devices):
        return NvencTrial(why_not="no NVIDIA GPU is here")
    try:
        return run_json_child(program, NvencTrial, timeout_s)
    except ChildProcessFailed as error:
        why = f"the driver took longer than {error}" if error.is_late else f"its trial failed: {error}"
        return NvencTrial(why_not=why)


def try_nvenc() -> NvencTrial:
    """Encodes in this process; may block forever, and raises FFmpeg's log level."""
    av.logging.set_level(av.logging.VERBOSE)
    why_not = ""
    with av.logging.Capture(local=False) as lines:
        try:
            why_not = fault_of(lone_encoder(TRIAL_SIZE, Quality(25, is_live=True), H264.NVENC))
        except EncoderRefused as refused:
            why_not = str(refused)
    names = list(dict.fromkeys(name for _, _, text in lines for name in _CARD.findall(text)))
    if not why_not:
        return NvencTrial(card=names[-1] if names else "")  # it uses the first one with NVENC
    errors = [text.strip() for level, _, text in lines if level <= av.logging.ERROR]
    return NvencTrial(card=", ".join(names), why_not="; ".join(dict.fromkeys(errors)) or why_not)


def fault_of(encoder: Encoder) -> str:
    """What the sinks could not handle: a packet that is late, or a keyframe that is not where it was requested."""
    for number, is_key in enumerate(_KEYS):
        picture = np.full((TRIAL_SIZE[1], TRIAL_SIZE[0], 3), 40 * number, np.uint8)
        packets = encoder.encode(picture, number * KEY_EVERY_S / 2)
        if len(packets) != 1:
            return f"NVENC returned {len(packets)} packets for picture {number} instead of one"
        if packets[0].is_keyframe is not is_key:
            return f"picture {number} {'should be a' if is_key else 'should not be a'} keyframe"
    return ""


class EncoderChoice:
    """Chooses the encoder of one sink's streams. After NVENC failed in a stream, x264 encodes all of them."""

    def __init__(self, kind: EncoderKind, sink: str) -> None:
        """sink: its name in the log. Raises SinkFailed if NVENC is asked for and does not encode here."""
        self._sink = sink
        trial = NvencTrial(why_not="the CPU is configured") if kind is EncoderKind.CPU else nvenc_here()
        if kind is EncoderKind.NVENC and trial.why_not:
            where = f" on {trial.card}" if trial.card else ""
            raise SinkFailed(
                f"the {sink} sink's encoder is nvenc, and NVENC does not open{where}: {trial.why_not}; A100, H100, "
                "H200 and B200 have no video encoder; use encoder auto or cpu"
            )
        self._codec = H264.X264 if trial.why_not else H264.NVENC
        log.debug("video encoder", sink=sink, encoder=self._codec.value, card=trial.card, why_not_nvenc=trial.why_not)

    def open(self, make: Callable[[H264], T]) -> T:
        """`make` with NVENC, else with x264: a card may have too many sessions for a further stream."""
        if self._codec is H264.NVENC:
            try:
                return make(H264.NVENC)
            except EncoderRefused as refused:
                log.warning("video is encoded by the CPU", sink=self._sink, reason=f"NVENC does not open: {refused}")
        return make(H264.X264)

    def failed(self, refused: EncoderRefused) -> None:
        """NVENC failed in a stream: `open` uses x264 from now on."""
        self._codec = H264.X264
        log.warning("video is encoded by the CPU", sink=self._sink, reason=f"NVENC failed: {refused}")


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(try_nvenc()))
