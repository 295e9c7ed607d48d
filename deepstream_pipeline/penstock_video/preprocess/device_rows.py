"""Model input rows from a picture in GPU memory, by kernels that equal `prepare_row`."""

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.vision.preprocess import NUMPY_OF, CropRegion, part_of, values_of
from penstock.vision.spec import ColorFormat, InputOrder, PrepareSpec, ScalingFilter
from penstock_video.gpu.device import Device, DeviceBlock, Kernel, zeros_pinned
from penstock_video.preprocess import kernels
from penstock_video.preprocess.kernels import cubin_for
from penstock_video.types import DevicePicture

__all__ = ["DevicePreparer", "Made", "RowTarget", "output_size", "why_not"]

# A device address, or a writable array of the row's bytes in host memory, C order; its shape and dtype do not matter.
RowTarget = int | npt.NDArray[Any]
Grid = tuple[int, int, int]

_BLOCK = (32, 8, 1)
_THUMBNAIL_SHAPE = (kernels.THUMBNAIL_SIZE[1], kernels.THUMBNAIL_SIZE[0])
_THUMBNAIL_BYTES = _THUMBNAIL_SHAPE[0] * _THUMBNAIL_SHAPE[1]
# In the camera's block: what pixel values become, the thumbnail, a row on its way to the host.
_VALUES_ROOM, _THUMBNAIL_ROOM = 4096, 4096
_ROUNDING = 1e-6
_MOST_SCALED = 0.75  # of the pixels: else the decoder gives the full size


class Made(NamedTuple):
    """row_shape: of the network's input for this picture, () without a network. thumbnail: (18, 64) uint8, borrowed."""

    row_shape: tuple[int, ...]
    thumbnail: npt.NDArray[np.uint8]


def why_not(spec: PrepareSpec) -> str:
    """Why the card cannot make this network's rows; empty where it can."""
    if spec.filter not in (ScalingFilter.NEAREST, ScalingFilter.BILINEAR):
        return f"its pictures are resized by {spec.filter.name.lower()}, and a GPU does it by nearest or bilinear only"
    if not spec.pad_value.is_integer():
        return f"its padding is {spec.pad_value:g}, and a GPU pads with whole pixel values only"
    return ""


def output_size(size: tuple[int, int], spec: PrepareSpec | None) -> tuple[int, int] | None:
    """(width, height) to which a decoder may scale pictures of this size: even, of about the same shape, and, for
    accuracy, twice as large as they are in the network's input. None: full size, since the model's `scaled-decode` is
    0, or the pictures are not much larger."""
    if spec is None or not spec.has_scaled_decode or spec.filter is not ScalingFilter.BILINEAR:
        return None
    part = part_of(*size, spec)
    share = 2 * max(part.resized_width / part.width, part.resized_height / part.height)
    width, height = (math.ceil(share * side / 2 - _ROUNDING) * 2 for side in size)
    return (width, height) if width * height <= _MOST_SCALED * size[0] * size[1] else None


class _Plan:
    """All that stays the same from picture to picture of one shape: the kernels' arguments, packed once."""

    def __init__(self, picture: DevicePicture, spec: PrepareSpec | None) -> None:
        size = (picture.width, picture.height)
        upright_width, upright_height = picture.upright_stored_size
        colours = kernels.colour_arguments(picture.matrix, is_full_range=picture.is_full_range)
        walk = kernels.picture_arguments(picture.pitch, size, picture.orientation)
        self.picture = _packed(kernels.PICTURE, 0, 0, *walk, *colours, 0)
        self.thumbnail = _packed(kernels.THUMBNAIL, 0, *kernels.thumbnail_arguments(*size), 0)
        self.thumbnail_grid = _grid(*kernels.THUMBNAIL_SIZE)
        self.whole = _packed(kernels.WHOLE, 0, upright_width, upright_height)
        self.whole_grid = _grid(upright_width, upright_height)
        self.image_shape = (upright_height, upright_width, 3)
        self.row = ctypes.create_string_buffer(kernels.ROW.size)
        self.row_grid: Grid = (0, 0, 0)
        self.row_shape: tuple[int, ...] = ()
        self.row_bytes = 0
        if spec is not None:
            part = part_of(*picture.upright_size, spec, picture.upright_stored_size)
            self.row = _packed(kernels.ROW, *_row_arguments(part, spec))
            small_width, small_height, _ = self.thumbnail_grid
            width, height, _ = _grid(part.network_width, part.network_height)
            self.row_grid = (max(width, small_width), max(height, small_height), 2)
            channels, lines = spec.color.channels, (part.network_height, part.network_width)
            self.row_shape = (channels, *lines) if spec.layout is InputOrder.NCHW else (*lines, channels)
            self.row_bytes = channels * lines[0] * lines[1] * np.dtype(NUMPY_OF[spec.datatype]).itemsize
        self.thumbnail_arguments = _addresses(self.picture, self.thumbnail)
        self.whole_arguments = _addresses(self.picture, self.whole)
        self.row_arguments = _addresses(self.picture, self.row, self.thumbnail)


