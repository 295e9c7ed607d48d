"""Opens a URI with FFmpeg: allowed formats and protocols, timeouts, and FFmpeg's errors as ours."""

import os
import stat
from dataclasses import dataclass, field
from errno import EIO
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import av
from av.container import InputContainer
from av.error import (
    ArgumentError,
    DecoderNotFoundError,
    DemuxerNotFoundError,
    FFmpegError,
    HTTPForbiddenError,
    HTTPNotFoundError,
    HTTPUnauthorizedError,
    InvalidDataError,
    ProtocolNotFoundError,
)
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from penstock.outbound import OutboundPolicy
from penstock_video.decode.uri import UriKind, kind_of, path_of, redacted
from penstock_video.errors import (
    DecodeError,
    PipelineError,
    SourceNotAllowed,
    SourceRefused,
    SourceUnavailable,
    StreamEnded,
)
from penstock_video.outbound import why_host_refused

if TYPE_CHECKING:
    from penstock_video.decode.relay import Relay


_REFUSED = (HTTPUnauthorizedError, HTTPForbiddenError)
_NOT_READ = (ProtocolNotFoundError, DemuxerNotFoundError, av.error.IsADirectoryError, av.error.PermissionError)
_NOT_THERE = (HTTPNotFoundError, av.error.FileNotFoundError)
# FFmpeg's message when its interrupt callback reports the timeout.
_EXIT = "Immediate exit requested"
_GIVE_A_VIDEO = "give a video such as MP4, Matroska or AVI, or convert it with ffmpeg"
_SEEKS = "; where its server takes no Range, an MP4 has to begin with its index (ffmpeg's -movflags +faststart)"


def failure_of(error: FFmpegError, uri: str, kind: UriKind, *, is_opening: bool) -> PipelineError:
    """Our error for FFmpeg's; the text has the source without user and password, and the fix if there is one."""
    shown, reason = redacted(uri), error.strerror or type(error).__name__
    if isinstance(error, _REFUSED):
        return SourceRefused(f"{shown} refuses its user and password ({reason})")
    if isinstance(error, _NOT_THERE):
        return SourceUnavailable(f"{shown} is not there ({reason})")
    if isinstance(error, av.error.TimeoutError | av.error.BlockingIOError) or reason == _EXIT:
        return SourceUnavailable(f"{shown} said nothing in time while {'opened' if is_opening else 'read'}")
    if isinstance(error, av.error.EOFError):
        return StreamEnded(f"{shown} is over") if not is_opening else DecodeError(f"{shown} has nothing in it")
    if isinstance(error, DecoderNotFoundError):
        return SourceNotAllowed(f"{shown} is of a codec that is not read")
    if isinstance(error, _NOT_READ):
        return SourceNotAllowed(f"{shown} may not be read, or is of a protocol or format that is not read ({reason})")
    # FFmpeg reports what is not on the allow-lists as an invalid argument, but also invalid data of a camera.
    if isinstance(error, ArgumentError) and is_opening and kind in {UriKind.FILE, UriKind.HTTP}:
        return SourceNotAllowed(
            f"{shown} has a format that is not read, or leads to a protocol that is not: {_GIVE_A_VIDEO}"
        )
    if isinstance(error, InvalidDataError) and is_opening and kind is UriKind.RTSP:  # also of one that went silent
        return SourceUnavailable(f"{shown} did not say in time what it sends")
    if isinstance(error, InvalidDataError):
        return DecodeError(f"{shown} cannot be read as video ({reason})")
    hint = _SEEKS if kind is UriKind.HTTP and error.errno == EIO else ""
    return SourceUnavailable(f"{shown} cannot be {'opened' if is_opening else 'read'} ({redacted(reason)}){hint}")


_FORMATS = (
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,mjpeg,mpjpeg,flv,live_flv,h264,hevc,av1,obu,ivf,asf,ogg,mxf,"
    "dhav,nut"
)
_HLS_FORMATS = ",hls,aac,mp3,ac3,eac3,webvtt"  # a playlist's formats, and those of separate audio
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
_PROBED_S = 1.0  # of a live stream at most, to find its rate: packets received meanwhile are late
MOST_FILE_THREADS = 4


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """open_timeout_s, read_timeout_s: without a byte for this time the source is unavailable. is_udp: RTSP over UDP.
    threads: of the decoder, 0 for the default: one for live sources, several for files. max_pixels: larger pictures are
    refused, 0 for no limit. outbound: allowed network addresses."""

    open_timeout_s: float = 10.0
    read_timeout_s: float = 10.0
    is_udp: bool = False
    threads: int = 0
    max_pixels: int = 0
    outbound: OutboundPolicy = field(default_factory=OutboundPolicy)


def relay_for(uri: str, options: DecodeOptions) -> "Relay | None":
    """The relay for the source; None if FFmpeg may connect. Raises SourceNotAllowed, SourceUnavailable."""
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
    from penstock_video.decode.relay import Relay  # it imports asyncio, so only if it is needed

    return Relay(uri, outbound, options.open_timeout_s)


def open_container(uri: str, options: DecodeOptions, relay: "Relay | None" = None) -> InputContainer:
    """The opened source. Raises SourceNotAllowed, SourceRefused, SourceUnavailable, DecodeError."""
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
    except (OSError, ValueError, UnicodeError) as error:  # PyAV's, and builtins that FFmpeg's errors are not
        raise DecodeError(f"{redacted(uri)} cannot be opened ({type(error).__name__})") from None


def pictures_of(container: InputContainer, uri: str) -> VideoStream:
    """The video stream. Raises DecodeError if there is none."""
    best = container.streams.best("video")
    if not isinstance(best, VideoStream) or best.codec_context is None:  # no context: a codec unknown to FFmpeg
        raise DecodeError(f"{redacted(uri)} has no stream of pictures that can be decoded")
    return best


def set_threads(context: VideoCodecContext, threads: int, *, is_live: bool) -> None:
    """Sets decoder threads: several only if their latency (a frame each) does not matter."""
    own_choice = 1 if is_live else min(max(len(os.sched_getaffinity(0)) // 2, 1), MOST_FILE_THREADS)
    context.thread_count = threads or own_choice
    context.thread_type = "SLICE" if is_live else "AUTO"


def _readable_file(uri: str) -> str:
    """The absolute path. Pipes, devices and folders are refused: opening one may block forever."""
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
