"""Reads or encodes images: files, bytes, NumPy arrays, PIL images and http:// URLs."""

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
    """The subset of PIL.Image.Image that is used."""

    def convert(self, mode: str, /) -> Any: ...


ImageSource = str | PathLike[str] | bytes | bytearray | memoryview | Array | PilImage


def encoded_picture(source: ImageSource, color: Color) -> bytes:
    """The encoded image. Arrays and PIL images are encoded as JPEG of quality 95 without chroma subsampling.

    color: channel order of an array. Raises InvalidRequest for an unsupported type or an unreadable file,
    ConnectionFailed for a failed download, and TooLarge.
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
        f"a {type(source).__name__} is not an image: give a path, a URL, bytes, a NumPy array or a PIL image"
    )


def is_pil_image(source: object) -> bool:
    """Whether it is a PIL image. Does not import PIL."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(source, pil.Image)


def is_several(source: object) -> bool:
    """Whether it is a list or tuple of images."""
    return isinstance(source, Sequence) and not isinstance(source, str | bytes | bytearray | memoryview)


def _read(path: Path) -> bytes:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_PICTURE_BYTES:
            raise TooLarge(f"{path} has {size_bytes} bytes (limit {MAX_PICTURE_BYTES}): give a smaller image")
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"the image {path} cannot be read ({error.strerror}): check the path") from error


def _jpeg(pixels: Array, color: Color) -> bytes:
    """pixels: (height, width, 3) or (height, width), uint8."""
    import simplejpeg

    if color not in ("bgr", "rgb"):
        raise InvalidRequest(f"color is {color!r}; it must be bgr or rgb")
    is_gray = pixels.ndim == 2 or pixels.shape[2:] == (1,)
    if pixels.dtype != np.uint8 or not (is_gray or (pixels.ndim == 3 and pixels.shape[2] == 3)):
        raise InvalidRequest(
            f"an array of shape {pixels.shape} and dtype {pixels.dtype} is not an image: give (height, width, 3) uint8"
        )
    if not 1 <= min(pixels.shape[:2]) <= max(pixels.shape[:2]) <= _MAX_SIDE:
        raise InvalidRequest(
            f"an image of {pixels.shape[1]} x {pixels.shape[0]} pixels is empty or too large (limit {_MAX_SIDE} a side)"
        )
    shaped = np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], -1))
    order = "GRAY" if is_gray else color.upper()
    data: bytes = simplejpeg.encode_jpeg(shaped, quality=JPEG_QUALITY, colorspace=order, colorsubsampling="444")
    return data


def _fetched(url: str) -> bytes:
    """Downloads a URL without sending the API key. Follows at most three redirects."""
    import urllib3

    from penstock.network import client_context

    retries = urllib3.Retry(total=3, connect=0, read=0, redirect=3, raise_on_status=False)
    with urllib3.PoolManager(num_pools=1, ssl_context=client_context()) as pool:
        try:
            answer = pool.request("GET", url, preload_content=False, timeout=FETCH_TIMEOUT_S, retries=retries)
            if answer.status != 200:
                raise ConnectionFailed(f"HTTP {answer.status} for the image {_shown(url)}: check the URL")
            return _bounded_body(answer, url)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ConnectionFailed(f"the image {_shown(url)} cannot be downloaded ({error}): check the URL") from error


def _bounded_body(answer: "BaseHTTPResponse", url: str) -> bytes:
    body = bytearray()
    while chunk := answer.read(_CHUNK_BYTES):
        body += chunk
        if len(body) > MAX_PICTURE_BYTES:
            raise TooLarge(f"the image {_shown(url)} exceeds {MAX_PICTURE_BYTES} bytes: give a smaller image")
    return bytes(body)


def _shown(url: str) -> str:
    """The URL without user, password and query, which may be secret."""
    from urllib3.util import parse_url

    return parse_url(url)._replace(auth=None, query=None, fragment=None).url
