"""Maps of a picture: semantic segmentation and depth."""

import time
import tracemalloc

import cv2
import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed, TooLarge
from penstock.protocol.vision_results import DepthMap, SegmentationMap
from penstock.vision.layouts.class_map import _contenders
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import ResizeMode
from tests.vision.layouts.decoding import FITS, Array, decoded, fitted, mask_iou, whole

PICTURES = [((640, 480), (256, 256)), ((300, 500), (192, 128)), ((97, 41), (160, 96)), ((1, 70), (64, 64))]


def plainly_enlarged(plane: Array, geometry: Geometry) -> Array:
    """The map at the centre of each pixel of the picture, from its four neighbours, in float64."""

    def neighbours(count: int, scale: float, pad: int, step: float, size: int) -> tuple[Array, Array, Array]:
        place = np.clip(((np.arange(count) + 0.5) * scale + pad) * step - 0.5, 0, size - 1)
        low = np.floor(place).astype(int)
        return low, np.minimum(low + 1, size - 1), place - low

    height, width = plane.shape
    left, right, across = neighbours(
        geometry.source_width, geometry.scale_x, geometry.pad_x, width / geometry.network_width, width
    )
    top, bottom, down = neighbours(
        geometry.source_height, geometry.scale_y, geometry.pad_y, height / geometry.network_height, height
    )
    wide = plane.astype(np.float64)
    upper = wide[top][:, left] * (1 - across) + wide[top][:, right] * across
    lower = wide[bottom][:, left] * (1 - across) + wide[bottom][:, right] * across
    enlarged: Array = upper * (1 - down[:, np.newaxis]) + lower * down[:, np.newaxis]
    return enlarged


def blobs(classes: int, height: int, width: int, seed: int = 0) -> Array:
    """(classes, height, width) float32: smooth logits, so that classes have regions of many pixels."""
    noise = np.random.default_rng(seed).normal(size=(classes, height, width)).astype(np.float32)
    return np.stack([cv2.GaussianBlur(plane, (0, 0), 3) * 20 for plane in noise])


