"""The network's input equals the plain formula, and boxes find their way back."""

from dataclasses import replace

import cv2
import numpy as np
import numpy.typing as npt
import onnx.parser
import onnxruntime
import pytest

from penstock.protocol.inference import Datatype
from penstock.vision.decode import DecodedImage
from penstock.vision.preprocess import Geometry, least_decoded_size, prepare
from penstock.vision.spec import ColorFormat, InputOrder, PrepareSpec, ResizeMode, ScalingFilter
from tests.vision import images

IMAGENET = PrepareSpec(
    width=32,
    height=24,
    scale=1 / 255,
    offsets=(123.675, 116.28, 103.53),
    channel_factors=(1 / 0.229, 1 / 0.224, 1 / 0.225),
)


def source(width: int, height: int, color: ColorFormat = ColorFormat.RGB) -> DecodedImage:
    picture = images.picture(width, height)
    pixels = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY) if color is ColorFormat.GRAY else picture
    return DecodedImage(pixels, width, height)


def plain(resized: images.Image, spec: PrepareSpec) -> npt.NDArray[np.float64]:
    """scale * (x - offset) * factor, written out."""
    pixels = resized.reshape(*resized.shape[:2], -1).astype(np.float64)
    channels = pixels.shape[2]
    values = spec.scale * (pixels - np.array(spec.offsets[:channels])) * np.array(spec.channel_factors[:channels])
    return values.transpose(2, 0, 1) if spec.layout is InputOrder.NCHW else values


@pytest.mark.parametrize("layout", InputOrder)
@pytest.mark.parametrize("color", ColorFormat)
@pytest.mark.parametrize(("datatype", "tolerance"), [(Datatype.FP32, 1e-6), (Datatype.FP16, 1e-3)])
@pytest.mark.parametrize("size", [(32, 24), (1, 1), (1, 9), (9, 1)])
def test_prepare_equals_the_plain_formula(
    layout: InputOrder, color: ColorFormat, datatype: Datatype, tolerance: float, size: tuple[int, int]
) -> None:
    """In every layout, colour order, type and odd size, to the type's precision."""
    width, height = size
    spec = replace(IMAGENET, layout=layout, color=color, datatype=datatype, width=width, height=height)
    decoded = source(width, height, color)
    array, _ = prepare(decoded, spec)
    expected = plain(decoded.pixels, spec)
    assert array.dtype == (np.float32 if datatype is Datatype.FP32 else np.float16)
    assert array.shape == expected.shape
    np.testing.assert_allclose(array, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", InputOrder)
@pytest.mark.parametrize("color", ColorFormat)
def test_prepare_of_uint8_leaves_the_pixels_alone(layout: InputOrder, color: ColorFormat) -> None:
    """A UINT8 input takes pixel values; only the layout changes."""
    spec = PrepareSpec(width=32, height=24, layout=layout, color=color, datatype=Datatype.UINT8)
    decoded = source(32, 24, color)
    array, _ = prepare(decoded, spec)
    assert array.dtype == np.uint8
    assert np.array_equal(array, plain(decoded.pixels, spec))


@pytest.mark.parametrize(
    ("scaling_filter", "interpolation"),
    [
        (ScalingFilter.NEAREST, cv2.INTER_NEAREST),
        (ScalingFilter.BILINEAR, cv2.INTER_LINEAR),
        (ScalingFilter.AREA, cv2.INTER_AREA),
        (ScalingFilter.CUBIC, cv2.INTER_CUBIC),
    ],
)
def test_prepare_stretches_with_the_named_filter(scaling_filter: ScalingFilter, interpolation: int) -> None:
    """The filter's name is OpenCV's filter, bit by bit."""
    decoded = source(100, 60)
    array, geometry = prepare(decoded, replace(IMAGENET, filter=scaling_filter))
    expected = plain(cv2.resize(decoded.pixels, (32, 24), interpolation=interpolation), IMAGENET)
    np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-6)
    assert (geometry.scale_x, geometry.scale_y) == (0.32, 0.4)


@pytest.mark.parametrize(
    ("size", "fit", "inner", "pad"),
    [
        ((64, 24), ResizeMode.PAD_RIGHT_BOTTOM, (32, 12), (0, 0)),
        ((64, 24), ResizeMode.PAD_SYMMETRIC, (32, 12), (0, 6)),
        ((10, 40), ResizeMode.PAD_RIGHT_BOTTOM, (6, 24), (0, 0)),
        ((10, 40), ResizeMode.PAD_SYMMETRIC, (6, 24), (13, 0)),
        ((3000, 1), ResizeMode.PAD_SYMMETRIC, (32, 1), (0, 11)),
        ((16, 12), ResizeMode.PAD_SYMMETRIC, (32, 24), (0, 0)),
    ],
)
def test_prepare_with_kept_aspect_pads_with_black(
    size: tuple[int, int], fit: ResizeMode, inner: tuple[int, int], pad: tuple[int, int]
) -> None:
    """The image lies where the geometry says; everything else is a black pixel, normalised as every pixel."""
    decoded = source(*size)
    array, geometry = prepare(decoded, replace(IMAGENET, fit=fit))
    canvas = np.zeros((24, 32, 3), np.uint8)
    resized = cv2.resize(decoded.pixels, inner, interpolation=cv2.INTER_LINEAR)
    canvas[pad[1] : pad[1] + inner[1], pad[0] : pad[0] + inner[0]] = resized
    np.testing.assert_allclose(array, plain(canvas, IMAGENET), rtol=1e-6, atol=1e-6)
    assert (geometry.pad_x, geometry.pad_y) == pad
    corners = np.array([[pad[0], pad[1], pad[0] + inner[0], pad[1] + inner[1]]], np.float32)
    np.testing.assert_allclose(geometry.to_source(corners), [[0, 0, *size]], atol=1e-3)


