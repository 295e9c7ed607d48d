"""Whether a card here encodes H.264 (NVENC), asked from a process of its own: a sick driver may never answer.

`python -m deepstream_pipeline.sinks.nvenc` encodes a few small pictures and prints one JSON object; `ask_nvenc` runs
that with a deadline. It wants what the sinks rely on: each picture's packet at once, and key frames where they are
asked for. Data centre cards made for training (A100, H100, H200, B200) decode video and have no encoder. Its way to a
card that has one was never gone: see encoder.py.
"""

import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import av
import av.logging
import msgspec
import numpy as np

from deepstream_pipeline.sinks.encoder import H264, KEY_EVERY_S, Encoder, EncoderRefused, Quality, lone_encoder

ASK_S = 20.0  # the first call after boot initialises every card; seconds without the persistence daemon
SIZE = (320, 240)  # not smaller than any NVENC takes
_PROGRAM = (sys.executable, "-P", "-m", "deepstream_pipeline.sinks.nvenc")
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of the driver; of Windows' WSL
_CARD = re.compile(r"GPU #\d+ - < (.+?) >")
_KEYS = (True, False, True, False)  # which of the pictures that are tried is asked to be a key frame
_REAP_S = 1.0


class NvencAnswer(msgspec.Struct, frozen=True):
    """card: its name, as far as the driver said one; of several, with commas. why_not: "" where NVENC encodes."""

    card: str = ""
    why_not: str = ""


@functools.cache
def nvenc_here() -> NvencAnswer:
    """This machine's answer, asked once: cards do not come and go."""
    return ask_nvenc()


def ask_nvenc(
    timeout_s: float = ASK_S, *, command: tuple[str, ...] = _PROGRAM, devices: Iterable[Path] = _DEVICES
) -> NvencAnswer:
    """Blocks for timeout_s and a second at most; whatever goes wrong is in the answer. Without a driver's device in
    /dev there is nothing to ask."""
    if not any(device.exists() for device in devices):
        return NvencAnswer(why_not="no NVIDIA card is here")
    try:
        asked = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # FFmpeg's log of what failed
            start_new_session=True,
        )
    except OSError as error:
        return NvencAnswer(why_not=f"its trial does not start: {error.strerror}")
    try:
        said, _ = asked.communicate(timeout=timeout_s)
        return msgspec.json.decode(said, type=NvencAnswer)
    except subprocess.TimeoutExpired:
        asked.kill()
        with suppress(subprocess.TimeoutExpired):  # a process inside a sick driver may not even die
            asked.communicate(timeout=_REAP_S)
        return NvencAnswer(why_not=f"the driver took longer than {timeout_s:g} s")
    except msgspec.DecodeError:
        return NvencAnswer(why_not=f"its trial ended with {asked.returncode}")


def try_nvenc() -> NvencAnswer:
    """Encodes in this process; may block for ever, and raises FFmpeg's level of logging."""
    av.logging.set_level(av.logging.VERBOSE)
    why_not = ""
    with av.logging.Capture(local=False) as lines:
        try:
            why_not = _faults_of(lone_encoder(SIZE, Quality(is_live=True), H264.NVENC))
        except EncoderRefused as refused:
            why_not = str(refused)
    names = list(dict.fromkeys(name for _, _, text in lines for name in _CARD.findall(text)))
    if not why_not:
        return NvencAnswer(card=names[-1] if names else "")  # it takes the first that has an NVENC
    return NvencAnswer(card=", ".join(names), why_not=_reason(lines) or why_not)


def _faults_of(encoder: Encoder) -> str:
    """What the sinks could not live with; "" where it does all of it."""
    for number, is_key in enumerate(_KEYS):
        picture = np.full((SIZE[1], SIZE[0], 3), 40 * number, np.uint8)
        packets = encoder.encode(picture, number * KEY_EVERY_S / 2)
        if len(packets) != 1:
            return f"it gave {len(packets)} packets for picture {number}, not one"
        if packets[0].is_keyframe is not is_key:
            return f"picture {number} {'was to be a' if is_key else 'became a'} key frame"
    return ""


def _reason(lines: Iterable[tuple[int, str, str]]) -> str:
    """The errors that FFmpeg logged, the last of which says only that there is no other card."""
    errors = [text.strip() for level, _, text in lines if level <= av.logging.ERROR]
    return "; ".join(dict.fromkeys(errors))


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(try_nvenc()).decode())
