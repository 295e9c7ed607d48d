"""Encoded pictures to a network's input, decoded by nvJPEG and preprocessed by one kernel.

OpenCV decodes on the CPU what nvJPEG does not support. For equal pixels the result equals penstock.vision's, within 1
of 255 for enlarged pictures; nvJPEG's pixels differ from libjpeg-turbo's (see tests/gpu/test_pictures_gpu.py), and it
accepts some corrupt JPEGs. It parses untrusted bytes in the model's process; `image-decoder: gateway` avoids that.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .nvjpeg import GpuJpegs
from .picture_header import MAX_PIXELS, MAX_PIXELS_VARIABLE, PictureFormat, PictureHeader, PictureRejected, read_header
from .picture_kernel import NO_PICTURE, ROW, PictureKernel, PixelLayout, kernel_row
from .picture_spec import PictureSpec

MAX_DECODED_BYTES = 1 << 28  # of pixels on the GPU at a time: 64 pictures of 1.4 megapixels
_CPU_DECODERS = 4
_KNOWN_SIZES = 4096


class DevicePicture(NamedTuple):
    """uint8 pixels on the device: their address, layout, and owner."""

    address: int
    stored: PixelLayout
    memory: torch.Tensor


class PictureReader:
    """Fills a network's input from encoded pictures. One per model instance; calls must not overlap.

    On a GPU, prepare() returns before the work on the current stream has run, so read `out` on that stream.
    """

    def __init__(self, spec: PictureSpec, device: torch.device) -> None:
        """device: "cuda:N" or "cpu". Compiles the kernel and starts nvJPEG (a second). Raises TorchLoadError."""
        self._spec, self._device = spec, torch.device(device)
        self._max_pixels = int(os.environ.get(MAX_PIXELS_VARIABLE, MAX_PIXELS))
        self._tables: dict[torch.dtype, torch.Tensor] = {}
        self._kernels: dict[int, PictureKernel] = {}
        self._walk = lru_cache(_KNOWN_SIZES)(lambda stored: kernel_row(stored, spec))
        self._rows = _KernelRows(self._device)
        self._in_use: list[torch.Tensor] = []
        self._last_read: torch.cuda.Event | None = None
        self._cpu_decoders = ThreadPoolExecutor(_CPU_DECODERS, "decode")
        self._jpegs: GpuJpegs | None = None
        if self._device.type == "cuda":
            self._warm_up()

    def _warm_up(self) -> None:
        """Prepares everything that is made once, before the first request."""
        with torch.cuda.device(self._device):
            self._jpegs = GpuJpegs(self._device, is_grey=self._spec.channels == 1)
        shape = (1, self._spec.channels, self._spec.height, self._spec.width)
        for dtype in (torch.float16, torch.float32):
            self.prepare([b""], torch.empty(shape, dtype=dtype, device=self._device))
        self._wait_for_last_read()

    @property
    def decoder(self) -> str:
        """The decoder of most JPEGs, for logs."""
        return "opencv" if self._jpegs is None else self._jpegs.name

    def prepare(self, encoded: Sequence[bytes], out: torch.Tensor) -> list[str | None]:
        """Fills the first len(encoded) rows of out, black for rejected pictures. Returns an error or None for each.

        out: (N or more, channels, height, width), on the device, of any floating dtype and strides. Raises
        RuntimeError.
        """
        with torch.inference_mode():
            if self._device.type == "cpu":
                return [self._on_cpu(picture, row) for picture, row in zip(encoded, out, strict=False)]
            return self._on_gpu(encoded, out)

    def _on_gpu(self, encoded: Sequence[bytes], out: torch.Tensor) -> list[str | None]:
        headers = [self._header(picture) for picture in encoded]
        errors: list[str | None] = []
        with torch.cuda.device(self._device):
            for begin, end in pieces([_decoded_bytes(header) for header in headers], MAX_DECODED_BYTES):
                self._wait_for_last_read()
                decoded = self._decode(encoded[begin:end], headers[begin:end])
                self._launch(decoded, out[begin:end])
                errors += (found if isinstance(found, str) else None for found in decoded)
        return errors

    def _header(self, picture: bytes) -> PictureHeader | str:
        try:
            header = read_header(picture)
        except PictureRejected as error:
            return f"the picture {error}"
        if (pixels := header.width * header.height) > self._max_pixels:
            return f"the picture has {header.width} x {header.height} = {pixels} pixels (limit {self._max_pixels})"
        if header.format is PictureFormat.JPEG and picture.rfind(b"\xff\xd9") < header.pixels_at:
            return f"the picture is truncated: its {len(picture)} bytes end without a JPEG's end marker (EOI)"
        return header

    def _wait_for_last_read(self) -> None:
        """Waits until the previous batch was read: its memory is reused, and torchvision writes on another stream."""
        if self._last_read is not None:
            self._last_read.synchronize()
            self._in_use = []

    def _decode(self, encoded: Sequence[bytes], headers: Sequence[PictureHeader | str]) -> list[DevicePicture | str]:
        found: list[Any] = [header if isinstance(header, str) else None for header in headers]
        by_gpu = [i for i, header in enumerate(headers) if not isinstance(header, str) and header.is_for_gpu]
        for i, planes in zip(by_gpu, self._by_gpu([(encoded[i], headers[i]) for i in by_gpu]), strict=True):
            found[i] = planes
        by_cpu = [i for i, entry in enumerate(found) if entry is None]
        if by_cpu:
            run = self._cpu_decoders.map if len(by_cpu) > 1 else map
            for i, entry in zip(by_cpu, run(self._by_opencv, [(encoded[i], headers[i]) for i in by_cpu]), strict=True):
                found[i] = entry
        return found

    def _by_gpu(self, asks: Sequence[tuple[bytes, Any]]) -> list[DevicePicture | None]:
        """None for pictures that nvJPEG rejects."""
        if not asks or self._jpegs is None:
            return [None] * len(asks)
        planes = self._jpegs.decode([picture for picture, _ in asks], [(one.width, one.height) for _, one in asks])
        return [
            one and DevicePicture(one.address, self._stored(header, one.width, one.height, is_planar=True), one.memory)
            for one, (_, header) in zip(planes, asks, strict=True)
        ]

    def _stored(self, header: Any, width: int, height: int, *, is_planar: bool) -> PixelLayout:
        channels = self._spec.channels
        color = "GRAY" if channels == 1 else "RGB" if is_planar else "BGR"
        return PixelLayout(width, height, header.orientation, is_planar, channels, color)

    def _by_opencv(self, ask: tuple[bytes, Any]) -> DevicePicture | str:
        from .opencv_pictures import decode_with_opencv

        encoded, header = ask
        try:
            pixels = decode_with_opencv(encoded, header, is_grey=self._spec.channels == 1)
        except PictureRejected as error:
            return f"the picture {error}"
        stored = self._stored(header, pixels.shape[1], pixels.shape[0], is_planar=False)
        there = torch.from_numpy(pixels).to(self._device)
        return DevicePicture(there.data_ptr(), stored, there)

    def _launch(self, decoded: Sequence[DevicePicture | str], out: torch.Tensor) -> None:
        self._in_use = [found.memory for found in decoded if not isinstance(found, str)]
        rows = self._rows.on_device([self._row(found) for found in decoded])
        kernel, table = self._kernel(out.element_size()), self._table(out.dtype)
        stream = torch.cuda.current_stream(self._device)
        kernel(rows, table, out, stream=stream.cuda_stream)
        if self._last_read is None:
            self._last_read = torch.cuda.Event()
        self._last_read.record(stream)

    def _row(self, found: DevicePicture | str) -> bytes:
        return NO_PICTURE if isinstance(found, str) else self._walk(found.stored).row(found.address)

    def _kernel(self, element_bytes: int) -> PictureKernel:
        if element_bytes not in self._kernels:
            self._kernels[element_bytes] = PictureKernel(self._device, element_bytes)
        return self._kernels[element_bytes]

    def _table(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._tables:
            self._tables[dtype] = value_table(self._spec).to(dtype).to(self._device)
        return self._tables[dtype]

    def _on_cpu(self, encoded: bytes, out: torch.Tensor) -> str | None:
        from .opencv_pictures import decode_with_opencv, resize_with_opencv

        table = self._table(out.dtype)
        out.copy_(table[:, :1, None].expand_as(out))
        header = self._header(encoded)
        if isinstance(header, str):
            return header
        try:
            pixels = decode_with_opencv(encoded, header, is_grey=self._spec.channels == 1)
        except PictureRejected as error:
            return f"the picture {error}"
        planes = torch.from_numpy(resize_with_opencv(pixels, header.orientation, self._spec)).long()
        for plane, values, to in zip(planes, table, out, strict=True):
            to.copy_(values[plane])
        return None


class _KernelRows:
    """The kernel's parameters: in pinned memory, copied to the device on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._capacity = device, 0

    def on_device(self, rows: Sequence[bytes]) -> torch.Tensor:
        """Valid until the next call, which must wait until the copy has ended."""
        if len(rows) > self._capacity:
            self._capacity = max(len(rows), 64)
            self._pinned = torch.empty(self._capacity * ROW.size, dtype=torch.uint8, pin_memory=True)
            self._there = torch.empty(self._capacity * ROW.size, dtype=torch.uint8, device=self._device)
        size = len(rows) * ROW.size
        joined = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        self._pinned[:size].copy_(joined)
        return self._there[:size].copy_(self._pinned[:size], non_blocking=True)


def value_table(spec: PictureSpec) -> torch.Tensor:
    """(channels, 256) float32: normalised value by pixel value, computed in float64 and rounded once."""
    values = torch.arange(256, dtype=torch.float64)
    pairs = zip(spec.offsets, spec.channel_factors, strict=True)
    return torch.stack([spec.scale * (values - offset) * factor for offset, factor in pairs]).float()


def pieces(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive groups with a total size of at most the limit, or one element."""
    begin = total = 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > limit:
            yield begin, i
            begin, total = i, 0
        total += size
    if sizes:
        yield begin, len(sizes)


def _decoded_bytes(header: PictureHeader | str) -> int:
    return 0 if isinstance(header, str) else 3 * header.width * header.height
