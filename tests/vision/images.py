"""Encoded images built by hand, so that every byte of a case is known."""

import struct
import zlib

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

Image = npt.NDArray[np.uint8]


def picture(width: int, height: int, *, seed: int = 1) -> Image:
    """(height, width, 3) uint8 RGB, smooth, without any symmetry."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8)
    enlarged: Image = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    return enlarged


def jpeg(rgb: Image, *, quality: int = 95, subsampling: str = "444") -> bytes:
    encoded: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(rgb), quality=quality, colorspace="RGB", colorsubsampling=subsampling
    )
    return encoded


def progressive_jpeg(rgb: Image) -> bytes:
    parameters = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_QUALITY, 95]
    return bytes(cv2.imencode(".jpg", rgb[..., ::-1], parameters)[1])


def png_chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png_header(width: int, height: int, *, depth: int, color_type: int) -> bytes:
    return png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0))


def png(samples: npt.NDArray[np.unsignedinteger], *, color_type: int, before_pixels: bytes = b"") -> bytes:
    """samples: (H, W) or (H, W, channels), uint8 or uint16, as the colour type says. before_pixels: further chunks."""
    height, width = samples.shape[:2]
    depth = samples.dtype.itemsize * 8
    rows = samples.astype(samples.dtype.newbyteorder(">")).reshape(height, -1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            png_header(width, height, depth=depth, color_type=color_type),
            before_pixels,
            png_chunk(b"IDAT", zlib.compress(raw)),
            png_chunk(b"IEND", b""),
        ]
    )


def webp(rgb: Image) -> bytes:
    """Lossless."""
    return bytes(cv2.imencode(".webp", rgb[..., ::-1], [cv2.IMWRITE_WEBP_QUALITY, 101])[1])


def lossy_webp(rgb: Image) -> bytes:
    return bytes(cv2.imencode(".webp", rgb[..., ::-1], [cv2.IMWRITE_WEBP_QUALITY, 90])[1])


def exif(orientation: int, *, order: str = "<") -> bytes:
    """A TIFF block with one tag. order: < for Intel's byte order, > for Motorola's."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    entry = struct.pack(f"{order}HHIHH", 0x0112, 3, 1, orientation, 0)
    return head + struct.pack(f"{order}IH", 8, 1) + entry + struct.pack(f"{order}I", 0)


def jpeg_with_exif(encoded: bytes, tiff: bytes) -> bytes:
    payload = b"Exif\0\0" + tiff
    return encoded[:2] + b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload + encoded[2:]


def webp_chunk(kind: bytes, payload: bytes) -> bytes:
    return kind + struct.pack("<I", len(payload)) + payload + b"\0" * (len(payload) % 2)


def webp_file(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_canvas(width: int, height: int, *, flags: int = 0) -> bytes:
    """A VP8X chunk. flags: 0x08 says that EXIF follows."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return webp_chunk(b"VP8X", struct.pack("<I", flags) + size)


def webp_with_exif(encoded: bytes, width: int, height: int, tiff: bytes) -> bytes:
    return webp_file(webp_canvas(width, height, flags=0x08), encoded[12:], webp_chunk(b"EXIF", tiff))