class DevicePreparer:
    """One camera's, used by one thread. What it holds of the card is given back by `close`."""

    def __init__(self, device: Device, spec: PrepareSpec | None) -> None:
        """spec: None if there is no network to make rows for. Raises GpuUnavailable and GpuFailed."""
        device.bind()
        self._device = device
        self._spec = spec
        self._thumbnail_kernel = device.kernel(kernels.THUMBNAIL_KERNEL, cubin_for)
        self._paint_kernel = device.kernel(kernels.PAINT_KERNEL, cubin_for)
        self._row_kernel: Kernel | None = None
        if spec is not None:
            name = kernels.ROW_KERNELS[np.dtype(NUMPY_OF[spec.datatype]).itemsize]
            self._row_kernel = device.kernel(name, cubin_for)
        self._block: DeviceBlock | None = None
        self._image: DeviceBlock | None = None
        self._row_room = 0
        self._thumbnail, self._pinned = zeros_pinned(device, _THUMBNAIL_SHAPE, np.uint8)
        self._thumbnail_at = self._pinned.address
        self._shape: tuple[object, ...] = ()
        self._plan: _Plan | None = None
        self._made = Made((), self._thumbnail)

    def __repr__(self) -> str:
        return f"<DevicePreparer on {self._device.name}>"

    def prepare(
        self, picture: DevicePicture, *, row: RowTarget | None, image: npt.NDArray[np.uint8] | None = None
    ) -> Made:
        """Returns when all of it is there: the row, the picture as upright RGB where image is given, the thumbnail.

        Of a thread that the device is bound to.
        image: (H, W, 3), C order, in host memory. The thumbnail is valid until the next call. Raises GpuFailed, and
        ValueError where a target has not the row's or the picture's size.
        """
        device, stream = self._device, picture.stream
        plan = self._plan_of(picture)
        kernels.ADDRESSES.pack_into(plan.picture, 0, picture.luma, picture.chroma)
        if row is None:
            device.launch(self._thumbnail_kernel, plan.thumbnail_grid, _BLOCK, plan.thumbnail_arguments[0], stream)
        else:
            self._make_row(plan, row, stream)
        device.copy(self._thumbnail_at, self._block_at + _VALUES_ROOM, _THUMBNAIL_BYTES, stream)
        if image is not None:
            self._paint(plan, image, stream)
        device.wait(stream)
        return self._made

    def close(self) -> None:
        """Of the thread that uses it. A second call does nothing."""
        self._device.bind()
        self._pinned.close()
        self._plan, self._shape = None, ()
        for block in (self._block, self._image):
            if block is not None:
                block.close()
        self._block = self._image = None

    def _make_row(self, plan: _Plan, row: RowTarget, stream: int) -> None:
        """With the thumbnail."""
        if self._row_kernel is None:
            raise ValueError("a row is wanted of a preparer that was made without a network")
        if isinstance(row, int):
            kernels.ADDRESS.pack_into(plan.row, kernels.ROW_OUT_AT, row)
            self._device.launch(self._row_kernel, plan.row_grid, _BLOCK, plan.row_arguments[0], stream)
            return
        if row.nbytes != plan.row_bytes or not row.flags.c_contiguous:
            raise ValueError(f"the row has {plan.row_bytes} bytes, C order; its place is {row.nbytes} bytes")
        scratch = self._block_at + _VALUES_ROOM + _THUMBNAIL_ROOM
        kernels.ADDRESS.pack_into(plan.row, kernels.ROW_OUT_AT, scratch)
        self._device.launch(self._row_kernel, plan.row_grid, _BLOCK, plan.row_arguments[0], stream)
        self._device.copy(row.ctypes.data, scratch, plan.row_bytes, stream)

    def _paint(self, plan: _Plan, image: npt.NDArray[np.uint8], stream: int) -> None:
        if image.shape != plan.image_shape or not image.flags.c_contiguous:
            raise ValueError(f"the picture is {plan.image_shape} uint8, C order, not {image.shape}")
        if self._image is None or self._image.size_bytes < image.nbytes:
            if self._image is not None:
                self._image.close()
            self._image = None
            self._image = self._device.allocate(image.nbytes)
        kernels.ADDRESS.pack_into(plan.whole, 0, self._image.address)
        self._device.launch(self._paint_kernel, plan.whole_grid, _BLOCK, plan.whole_arguments[0], stream)
        self._device.copy(image.ctypes.data, self._image.address, image.nbytes, stream)

    def _plan_of(self, picture: DevicePicture) -> _Plan:
        """The same one for as long as the pictures keep their shape and colours."""
        shape: tuple[object, ...] = (
            *(picture.width, picture.height, picture.pitch),
            *(picture.orientation, picture.matrix, picture.is_full_range, picture.source_size),
        )
        if self._plan is not None and shape == self._shape:
            return self._plan
        self._plan = None
        plan = _Plan(picture, self._spec)
        self._take_room(plan.row_bytes, picture.stream)
        kernels.ADDRESS.pack_into(plan.thumbnail, 0, self._block_at + _VALUES_ROOM)
        kernels.ADDRESS.pack_into(plan.row, kernels.ROW_VALUES_AT, self._block_at)
        self._plan, self._shape = plan, shape
        self._made = Made(plan.row_shape, self._thumbnail)
        return plan

    def _take_room(self, row_bytes: int, stream: int) -> None:
        if self._block is not None and row_bytes <= self._row_room:
            return
        if self._block is not None:
            self._block.close()
        self._block = None
        self._block = self._device.allocate(_VALUES_ROOM + _THUMBNAIL_ROOM + row_bytes)
        self._block_at, self._row_room = self._block.address, row_bytes
        if self._spec is not None:
            values = np.ascontiguousarray(values_of(self._spec))
            self._device.copy(self._block_at, values.ctypes.data, values.nbytes, stream)
            self._device.wait(stream)


