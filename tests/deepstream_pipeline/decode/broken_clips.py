"""Clips whose packets lie otherwise than their encoder left them: other times, some missing, some rubbish."""

from collections.abc import Callable, Collection
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from tests.deepstream_pipeline.clips import write_clip

FRAMES = 40
SIZE = (176, 144)  # NVDEC takes no HEVC of fewer lines


def plain_clip(path: Path, **how: Any) -> Path:
    """As write_clip does, of a size that every decoder takes."""
    return write_clip(path, **({"size": SIZE} | how))


def timed(path: Path, pts_of: Callable[[int], int]) -> Path:
    """A transport stream whose packets say these times, in 90,000ths, of which it keeps 33 bits."""
    plain = plain_clip(path.with_suffix(".h264"), frames=FRAMES)
    with av.open(str(plain)) as source, av.open(str(path), "w", format="mpegts") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
            packet.stream, packet.time_base = stream, Fraction(1, 90_000)
            packet.pts = packet.dts = pts_of(number)
            container.mux(packet)
    return path


def without(path: Path, source: Path, places: Collection[int], instead: bytes = b"") -> Path:
    """The clip without the packets at those places, or with such bytes in their stead."""
    with av.open(str(source)) as whole, av.open(str(path), "w", format={".ts": "mpegts"}.get(path.suffix)) as container:
        stream = container.add_stream_from_template(whole.streams.video[0])
        for place, packet in enumerate(packet for packet in whole.demux(video=0) if packet.size):
            if place not in places:
                packet.stream = stream
                container.mux(packet)
            elif instead:
                container.mux(_in_stead(packet, instead, stream))
    return path


def joined_with_rubbish(path: Path, source: Path, count: int) -> Path:
    """The clip, and so many packets of noughts behind it."""
    with av.open(str(source)) as whole, av.open(str(path), "w") as container:
        stream = container.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(video=0):
            if packet.size:
                last = packet
                step = packet.duration or 1
                packet.stream = stream
                container.mux(packet)
        for number in range(1, count + 1):
            rubbish = _in_stead(last, bytes(200), stream)
            rubbish.pts = rubbish.dts = (last.pts or 0) + number * step
            container.mux(rubbish)
    return path


def is_full(frame: av.VideoFrame) -> bool:
    """Whether its brightness goes from 0 to 255."""
    return frame.format.name == "yuvj420p" or frame.color_range == 2


def _in_stead(packet: "av.Packet[Any]", content: bytes, stream: "av.video.stream.VideoStream") -> "av.Packet[Any]":
    other = av.Packet(content)
    other.stream, other.time_base = stream, packet.time_base
    other.pts, other.dts, other.duration = packet.pts, packet.dts, packet.duration
    return other


def annex_b_packets(folder: Path, codec: str, **how: Any) -> list[bytes]:
    """Twenty packets of h264 or hevc with start codes, the parameter sets in the first; no B-frames."""
    path = plain_clip(folder / "packets.ts", frames=20, codec={"h264": "libx264", "hevc": "libx265"}[codec], **how)
    with av.open(str(path)) as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.size]


def damaged_packet(packet: bytes) -> bytes:
    """Its headers, and then other bytes: a picture that must be mended."""
    begin = len(packet) // 3
    return packet[:begin] + bytes(byte ^ 0x5A for byte in packet[begin:])
