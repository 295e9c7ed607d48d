"""The clips of the video bench: a rendered street of 1280 x 720 at 30 frames a second, and the same at other rates."""

import logging
from fractions import Fraction
from pathlib import Path

import av
from av.video.stream import VideoStream

from deploy.models.street.clip import make_clip

SIZE, FPS = (1280, 720), 30
BITS_PER_S = 3_000_000
_SEED, _TIME_BASE = 4, Fraction(1, 90_000)
_OPTIONS = {"preset": "medium", "maxrate": str(BITS_PER_S * 3 // 2), "bufsize": str(BITS_PER_S * 2)}
_GOP = 60


def make_street(path: Path, seconds: float) -> None:
    """H.264 (high profile, B-frames, a keyframe every two seconds) of about 3 Mbit/s; the same pictures each time.

    The street is of the noisy lens, whose grain a codec has to carry, as a camera's at dusk. Raises OSError.
    """
    new = path.with_suffix(".new.mp4")
    clip = make_clip(_SEED, seconds, FPS, size=SIZE, scenario="noise")
    logging.getLogger("libav").setLevel(logging.ERROR)
    with av.open(str(new), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options=_OPTIONS)
        stream.width, stream.height = SIZE
        stream.pix_fmt, stream.bit_rate, stream.gop_size = "yuv420p", BITS_PER_S, _GOP
        for picture, _ in clip.frames():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "bgr24")))
        container.mux(stream.encode(None))
    new.replace(path)


def at_rate(path: Path, source: Path, fps: float) -> None:
    """The same packets, played at another rate: what a camera of that rate would send, at the same bits a picture."""
    with av.open(str(source)) as container, av.open(str(path), "w") as copy:
        stream = container.streams.video[0]
        template = copy.add_stream_from_template(stream)
        assert isinstance(template, VideoStream)
        template.time_base = _TIME_BASE
        for packet in container.demux(stream):
            if packet.pts is None or packet.dts is None or packet.time_base is None:
                continue  # the empty one at the end
            scale = packet.time_base * Fraction(FPS) / Fraction(fps).limit_denominator(1000) / _TIME_BASE
            packet.pts, packet.dts = round(packet.pts * scale), round(packet.dts * scale)
            packet.duration = round((packet.duration or 0) * scale)
            packet.stream, packet.time_base = template, _TIME_BASE
            copy.mux(packet)


def frames_of(path: Path) -> int:
    """How many pictures a clip says it has."""
    with av.open(str(path)) as container:
        return container.streams.video[0].frames
