"""Errors of FFmpeg, as errors of ours. Their own texts hold the URI with its password and are never passed on."""

from errno import EIO

from av.error import (
    ArgumentError,
    BlockingIOError,
    DecoderNotFoundError,
    DemuxerNotFoundError,
    EOFError,
    FFmpegError,
    FileNotFoundError,
    HTTPForbiddenError,
    HTTPNotFoundError,
    HTTPUnauthorizedError,
    InvalidDataError,
    IsADirectoryError,
    PermissionError,
    ProtocolNotFoundError,
    TimeoutError,
)

from deepstream_pipeline.decode.uri import UriKind, redacted
from deepstream_pipeline.errors import (
    DecodeError,
    PipelineError,
    SourceNotAllowed,
    SourceRefused,
    SourceUnavailable,
    StreamEnded,
)

_REFUSED = (HTTPUnauthorizedError, HTTPForbiddenError)
_NOT_READ = (ProtocolNotFoundError, DemuxerNotFoundError, IsADirectoryError, PermissionError)
_NOT_THERE = (HTTPNotFoundError, FileNotFoundError)
# FFmpeg's immediate exit: its interrupt callback said that the time is over.
_EXIT = "Immediate exit requested"
_SEEKS = "; where its server takes no Range, an MP4 has to begin with its index (ffmpeg's -movflags +faststart)"


def failure_of(error: FFmpegError, uri: str, kind: UriKind, *, is_opening: bool) -> PipelineError:
    """Ours for FFmpeg's; the text names the source without user and password, and says what to do where one can."""
    shown, reason = redacted(uri), error.strerror or type(error).__name__
    if isinstance(error, _REFUSED):
        return SourceRefused(f"{shown} refuses its user and password ({reason})")
    if isinstance(error, _NOT_THERE):
        return SourceUnavailable(f"{shown} is not there ({reason})")
    if isinstance(error, TimeoutError | BlockingIOError) or reason == _EXIT:
        return SourceUnavailable(f"{shown} said nothing in time while {'opened' if is_opening else 'read'}")
    if isinstance(error, EOFError):
        return StreamEnded(f"{shown} is over") if not is_opening else DecodeError(f"{shown} has nothing in it")
    if isinstance(error, DecoderNotFoundError):
        return SourceNotAllowed(f"{shown} is of a codec that is not read")
    if isinstance(error, _NOT_READ):
        return SourceNotAllowed(f"{shown} may not be read, or is of a protocol or format that is not read ({reason})")
    # What is not on the allow-lists is an invalid argument to FFmpeg; so is some nonsense that a camera says.
    if isinstance(error, ArgumentError) and is_opening and kind in {UriKind.FILE, UriKind.HTTP}:
        return SourceNotAllowed(f"{shown} is of a format that is not read, or leads to a protocol that is not")
    if isinstance(error, InvalidDataError) and is_opening and kind is UriKind.RTSP:  # also of one that went silent
        return SourceUnavailable(f"{shown} did not say in time what it sends")
    if isinstance(error, InvalidDataError):
        return DecodeError(f"{shown} cannot be read as video ({reason})")
    hint = _SEEKS if kind is UriKind.HTTP and error.errno == EIO else ""
    return SourceUnavailable(f"{shown} cannot be {'opened' if is_opening else 'read'} ({redacted(reason)}){hint}")