@pytest.mark.parametrize(
    ("size", "resized", "corner"),
    [
        ((100, 60), (60, 36), (14, 6)),
        ((60, 100), (36, 60), (2, 18)),
        ((37, 36), (37, 36), (2, 6)),
        ((8, 9), (36, 40), (2, 8)),
        ((1, 1), (36, 36), (2, 6)),
    ],
)
@pytest.mark.parametrize("layout", InputOrder)
@pytest.mark.parametrize("color", ColorFormat)
def test_prepare_with_a_crop_cuts_the_middle_of_the_resized_image(
    size: tuple[int, int], resized: tuple[int, int], corner: tuple[int, int], layout: InputOrder, color: ColorFormat
) -> None:
    """The whole image is resized by its shorter side, then cut; the geometry says where the cut is in the source."""
    spec = replace(IMAGENET, fit=ResizeMode.CROP, shorter_side=36, layout=layout, color=color)
    decoded = source(*size, color)
    array, geometry = prepare(decoded, spec)
    whole = cv2.resize(decoded.pixels, resized, interpolation=cv2.INTER_LINEAR)
    cut = whole[corner[1] : corner[1] + 24, corner[0] : corner[0] + 32]
    np.testing.assert_allclose(array, plain(cut, spec), rtol=1e-6, atol=1e-6)
    seen = np.array([[0, 0, 32, 24]], np.float32)
    scale = np.array([resized[0] / size[0], resized[1] / size[1]] * 2)
    where = np.array([corner[0], corner[1], corner[0] + 32, corner[1] + 24]) / scale
    np.testing.assert_allclose(geometry.to_source(seen), [where], rtol=1e-5)


def test_prepare_with_a_crop_of_a_very_long_image_resizes_its_middle_only() -> None:
    """A row of 40,000 pixels does not become a gigabyte; what is seen of it is its middle, as large as ever."""
    spec = replace(IMAGENET, fit=ResizeMode.CROP, shorter_side=36)
    row = np.zeros((1, 40_000, 3), np.uint8)
    row[:, 20_000:] = 255
    long, _ = prepare(DecodedImage(row, 40_000, 1), spec)
    short, _ = prepare(DecodedImage(np.ascontiguousarray(row[:, 19_997:20_003]), 6, 1), spec)
    np.testing.assert_array_equal(long, short)
    column, _ = prepare(DecodedImage(np.ascontiguousarray(row.transpose(1, 0, 2)), 1, 40_000), replace(spec, width=24))
    np.testing.assert_allclose(column[:, :, 0], long[:, 0, 4:28], atol=0.02)  # a grey level, rounded elsewhere


def test_prepare_with_a_crop_agrees_with_the_preprocessing_that_resnet50_publishes() -> None:
    """The README of onnx/models' ResNet gives its preprocessing as ONNX operators; area is our filter nearest to it."""
    spec = PrepareSpec(
        224, 224, fit=ResizeMode.CROP, shorter_side=256, filter=ScalingFilter.AREA, scale=1 / 255,
        offsets=IMAGENET.offsets, channel_factors=IMAGENET.channel_factors,
    )  # fmt: skip
    decoded = source(768, 576)
    expected = published_resnet_preprocessing(decoded.pixels)
    area, _ = prepare(decoded, spec)
    bilinear, _ = prepare(decoded, replace(spec, filter=ScalingFilter.BILINEAR))
    assert np.abs(area - expected).mean() < np.abs(bilinear - expected).mean() < 0.02


