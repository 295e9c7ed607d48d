"""gzip and deflate, as HTTP bodies carry them."""

import zlib

from server.core.errors import InvalidRequest, NotSupported, TooLarge

_GZIP_OR_ZLIB = 47  # zlib's wbits: either header, told apart by its first bytes, as Triton does
_GZIP = 31
NOT_ENCODED = ("", "identity")


def inflate(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The body by its content-encoding; the body itself where there is none.

    Raises TooLarge at the limit of decompressed bytes, InvalidRequest for broken data, NotSupported for an
    encoding that is neither gzip nor deflate (zlib's form).
    """
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
    """The body compressed by that content-encoding, gzip or deflate; the body itself for any other."""
    if encoding == "gzip":
        return zlib.compress(body, wbits=_GZIP)
    return zlib.compress(body) if encoding == "deflate" else body