def labels_of(result: SegmentationMap) -> Array:
    """(height, width): the class of each pixel, -1 for none."""
    labels = np.full((result.height, result.width), -1)
    for class_id, mask in zip(result.class_id.tolist(), result.masks, strict=True):
        bits = whole(mask)
        assert bits.any()
        assert (labels[bits] == -1).all(), "a pixel has two classes"
        labels[bits] = class_id
    return labels


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(("source", "network"), PICTURES)
@pytest.mark.parametrize("divisor", [1, 4])
def test_each_pixel_has_the_class_of_the_highest_resampled_logit(
    source: tuple[int, int], network: tuple[int, int], divisor: int, fit: ResizeMode
) -> None:
    """As a plain resampling in float64 has it, but where two classes are equal within float32's precision."""
    geometry = fitted(source, network, fit)
    logits = blobs(7, network[1] // divisor, network[0] // divisor)
    labels = labels_of(decoded(SegmentationMap, "semantic", (logits,), geometry))
    plain = np.stack([plainly_enlarged(plane, geometry) for plane in logits])
    found = np.take_along_axis(plain, labels[np.newaxis], axis=0)[0]
    assert labels.min() >= 0
    assert (found >= plain.max(axis=0) - 1e-3).all()


@pytest.mark.parametrize("classes", [5, 300])
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("source", [(640, 480), (90, 60), (1200, 1000), (3, 400)])
def test_pixels_of_large_regions_have_the_class_of_the_highest_resampled_logit(
    source: tuple[int, int], fit: ResizeMode, classes: int
) -> None:
    """Also where only the pixels at the regions' edges are compared, in pictures of any size, with ids over 255."""
    geometry = fitted(source, (96, 96), fit)
    logits = np.full((classes, 48, 48), -60, np.float32)
    shown = [0, 1, classes // 2, classes - 2, classes - 1]
    noise = np.random.default_rng(1).normal(size=(5, 48, 48)).astype(np.float32)
    logits[shown] = [cv2.GaussianBlur(plane, (0, 0), 7) * 20 for plane in noise]
    best = logits.argmax(axis=0)
    assert (best[1:, 1:] != best[:-1, :-1]).mean() < 0.2
    result = decoded(SegmentationMap, "semantic", (logits,), geometry)
    labels = labels_of(result)
    plain = {class_id: plainly_enlarged(logits[class_id], geometry) for class_id in shown}
    highest = np.maximum.reduce(list(plain.values()))
    assert len(result.class_id) == len(np.unique(labels))
    for class_id in np.unique(labels).tolist():
        is_own = labels == class_id
        assert (plain[class_id][is_own] >= highest[is_own] - 1e-3).all()


def test_class_that_is_the_best_only_between_the_maps_values_has_its_pixels() -> None:
    """Of four neighbours each has another best class; the second best of all is the best in their middle."""
    logits = np.zeros((6, 24, 24), np.float32)
    logits[0] = 1.0
    for class_id, (row, column) in enumerate([(11, 11), (11, 12), (12, 11), (12, 12)], 1):
        logits[class_id, row, column] = 3.0
    logits[5, 11:13, 11:13] = 2.0
    geometry = fitted((960, 960), (24, 24))
    labels = labels_of(decoded(SegmentationMap, "semantic", (logits,), geometry))
    plain = np.stack([plainly_enlarged(plane, geometry) for plane in logits])
    assert (plain.max(axis=0) - np.take_along_axis(plain, labels[np.newaxis], axis=0)[0] < 1e-4).all()
    assert labels[480, 480] == 5


def test_equal_logits_have_the_lowest_class() -> None:
    """In a region, and in a cell at its edge."""
    logits = np.zeros((6, 32, 32), np.float32)
    logits[[2, 4], :, :16], logits[[1, 3], :, 16:] = 1.0, 1.0
    labels = labels_of(decoded(SegmentationMap, "semantic", (logits,), fitted((320, 320), (32, 32))))
    assert np.unique(labels[:, :150]).tolist() == [2]
    assert np.unique(labels[:, 170:]).tolist() == [1]
    assert set(np.unique(labels).tolist()) == {1, 2}


@pytest.mark.parametrize("fit", FITS)
def test_classes_agree_with_a_resize_to_the_network_a_cut_and_a_resize_to_the_photo(fit: ResizeMode) -> None:
    """The usual two steps of the exporters' examples: each region's overlap is 0.98 or more."""
    geometry = fitted((1280, 720), (512, 512), fit)
    logits = blobs(5, 128, 128)
    width, height = round(1280 * geometry.scale_x), round(720 * geometry.scale_y)
    rows = slice(geometry.pad_y, geometry.pad_y + height)
    columns = slice(geometry.pad_x, geometry.pad_x + width)
    steps = [cv2.resize(cv2.resize(plane, (512, 512))[rows, columns], (1280, 720)) for plane in logits]
    labels = labels_of(decoded(SegmentationMap, "semantic", (logits,), geometry))
    wanted = np.stack(steps).argmax(axis=0)
    assert {class_id for class_id in range(5) if mask_iou(labels == class_id, wanted == class_id) >= 0.98} == set(
        range(5)
    )


@pytest.mark.parametrize("network", [(64, 64), (96, 48)])
def test_classes_last_are_the_same_map(network: tuple[int, int]) -> None:
    """[h, w, classes], with a batch axis or without, is found by the network's proportions."""
    geometry = fitted((200, 150), network)
    logits = blobs(21, network[1] // 2, network[0] // 2)
    wanted = labels_of(decoded(SegmentationMap, "semantic", (logits,), geometry))
    last = np.ascontiguousarray(logits.transpose(1, 2, 0))
    assert (labels_of(decoded(SegmentationMap, "semantic", (last,), geometry)) == wanted).all()
    batch = np.stack([np.zeros_like(last), last])
    assert (labels_of(decoded(SegmentationMap, "semantic", (batch,), geometry, 1)) == wanted).all()


def test_batch_of_maps_without_class_axis_gives_each_picture_its_own() -> None:
    """[batch, h, w] is not read as classes."""
    geometry = fitted((40, 40), (20, 20))
    maps = np.zeros((3, 20, 20), np.int32)
    maps[1], maps[2, :10] = 4, 2
    for row, classes in enumerate([[0], [4], [0, 2]]):
        assert decoded(SegmentationMap, "semantic", (maps,), geometry, row).class_id.tolist() == classes
    levels = np.zeros((2, 20, 20), np.float32)
    levels[1] = 0.9
    assert len(decoded(SegmentationMap, "semantic", (levels,), geometry, 0).masks) == 0
    assert decoded(SegmentationMap, "semantic", (levels,), geometry, 1).masks[0].area == 1600


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("threshold", [0.5, 0.3])
def test_independent_classes_have_their_own_pixels(fit: ResizeMode, threshold: float, *, is_last: bool) -> None:
    """Probabilities are resampled and compared with the threshold, class by class; a pixel can have several or none."""
    geometry = fitted((320, 180), (96, 96), fit)
    probabilities = 1 / (1 + np.exp(-blobs(4, 48, 48)))
    array = np.ascontiguousarray(probabilities.transpose(1, 2, 0)) if is_last else probabilities
    result = decoded(SegmentationMap, "semantic-multilabel", (array,), geometry, segmentation_threshold=threshold)
    found = np.zeros((4, 180, 320), np.bool_)
    for class_id, mask in zip(result.class_id.tolist(), result.masks, strict=True):
        found[class_id] = whole(mask)
    plain = np.stack([plainly_enlarged(plane, geometry) for plane in probabilities])
    is_sure = np.abs(plain - threshold) > 1e-3
    assert (found == (plain > threshold))[is_sure].all()
    assert {0, 1, 2} <= set(np.unique(found.sum(axis=0)).tolist())


def test_independent_logits_are_compared_at_the_thresholds_logit() -> None:
    """A pixel at 0 is at a probability of 0.5, with apply-sigmoid; one class is one mask."""
    logits = np.full((2, 8, 8), -0.1, np.float32)
    logits[0, 2:4, 2:6] = 0.1
    geometry = fitted((8, 8), (8, 8))
    result = decoded(SegmentationMap, "semantic-multilabel", (logits,), geometry, has_sigmoid=True)
    assert result.class_id.tolist() == [0]
    assert (whole(result.masks[0]) == (logits[0] > 0)).all()
    single = decoded(SegmentationMap, "semantic-multilabel", (logits[:1],), geometry, has_sigmoid=True)
    assert (whole(single.masks[0]) == (logits[0] > 0)).all()


@pytest.mark.parametrize("datatype", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("shape", [(24, 32), (1, 24, 32), (24, 32, 1), (1, 1, 24, 32)])
def test_integer_map_is_the_argmax_already(shape: tuple[int, ...], datatype: type) -> None:
    """Each pixel of the picture has the class of the network's pixel that it lies in; ids over 255 are possible."""
    geometry = fitted((128, 64), (64, 48))
    classes = np.random.default_rng(1).integers(0, 200, (24, 32)).astype(datatype)
    if datatype is not np.uint8:
        classes[0, 0], classes[12, 3] = 300, 65535
    labels = labels_of(decoded(SegmentationMap, "semantic", (classes.reshape(shape),), geometry))
    rows, columns = np.arange(64) // 4 + 4, np.arange(128) // 4
    assert (labels == classes.astype(int)[rows][:, columns]).all()


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("threshold", [0.5, 0.2])
def test_one_class_has_the_pixels_over_the_threshold(threshold: float, fit: ResizeMode) -> None:
    """Probabilities, or logits with apply-sigmoid; the disc has the area that it was drawn with."""
    geometry = fitted((400, 300), (128, 128), fit)
    y, x = np.mgrid[:64, :64] + 0.5
    logits = ((20 - np.hypot(x - 32, y - 32)) / 4).astype(np.float32)[np.newaxis]
    sigmoid = (1 / (1 + np.exp(-logits))).astype(np.float32)
    wanted = plainly_enlarged(sigmoid[0], geometry) > threshold
    (mask,) = decoded(SegmentationMap, "semantic", (sigmoid,), geometry, segmentation_threshold=threshold).masks
    assert mask_iou(whole(mask), wanted) >= 0.998
    by_logit = decoded(
        SegmentationMap, "semantic", (logits,), geometry, segmentation_threshold=threshold, has_sigmoid=True
    )
    assert mask_iou(whole(by_logit.masks[0]), wanted) >= 0.98


def test_independent_classes_may_overlap_and_absent_ones_are_left_out() -> None:
    """With apply-sigmoid every class has its own pixels."""
    logits = np.full((4, 32, 32), -5, np.float32)
    logits[1, :, :20], logits[3, :, 10:] = 5, 5
    result = decoded(SegmentationMap, "semantic", (logits,), fitted((32, 32), (32, 32)), has_sigmoid=True)
    assert result.class_id.tolist() == [1, 3]
    assert [mask.area for mask in result.masks] == [32 * 20, 32 * 22]
    assert np.count_nonzero(whole(result.masks[0]) & whole(result.masks[1])) == 32 * 10


def test_class_ids_and_wanted_classes_of_the_card_apply() -> None:
    """The map has the card's class ids, in rising order, and only those that the client wants."""
    classes = np.array([[0, 1], [2, 2]], np.int64)
    geometry = fitted((2, 2), (2, 2))
    result = decoded(SegmentationMap, "semantic", (classes,), geometry, class_ids=(9, 7, 8))
    assert (result.class_id.tolist(), [mask.area for mask in result.masks]) == ([7, 8, 9], [1, 2, 1])
    chosen = decoded(
        SegmentationMap, "semantic", (classes,), geometry, class_ids=(9, 7, 8), class_filter=frozenset({9, 55})
    )
    assert (chosen.class_id.tolist(), [(mask.left, mask.top, mask.area) for mask in chosen.masks]) == ([9], [(0, 0, 1)])


def test_equal_logits_are_the_lowest_class() -> None:
    """As argmax."""
    result = decoded(SegmentationMap, "semantic", (np.ones((5, 8, 8), np.float32),), fitted((99, 77), (16, 16)))
    assert (result.class_id.tolist(), result.masks[0].area) == ([0], 99 * 77)


def test_skipped_classes_could_not_have_been_the_best() -> None:
    """Random planes, at random places between their pixels: a class that is left out of a row is never the best."""
    generator = np.random.default_rng(3)
    for _ in range(20):
        planes = generator.normal(size=(9, 6, 5)).astype(np.float32) * generator.uniform(0.1, 3, (9, 1, 1)).astype(
            np.float32
        )
        is_contender = _contenders(planes, 1000)
        geometry = fitted((500, 600), (5, 6), ResizeMode.STRETCH)
        best = np.stack([plainly_enlarged(plane, geometry) for plane in planes]).argmax(axis=0)
        row = np.clip(((np.arange(600) + 0.5) / 100 - 0.5).astype(int), 0, 5)
        assert is_contender[best, row[:, np.newaxis]].all()


@pytest.mark.parametrize("source", [(100_000, 3), (3, 100_000)])
def test_classes_of_a_thin_picture_need_little_memory(source: tuple[int, int]) -> None:
    """A picture of few kilobytes and one very long side: a step between needs no more than the result."""
    classes = np.random.default_rng(0).integers(0, 3, (512, 512))
    tracemalloc.start()
    result = decoded(SegmentationMap, "semantic", (classes,), fitted(source, (512, 512), ResizeMode.STRETCH))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    long, short = (np.floor((np.arange(count) + 0.5) * 512 / count).astype(int) for count in (100_000, 3))
    wanted = classes[np.ix_(short, long) if source[0] > source[1] else np.ix_(long, short)]
    assert (labels_of(result) == wanted).all()
    assert peak_bytes < 10 << 20


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.zeros((3, 0, 4), np.float32), "shape"),
        (np.zeros((3, 8, 90), np.float32), "8, 90"),
        (np.full((3, 8, 8), np.nan, np.float32), "NaN"),
        (np.full((8, 8), -1, np.int32), "class -1"),
        (np.full((8, 8), 70_000, np.int32), "class 70000"),
        (np.zeros((2, 8, 8), np.int32), "[1, h, w] or [h, w]"),
        (np.zeros((0, 8), np.int64), "[1, h, w] or [h, w]"),
    ],
)
def test_map_of_another_form_is_refused_with_a_sentence(array: Array, what: str) -> None:
    """It names the output and what was expected."""
    with pytest.raises(EngineFailed) as failed:
        decoded(SegmentationMap, "semantic", (array,), fitted((20, 20), (16, 16)))
    assert "output 'a'" in str(failed.value)
    assert what in str(failed.value)


@pytest.mark.parametrize("has_sigmoid", [False, True])
def test_huge_logits_are_no_overflow(*, has_sigmoid: bool) -> None:
    """Their differences are beyond float32."""
    logits = np.full((3, 8, 8), -3e38, np.float32)
    logits[1, :, :4], logits[2, :, 4:] = 3e38, 3e38
    result = decoded(SegmentationMap, "semantic", (logits,), fitted((16, 16), (8, 8)), has_sigmoid=has_sigmoid)
    assert (result.class_id.tolist(), [mask.area for mask in result.masks]) == ([1, 2], [128, 128])


def test_large_photo_with_many_classes_takes_bounded_memory_and_time() -> None:
    """150 classes on 12 million pixels: a plain argmax would need 7 GB."""
    logits = blobs(150, 64, 64)
    geometry = fitted((4000, 3000), (256, 256))
    tracemalloc.start()
    began = time.process_time()
    result = decoded(SegmentationMap, "semantic", (logits,), geometry)
    passed_s, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    areas = sum(mask.area for mask in result.masks)
    _, peak_of_masks = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert areas == 12_000_000
    assert max(peak, peak_of_masks) < 64 << 20
    assert passed_s < 20


# depth ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("shape", [(48, 64), (1, 48, 64), (1, 1, 48, 64), (48, 64, 1)])
def test_depth_is_enlarged_to_the_photo_and_scaled(shape: tuple[int, ...], fit: ResizeMode) -> None:
    """Bilinear, as a plain resampling in float64."""
    depth = blobs(1, 48, 64)[0]
    geometry = fitted((333, 222), (128, 96), fit)
    result = decoded(DepthMap, "depth", (depth.reshape(shape),), geometry, depth_scale=2.5)
    assert (result.values.shape, result.values.dtype) == ((222, 333), np.float32)
    assert np.abs(result.values - 2.5 * plainly_enlarged(depth, geometry)).max() < 1e-3


def test_depth_of_a_batch_is_each_pictures_own() -> None:
    """[batch, h, w] and [batch, 1, h, w]."""
    batch = np.arange(3, dtype=np.float32)[:, np.newaxis, np.newaxis] * np.ones((3, 8, 8), np.float32)
    for array in (batch, batch[:, np.newaxis]):
        for row in range(3):
            assert (decoded(DepthMap, "depth", (array,), fitted((9, 9), (8, 8)), row).values == row).all()


def test_depth_of_any_size_is_finite() -> None:
    """Huge values are clipped; NaN and other shapes are refused with a sentence."""
    geometry = fitted((30, 20), (8, 8))
    wild = np.array([[3e38, -3e38], [-3e38, 3e38]], np.float32)
    assert np.isfinite(decoded(DepthMap, "depth", (wild,), geometry, depth_scale=1e300).values).all()
    for array in (np.full((8, 8), np.inf, np.float32), np.zeros((2, 8, 8), np.float32), np.zeros((0, 8), np.float32)):
        with pytest.raises(EngineFailed, match="output 'a'"):
            decoded(DepthMap, "depth", (array,), geometry)


def test_many_independent_classes_of_a_large_picture_are_refused_at_once() -> None:
    """A thousand maps of 40 million pixels would take a minute."""
    geometry = fitted((8000, 5000), (64, 64), FITS[0])
    started = time.process_time()
    with pytest.raises(TooLarge, match="1000 classes over the threshold, each for 8000x5000 pixels"):
        decoded(SegmentationMap, "semantic", (np.ones((1000, 8, 8), np.float32),), geometry, has_sigmoid=True)
    assert time.process_time() - started < 5


def test_noise_of_many_classes_on_a_large_picture_takes_seconds() -> None:
    """All 300 classes compete for each of 40 million pixels, which would take half a minute."""
    geometry = fitted((8000, 5000), (64, 64), FITS[0])
    noise = np.random.default_rng(0).uniform(size=(300, 8, 8)).astype(np.float32)
    started = time.process_time()
    result = decoded(SegmentationMap, "semantic", (noise,), geometry)
    assert time.process_time() - started < 10
    assert set(result.class_id.tolist()) == set(noise.argmax(axis=0).ravel().tolist())