def published_resnet_preprocessing(pixels: images.Image) -> npt.NDArray[np.float32]:
    """Resize by the shorter side, linear with antialiasing, centre crop, mean, deviation: (3, 224, 224)."""
    graph = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        preprocess (uint8[height, width, 3] image) => (float[3, 224, 224] prepared)
        <int64[2] target = {256, 256}, int64[2] crop = {224, 224}, float[3] mean = {123.675, 116.28, 103.53},
         float[3] deviation = {58.395, 57.12, 57.375}>
        {
            resized = Resize <mode = "linear", antialias = 1, axes = [0, 1], keep_aspect_ratio_policy = "not_smaller">
                (image, , , target)
            cut = CenterCropPad <axes = [0, 1]> (resized, crop)
            values = Cast <to = 1> (cut)
            centred = Sub (values, mean)
            normalised = Div (centred, deviation)
            prepared = Transpose <perm = [2, 0, 1]> (normalised)
        }
    """)
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    (prepared,) = session.run(None, {"image": pixels})
    return np.asarray(prepared)


@pytest.mark.parametrize(
    ("size", "max_side", "expected"),
    [((100, 60), 0, (100, 60)), ((100, 60), 100, (100, 60)), ((100, 60), 50, (50, 30)), ((999, 1), 10, (10, 1))],
)
def test_prepare_at_own_size_shrinks_only_over_the_longest_side(
    size: tuple[int, int], max_side: int, expected: tuple[int, int]
) -> None:
    """Networks of variable size see the image as it is, or shrunk with its aspect kept."""
    spec = PrepareSpec(
        width=0, height=0, fit=ResizeMode.KEEP, layout=InputOrder.NHWC, datatype=Datatype.UINT8, max_side=max_side
    )
    decoded = source(*size)
    array, geometry = prepare(decoded, spec)
    assert array.shape == (expected[1], expected[0], 3)
    assert (geometry.network_width, geometry.network_height) == expected
    if expected == size:
        assert np.array_equal(array, decoded.pixels)


def test_prepare_of_a_scaled_decode_keeps_the_source_geometry() -> None:
    """Boxes refer to the whole image, whatever fraction of it was decoded."""
    decoded = DecodedImage(images.picture(80, 60), 640, 480)
    _, geometry = prepare(decoded, IMAGENET)
    assert (geometry.scale_x, geometry.scale_y) == (32 / 640, 24 / 480)


def test_prepare_writes_into_the_array_that_it_is_given() -> None:
    """allocate() decides where the result lies: a decoder process puts it into shared memory."""
    given: list[npt.NDArray[np.float32]] = []

    def allocate(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.float32]:
        given.append(np.zeros(shape, dtype))
        return given[0]

    array, _ = prepare(source(100, 60), IMAGENET, allocate)
    assert array is given[0]
    assert np.array_equal(array, prepare(source(100, 60), IMAGENET)[0])


def test_geometry_clips_boxes_to_the_source() -> None:
    """No box leaves the image, on any side."""
    geometry = Geometry(200, 100, 50, 50, 0.25, 0.5)
    boxes = np.array([[-10, -10, 60, 60], [10, 10, 20, 20]], np.float32)
    np.testing.assert_allclose(geometry.to_source(boxes), [[0, 0, 200, 100], [40, 20, 80, 40]])
    np.testing.assert_allclose(
        geometry.normalised_to_source(boxes / 50), [[0, 0, 200, 100], [40, 20, 80, 40]], atol=1e-4
    )
    assert geometry.to_source(np.zeros((0, 4), np.float32)).shape == (0, 4)
    assert geometry.to_source(boxes).dtype == np.float32


def test_points_are_scaled_back_and_clipped_to_the_source() -> None:
    """Keypoints follow the boxes' padding and scale, and none leaves the image."""
    geometry = Geometry(200, 100, 50, 50, 0.25, 0.5, pad_x=2, pad_y=-4)
    points = np.array([[[12, 6], [27, 16]], [[-9, -9], [99, 1e38]]], np.float32)
    found = geometry.points_to_source(points)
    np.testing.assert_allclose(found, [[[40, 20], [100, 40]], [[0, 0], [200, 100]]])
    assert found.dtype == np.float32
    assert geometry.points_to_source(np.zeros((0, 5, 2), np.float32)).shape == (0, 5, 2)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (IMAGENET, None),
        (replace(IMAGENET, has_scaled_decode=True), (64, 48)),
        (replace(IMAGENET, has_scaled_decode=True, fit=ResizeMode.CROP, shorter_side=36), (72, 72)),
        (PrepareSpec(0, 0, fit=ResizeMode.KEEP, has_scaled_decode=True), None),
        (PrepareSpec(0, 0, fit=ResizeMode.KEEP, has_scaled_decode=True, max_side=640), (1280, 1280)),
    ],
)
def test_least_decoded_size_is_what_the_network_needs(spec: PrepareSpec, expected: tuple[int, int] | None) -> None:
    """A scaled decode never goes under twice the network's size, and never happens unasked."""
    assert least_decoded_size(spec) == expected


def test_prepare_spec_survives_the_wire() -> None:
    """unpack() is pack()'s inverse, for every field."""
    spec = PrepareSpec(
        width=640,
        height=480,
        color=ColorFormat.GRAY,
        layout=InputOrder.NHWC,
        fit=ResizeMode.PAD_SYMMETRIC,
        filter=ScalingFilter.CUBIC,
        datatype=Datatype.FP16,
        scale=0.1,
        offsets=(1.5, 2.5, 3.5),
        channel_factors=(4.5, 5.5, 6.5),
        max_side=7,
        shorter_side=900,
        has_scaled_decode=True,
    )
    assert PrepareSpec.unpack(spec.pack()) == spec
