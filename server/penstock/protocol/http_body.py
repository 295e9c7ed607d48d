"""HTTP bodies without I/O: compression, bodies that arrive in chunks, and the length of a body's JSON."""

import io
import re
import zlib

from penstock.protocol.errors import InvalidRequest, NotSupported, TooLarge

_GZIP_OR_ZLIB = 47  # zlib's wbits: gzip or zlib header, detected by the first bytes, as in Triton
_GZIP = 31
NOT_ENCODED = ("", "identity")
HEADER_LENGTH = "inference-header-content-length"
_MOST_DIGITS = 19  # of a 64-bit integer
_LEADING_NUMBER = re.compile(r"\s*([+-]?[0-9]+)", re.ASCII)


def header_length_of(header: str | None) -> int | None:
    """Length of the JSON as Triton reads the header: a leading number, 0 without one; None without a header.

    Raises InvalidRequest if the number has more digits than a 64-bit integer.
    """
    if header is None:
        return None
    number = _LEADING_NUMBER.match(header)
    if number is None:
        return 0
    digits = number[1].lstrip("+-").lstrip("0")
    if len(digits) > _MOST_DIGITS:
        raise InvalidRequest(f"Inference-Header-Content-Length has {len(digits)} digits; it must be a 64-bit number")
    return int(f"-0{digits}" if number[1].startswith("-") else f"0{digits}")


def inflate(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The body, decompressed from gzip or deflate (zlib). Raises TooLarge, InvalidRequest, NotSupported."""
    if encoding in NOT_ENCODED:
        return body
    if encoding not in ("gzip", "deflate"):
        raise NotSupported(f"content-encoding {encoding!r} is not supported; send gzip, deflate or none")
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        plain = stream.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is no valid {encoding}: {error}") from error
    if len(plain) > limit_bytes:
        raise TooLarge(f"the body has more than {limit_bytes} bytes once decompressed, the limit; send less at once")
    if not stream.eof:
        raise InvalidRequest(f"the {encoding} body ends too early")
    if stream.unused_data:
        raise InvalidRequest(f"{len(stream.unused_data)} bytes follow the end of the {encoding} body; send one stream")
    return plain


def deflate(body: bytes, encoding: str) -> bytes:
    """The body compressed with gzip or deflate; unchanged for any other encoding."""
    if encoding == "gzip":
        return zlib.compress(body, wbits=_GZIP)
    return zlib.compress(body) if encoding == "deflate" else body


class BodyBuffer:
    """Collects a body's chunks. A single chunk is not copied."""

    __slots__ = ("_buffer", "_first", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self._first = b""
        self._buffer: io.BytesIO | None = None

    def add(self, piece: bytes) -> None:
        self.size_bytes += len(piece)
        if self._buffer is not None:
            self._buffer.write(piece)
        elif self._first:
            self._buffer = io.BytesIO()
            self._buffer.write(self._first)
            self._buffer.write(piece)
            self._first = b""
        else:
            self._first = piece

    def take(self) -> bytes:
        """The whole body, once, without a copy; the buffer is then empty."""
        whole = self._first if self._buffer is None else self._buffer.getvalue()
        self._first, self._buffer, self.size_bytes = b"", None, 0
        return whole
