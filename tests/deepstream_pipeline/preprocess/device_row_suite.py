"""What rows, pictures and thumbnails made on a card are held to: by the kernels as C++, and by a real card."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.vision.spec import ColorFormat, ResizeMode, ScalingFilter
from penstock_video.decode.codec import thumbnail_of
from penstock_video.gpu.device import Device, zeros_pinned
from penstock_video.preprocess.device_rows import DevicePreparer
from penstock_video.types import Orientation
from tests.deepstream_pipeline.preprocess.device_pictures import (
    BT_601,
    BT_709,
    LEVELS,
    MATRICES,
    NETWORK,
    ORIENTATIONS,
    difference,
    fitted,
    made_of,
    made_row,
    noise,
    on_card,
    smooth,
    specs,
)

# The pictures' sides are longer than the network's, turned as well: all of them are made smaller.
SMALLER = [(640, 360), (322, 182), (501, 376), (1600, 200), (320, 256), (160, 300)]
ENLARGED_LARGEST, ENLARGED_MEAN = 1.0, 0.05  # levels of 255; the mean of 2 x 2 pixels' was 0.027, of 64 x 36 0.006
ODD_HEIGHT_MEAN = 2.0  # of smooth pictures, for FFmpeg interpolates there; no stream of H.264 or HEVC has one


class DeviceRowSuite:
    """The class that inherits it gives the fixture `device`. smaller: sizes of pictures that are made smaller."""

    smaller = SMALLER

    @pytest.mark.parametrize("orientation", ORIENTATIONS)
    @pytest.mark.parametrize("fit", ResizeMode)
    def test_row_of_a_picture_made_smaller_equals_the_cpus(
        self, device: Device, fit: ResizeMode, orientation: Orientation
    ) -> None:
        """They are bit-identical in every colour order, layout, datatype and filter, in all eight orientations."""
        for seed, size in enumerate(self.smaller):
            stored = noise(*size, seed, orientation=orientation, matrix=BT_709)
            for spec in specs(fit):
                if fit is ResizeMode.CROP and min(size) < spec.shorter_side:
                    continue
                np.testing.assert_array_equal(made_row(device, stored, spec), stored.row(spec), err_msg=str(spec))

    @pytest.mark.parametrize("is_full_range", [False, True])
    @pytest.mark.parametrize("matrix", MATRICES)
    def test_image_has_ffmpegs_colours(self, device: Device, matrix: int, is_full_range: bool) -> None:
        """To the last bit, of all matrices and both ranges, of noise and smooth pictures, of an odd width as well."""
        for stored in (noise(640, 360), smooth(322, 182), noise(101, 64)):
            stored = replace(stored, matrix=matrix, is_full_range=is_full_range)
            expected = stored.rgb()
            image = np.zeros(expected.shape, np.uint8)
            made_of(device, stored, None, None, image)
            np.testing.assert_array_equal(image, expected)

    @pytest.mark.parametrize("orientation", ORIENTATIONS)
    def test_image_is_upright(self, device: Device, orientation: Orientation) -> None:
        """It is rotated and mirrored as on the CPU, in all eight orientations."""
        stored = noise(322, 182, matrix=BT_601, orientation=orientation)
        image = np.zeros(stored.rgb().shape, np.uint8)
        made_of(device, stored, None, None, image)
        np.testing.assert_array_equal(image, stored.rgb())

    @pytest.mark.parametrize(
        "fit", [ResizeMode.STRETCH, ResizeMode.PAD_RIGHT_BOTTOM, ResizeMode.PAD_SYMMETRIC, ResizeMode.CROP]
    )
    @pytest.mark.parametrize("size", [(64, 36), (100, 300), (2, 2), (158, 126), (1, 8)])
    def test_row_of_an_enlarged_picture_is_within_one_level(
        self, device: Device, fit: ResizeMode, size: tuple[int, int]
    ) -> None:
        """OpenCV enlarges with another arithmetic: by bilinear one level of 255 at most, by nearest none."""
        for color in (ColorFormat.BGR, ColorFormat.GRAY):
            stored, spec = noise(*size, is_full_range=True), fitted(replace(LEVELS, color=color), fit)
            largest, mean = difference(made_row(device, stored, spec), stored.row(spec))
            assert largest <= ENLARGED_LARGEST, (largest, mean)
            assert mean <= ENLARGED_MEAN, (largest, mean)
            nearest = replace(spec, filter=ScalingFilter.NEAREST)
            np.testing.assert_array_equal(made_row(device, stored, nearest), stored.row(nearest))

    @pytest.mark.parametrize("size", [(640, 361), (323, 181)])
    def test_image_of_an_odd_height_is_near(self, device: Device, size: tuple[int, int]) -> None:
        """Where FFmpeg interpolates the chroma of its lines, a smooth picture's levels differ by two on average."""
        stored = smooth(*size)
        expected = stored.rgb()
        image = np.zeros(expected.shape, np.uint8)
        made_of(device, stored, None, None, image)
        assert difference(image, expected)[1] <= ODD_HEIGHT_MEAN, difference(image, expected)

    @pytest.mark.parametrize("size", [(1280, 720), (1920, 1080), (322, 182), (640, 360), (501, 375), (64, 36)])
    def test_thumbnail_is_the_cpus(self, device: Device, size: tuple[int, int]) -> None:
        """Means of the stored brightness, one level apart at most, whatever else is asked for."""
        stored = noise(*size, orientation=Orientation(is_transposed=True))
        row = np.zeros(NETWORK.row_bytes, np.uint8)
        for spec, target, shape in ((None, None, ()), (NETWORK, row, (3, 128, 160))):
            made = made_of(device, stored, spec, target)
            assert made.row_shape == shape
            assert made.thumbnail.shape == (18, 64)
            assert difference(made.thumbnail, thumbnail_of(stored.luma))[0] <= 1.0

    def test_row_is_written_on_the_card_and_to_pinned_memory(self, device: Device) -> None:
        """The same bytes at an address of the card's, in pinned memory and in plain memory, with a picture beside."""
        stored, expected_image = noise(640, 360), noise(640, 360).rgb()
        expected = stored.row(NETWORK)
        block, stream = device.allocate(expected.nbytes), device.new_stream()
        pinned, pinning = zeros_pinned(device, expected.shape, np.float32)
        image = np.zeros(expected_image.shape, np.uint8)
        assert made_of(device, stored, NETWORK, block.address, image).row_shape == expected.shape
        fetched = np.zeros_like(expected)
        device.copy(fetched.ctypes.data, block.address, fetched.nbytes, stream.handle)
        stream.synchronize()
        made_of(device, stored, NETWORK, pinned)
        for row in (fetched, pinned):
            np.testing.assert_array_equal(row, expected)
        np.testing.assert_array_equal(image, expected_image)
        for part in (pinning, block, stream):
            part.close()

    def test_prepare_goes_on_when_the_picture_changes(self, device: Device) -> None:
        """Another size, another angle, other colours: one preparer makes each as a new one would."""
        spec, stream = fitted(NETWORK, ResizeMode.KEEP), device.new_stream()
        preparer = DevicePreparer(device, spec)
        pictures = [
            noise(640, 360, 1),
            noise(640, 360, 2),
            noise(322, 182, 3, matrix=BT_709),
            noise(140, 120, 4, orientation=Orientation(True, True)),
            noise(640, 360, 5, is_full_range=True),
        ]
        for stored in pictures:
            expected, expected_image = stored.row(spec), stored.rgb()
            row, image = np.zeros_like(expected), np.zeros(expected_image.shape, np.uint8)
            with on_card(device, stored, stream) as picture:
                assert preparer.prepare(picture, row=row, image=image).row_shape == expected.shape
            np.testing.assert_array_equal(row, expected)
            np.testing.assert_array_equal(image, expected_image)
        preparer.close()
        preparer.close()
        stream.close()