def _row_arguments(part: CropRegion, spec: PrepareSpec) -> tuple[int | float, ...]:
    """ROW's, but for its addresses."""
    width, height, channels = part.network_width, part.network_height, spec.color.channels
    steps = (width * height, width, 1) if spec.layout is InputOrder.NCHW else (1, width * channels, channels)
    return (
        *(0, 0, *steps),
        1.0 / (part.resized_width / part.width),  # as OpenCV computes it
        1.0 / (part.resized_height / part.height),
        *(width, height, part.left, part.top, part.width, part.height),
        *(part.resized_width, part.resized_height, part.pad_x, part.pad_y),
        spec.filter is ScalingFilter.NEAREST,
        spec.color is ColorFormat.BGR,
        spec.color is ColorFormat.GRAY,
        int(spec.pad_value),
    )


def _packed(words: Any, *values: int | float) -> ctypes.Array[ctypes.c_char]:
    room = ctypes.create_string_buffer(words.size)
    words.pack_into(room, 0, *values)
    return room


def _addresses(*arguments: ctypes.Array[ctypes.c_char]) -> tuple[int, Any]:
    """(address of the arguments' addresses, what must live as long)."""
    array = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    return ctypes.addressof(array), (array, arguments)


def _grid(width: int, height: int) -> Grid:
    return (-(-width // _BLOCK[0]), -(-height // _BLOCK[1]), 1)
