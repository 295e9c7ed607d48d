"""A URI opened by FFmpeg: with what it may read, how long it may take, and no more.

What may be opened is given to FFmpeg as two allow-lists, of protocols and of formats, which hold for whatever the
source leads to, too (a playlist's segments, a redirection): a file's may name nothing but files and holds no format
that names other files, so that a text file posing as a video opens nothing. HLS is read over HTTP only, and leads to
HTTP only; relay.py restricts it to the allowed hosts. V4L2 devices are opened as FFmpeg's documentation says; this is
untested, because no device was available.

Low latency: live sources are decoded by one thread, without frames held back for others. FFmpeg's `nobuffer` is not
set: it throws the packets away that were read to know the stream, the first keyframe among them, and a camera with a
keyframe every ten seconds would begin so much later. Nor is `low_delay`: B-frames would come in the wrong order.
"""

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from deepstream_pipeline.decode.failures import failure_of
from deepstream_pipeline.decode.uri import UriKind, kind_of, path_of, redacted
from deepstream_pipeline.errors import DecodeError, SourceNotAllowed, SourceUnavailable
from deepstream_pipeline.reach import why_host_refused
from server.core.outbound import Outbound

if TYPE_CHECKING:
    from deepstream_pipeline.decode.relay import Relay

_FORMATS = (
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,mjpeg,mpjpeg,flv,live_flv,h264,hevc,av1,obu,ivf,asf,ogg,mxf,"
    "dhav,nut"
)
_HLS_FORMATS = ",hls,aac,mp3,ac3,eac3,webvtt"  # a playlist's own, and of the sound that lies beside its pictures
_PROTOCOLS = {
    UriKind.FILE: "file",
    UriKind.RTSP: "rtsp,rtsps,rtp,srtp,udp,tcp,tls",
    UriKind.HTTP: "http,https,httpproxy,tcp,tls,crypto",
    UriKind.DEVICE: "file",
}
_FORMATS_OF = {
    UriKind.FILE: _FORMATS,
    UriKind.RTSP: "rtsp,sdp,rtp,mpegts",
    UriKind.HTTP: _FORMATS + _HLS_FORMATS,
    UriKind.DEVICE: "video4linux2,v4l2",
}
_PROBED_S = 1.0  # of a live stream, at most, to know its rate: what comes meanwhile is late before it is decoded
MOST_FILE_THREADS = 4


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """open_timeout_s, read_timeout_s: without a byte for so long the source is unavailable. is_udp: RTSP over UDP.

    threads: of the decoder, 0 for one for live sources, a few for files. max_pixels: larger pictures are refused, 0
    for any. outbound: which network addresses it may connect to.
    """

    open_timeout_s: float = 10.0
    read_timeout_s: float = 10.0
    is_udp: bool = False
    threads: int = 0
    max_pixels: int = 0
    outbound: Outbound = field(default_factory=Outbound)


def relay_for(uri: str, options: DecodeOptions) -> "Relay | None":
    """The relay for the source's connections; None if FFmpeg connects by itself.

    FFmpeg does so for sources that the operator named; their host is checked here first. Raises SourceNotAllowed,
    SourceUnavailable.
    """
    kind, outbound = kind_of(uri), options.outbound
    if kind in {UriKind.FILE, UriKind.DEVICE}:
        return None
    if not outbound.is_from_api:
        if why := why_host_refused(urlsplit(uri).hostname or "", outbound):
            raise SourceNotAllowed(f"{redacted(uri)}: {why}")
        return None
    if kind is UriKind.RTSP and options.is_udp:
        raise SourceNotAllowed(
            f"{redacted(uri)}: RTSP over UDP is only allowed for sources of the command line or settings file; use TCP"
        )
    from deepstream_pipeline.decode.relay import Relay  # it imports asyncio, so only if it is needed

    return Relay(uri, outbound, options.open_timeout_s)


def open_container(uri: str, options: DecodeOptions, relay: "Relay | None" = None) -> InputContainer:
    """The opened source. relay: from relay_for; the source is read through it.

    Raises SourceNotAllowed, SourceRefused, SourceUnavailable, DecodeError.
    """
    kind = kind_of(uri)
    name, format_name = relay.uri if relay is not None else uri, None
    if kind is UriKind.FILE:
        name = f"file:{_readable_file(uri)}"
    elif kind is UriKind.DEVICE:
        name, format_name = path_of(uri), "v4l2"
    elif kind is UriKind.RTSP:
        format_name = "rtsp"
    try:
        return av.open(
            name,
            format=format_name,
            container_options=_container_options(kind, options) | (relay.options if relay is not None else {}),
            timeout=(options.open_timeout_s, options.read_timeout_s),
            metadata_errors="replace",
        )
    except FFmpegError as error:
        if relay is not None and relay.fault is not None:
            raise relay.fault from None
        raise failure_of(error, uri, kind, is_opening=True) from None
    except (OSError, ValueError, UnicodeError) as error:  # PyAV's own, and of builtins that FFmpeg's are not
        raise DecodeError(f"{redacted(uri)} cannot be opened ({type(error).__name__})") from None


def pictures_of(container: InputContainer, uri: str) -> VideoStream:
    """The stream of pictures that plays. Raises DecodeError where there is none."""
    best = container.streams.best("video")
    if not isinstance(best, VideoStream) or best.codec_context is None:  # no context: of no codec that FFmpeg knows
        raise DecodeError(f"{redacted(uri)} has no stream of pictures that can be decoded")
    return best


def set_threads(context: VideoCodecContext, threads: int, *, is_live: bool) -> None:
    """How many threads decode: several only where their latency (a frame each) costs nothing. Half of the cores, since
    the engine wants the others and each thread more costs a few percent of CPU a frame."""
    own_choice = 1 if is_live else min(max(len(os.sched_getaffinity(0)) // 2, 1), MOST_FILE_THREADS)
    context.thread_count = threads or own_choice
    context.thread_type = "SLICE" if is_live else "AUTO"


def _readable_file(uri: str) -> str:
    """The absolute path. A pipe, a device or a folder is not read: opening one may block for ever."""
    path = os.path.abspath(path_of(uri))
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise SourceUnavailable(f"{redacted(uri)} is not there") from None
    except (OSError, ValueError) as error:
        raise SourceNotAllowed(f"{redacted(uri)} cannot be looked at ({type(error).__name__})") from None
    if not stat.S_ISREG(mode):
        raise SourceNotAllowed(f"{redacted(uri)} is no regular file")
    if not os.access(path, os.R_OK):
        raise SourceNotAllowed(f"{redacted(uri)} may not be read by this user")
    return path


def _container_options(kind: UriKind, options: DecodeOptions) -> dict[str, str]:
    allowed = {"protocol_whitelist": _PROTOCOLS[kind], "format_whitelist": _FORMATS_OF[kind]}
    timeout_us = str(max(int(options.read_timeout_s * 1e6), 1))
    if kind is UriKind.RTSP:
        return allowed | {
            "rtsp_transport": "udp" if options.is_udp else "tcp",
            "allowed_media_types": "video",
            "timeout": timeout_us,
            "analyzeduration": str(int(_PROBED_S * 1e6)),
        }
    if kind is UriKind.HTTP:
        return allowed | {"rw_timeout": timeout_us, "analyzeduration": str(int(_PROBED_S * 1e6))}
    return allowed if kind is UriKind.FILE else {}
