"""Pictures as users have them, as encoded bytes: files, bytes, NumPy arrays, PIL's images, http:// addresses."""

import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from penstock.protocol.errors import ConnectionFailed, InvalidRequest, TooLarge
from penstock.protocol.inference import Array

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

JPEG_QUALITY = 95
MAX_PICTURE_BYTES = 64 << 20
FETCH_TIMEOUT_S = 20.0
_MAX_SIDE = 65535  # of a JPEG
_CHUNK_BYTES = 1 << 16
Color = Literal["bgr", "rgb"]


class PilImage(Protocol):
    """The part of PIL.Image.Image that is used."""

    def convert(self, mode: str, /) -> Any: ...


ImageSource = str | PathLike[str] | bytes | bytearray | memoryview | Array | PilImage


def encoded_picture(source: ImageSource, color: Color) -> bytes:
    """The encoded picture. Arrays and PIL's images become JPEG of quality 95, with full colour resolution.

    color: channel order of an array. Raises InvalidRequest for what is not a picture, ConnectionFailed for an address
    that does not answer.
    """
    match source:
        case bytes():
            return source
        case bytearray() | memoryview():
            return bytes(source)
        case np.ndarray():
            return _jpeg(source, color)
        case str() if source.startswith(("http://", "https://")):
            return _fetched(source)
        case str() | PathLike():
            return _read(Path(source))
    if is_pil_image(source):
        return _jpeg(np.asarray(source.convert("RGB")), "rgb")
    raise InvalidRequest(
        f"a {type(source).__name__} is not a picture: give a path, an address, bytes, a NumPy array or a PIL image"
    )


def is_pil_image(source: object) -> bool:
    """Whether it is an image of PIL, which is not imported for that."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(source, pil.Image)


def is_several(source: object) -> bool:
    """Whether it is a list or tuple of pictures."""
    return isinstance(source, Sequence) and not isinstance(source, str | bytes | bytearray | memoryview)


def _read(path: Path) -> bytes:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_PICTURE_BYTES:
            raise TooLarge(f"{path} has {size_bytes} bytes (limit {MAX_PICTURE_BYTES}): give a smaller picture")
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"the picture {path} cannot be read ({error.strerror}): check the path") from error


def _jpeg(pixels: Array, color: Color) -> bytes:
    """pixels: (height, width, 3) or (height, width), uint8."""
    import simplejpeg

    if color not in ("bgr", "rgb"):
        raise InvalidRequest(f"color is {color!r}; it must be bgr or rgb")
    is_gray = pixels.ndim == 2 or pixels.shape[2:] == (1,)
    if pixels.dtype != np.uint8 or not (is_gray or (pixels.ndim == 3 and pixels.shape[2] == 3)):
        raise InvalidRequest(
            f"an array of shape {pixels.shape} and dtype {pixels.dtype} is not a picture: give (height, width, 3) uint8"
        )
    if not 1 <= min(pixels.shape[:2]) <= max(pixels.shape[:2]) <= _MAX_SIDE:
        raise InvalidRequest(f"a picture of {pixels.shape[1]} x {pixels.shape[0]} pixels cannot be sent as JPEG")
    shaped = np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], -1))
    order = "GRAY" if is_gray else color.upper()
    data: bytes = simplejpeg.encode_jpeg(shaped, quality=JPEG_QUALITY, colorspace=order, colorsubsampling="444")
    return data


def _fetched(url: str) -> bytes:
    """The body behind an address, without the API key. Redirects are followed, at most three."""
    import urllib3

    from penstock.network import client_context

    retries = urllib3.Retry(total=3, connect=0, read=0, redirect=3, raise_on_status=False)
    with urllib3.PoolManager(num_pools=1, ssl_context=client_context()) as pool:
        try:
            answer = pool.request("GET", url, preload_content=False, timeout=FETCH_TIMEOUT_S, retries=retries)
            if answer.status != 200:
                raise ConnectionFailed(f"the picture's address answers HTTP {answer.status}: check {_shown(url)}")
            return _bounded_body(answer, url)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ConnectionFailed(f"the picture at {_shown(url)} cannot be fetched ({error}): check it") from error


def _bounded_body(answer: "BaseHTTPResponse", url: str) -> bytes:
    body = bytearray()
    while chunk := answer.read(_CHUNK_BYTES):
        body += chunk
        if len(body) > MAX_PICTURE_BYTES:
            raise TooLarge(f"the picture at {_shown(url)} has more than {MAX_PICTURE_BYTES} bytes: give a smaller one")
    return bytes(body)


def _shown(url: str) -> str:
    """The address without user, password and query, which may be secret."""
    from urllib3.util import parse_url

    return parse_url(url)._replace(auth=None, query=None, fragment=None).url
