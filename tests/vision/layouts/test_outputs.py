"""What layouts read from a model's outputs: valid rows, class ids, outputs by name, strides; and the mapped classes."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.protocol.errors import EngineFailed
from penstock.vision.layouts.layout import LayoutOptions, Outputs, stride_of
from penstock.vision.preprocess import Geometry
from tests.vision.test_parsers import answer

Array = npt.NDArray[Any]


def outputs(row: int | None = 0, **arrays: Array) -> Outputs:
    return Outputs(answer(**arrays), row)


@pytest.mark.parametrize("ids", [np.array([[3, -1, 7]]), np.array([[3, -1, 7]], np.float32), np.array([3, -1, 7.0])])
def test_class_ids_are_read_from_integers_and_from_whole_floats(ids: Array) -> None:
    """Exporters use both; padding has -1."""
    found = outputs(ids=ids).class_ids("ids")
    assert (found.tolist(), found.dtype) == ([3, -1, 7], np.int64)


@pytest.mark.parametrize("value", [0.5, np.nan, np.inf, 1e38, 3e9])
def test_class_id_that_is_no_whole_number_of_32_bits_is_refused(value: float) -> None:
    """The error names the output and the value."""
    with pytest.raises(EngineFailed, match=r"output 'ids' holds .*; an integer of 32 bits was expected"):
        outputs(ids=np.array([1, value])).class_ids("ids")
    with pytest.raises(EngineFailed, match="output 'ids' holds 3000000000"):
        outputs(ids=np.array([1, 3_000_000_000])).class_ids("ids")


@pytest.mark.parametrize(
    ("count", "row"),
    [
        (np.array(2), None),
        (np.array([2.0], np.float32), 0),
        (np.array([[2]], np.int32), None),
        (np.array([[9], [2]], np.int32), 1),
    ],
)
def test_count_is_read_in_every_usual_shape(count: Array, row: int | None) -> None:
    """A number for each image, with or without axes of 1."""
    assert outputs(row, n=count).count("n") == 2


@pytest.mark.parametrize("count", [-1.0, 1e38, np.nan, 1.5])
def test_count_that_is_no_number_of_rows_is_refused(count: float) -> None:
    """The error names the output."""
    with pytest.raises(EngineFailed, match="output 'n' "):
        outputs(n=np.array([count], np.float32)).count("n")


def test_rows_beyond_the_valid_ones_are_not_read() -> None:
    """Engines leave memory there that was never written."""
    boxes = np.array([[[0, 0, 1, 1], [np.nan, 0, 0, np.inf]]], np.float32)
    assert outputs(boxes=boxes).floats("boxes", 2, first=1).tolist() == [[0, 0, 1, 1]]
    ids = np.array([[4.0, np.nan]], np.float32)
    assert outputs(ids=ids).class_ids("ids", first=1).tolist() == [4]


def test_rows_of_all_images_are_read_whatever_the_image() -> None:
    """Some outputs have one row for each object of all images."""
    rows = np.arange(14, dtype=np.float32).reshape(1, 1, 2, 7)
    assert outputs(5, found=rows).float_rows("found", 7).tolist() == rows[0, 0].tolist()
    with pytest.raises(EngineFailed, match=r"output 'found' has shape \[1, 1, 2, 7\].*\[…, 6\] was expected"):
        outputs(found=rows).float_rows("found", 6)


def test_outputs_are_found_by_their_usual_names_else_by_position() -> None:
    """Exporters have their own order; a model with other names needs output-blob-names."""
    roles = (("boxes", "dets"), ("scores",))
    some = outputs(x=np.zeros(1))
    assert some.pick(LayoutOptions(("more", "scores:0", "dets:0")), *roles) == ("dets:0", "scores:0")
    assert some.pick(LayoutOptions(("a", "scores", "c")), *roles) == ("a", "scores")
    with pytest.raises(EngineFailed, match="output 'a' is not enough; the layout reads boxes, scores"):
        some.pick(LayoutOptions(("a",)), *roles)


def test_stride_is_found_by_the_number_of_cells() -> None:
    """Also where the network's sides are no multiples of it."""
    geometry = Geometry(100, 100, 640, 360, 1.0, 1.0)
    assert [stride_of(cells, geometry) for cells in (80 * 45, 40 * 23, 20 * 12, 10 * 6)] == [8, 16, 32, 64]
    assert stride_of(80 * 45 + 1, geometry) is None


def test_classes_of_the_network_become_those_of_the_card() -> None:
    """Classes that the card does not list stay; huge ones cost no memory."""
    options = LayoutOptions(("x",), class_ids=(1, 5))
    assert options.mapped(np.array([1, 0, -1, 2, 2**62])).tolist() == [5, 1, -1, 2, 2**62]
    assert options.mapped(np.zeros(0, np.int64)).tolist() == []


def test_every_16_bit_float_keeps_its_value() -> None:
    """Also the smallest, negative zero, and those of an output without a batch axis or with axes of 1 at the end."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    found = outputs(halves=halves[np.newaxis]).floats("halves", rank=1)
    assert found.dtype == np.float32
    assert found.view(np.uint32).tolist() == halves.astype(np.float32).view(np.uint32).tolist()
    assert outputs(halves=halves[:6].reshape(1, 2, 3, 1)).floats("halves", rank=2).shape == (2, 3)
    assert outputs(halves=halves[:0].reshape(1, 0, 6)).floats("halves", rank=2).shape == (0, 6)
    with pytest.raises(EngineFailed, match="has 2 values that are NaN or infinite"):
        outputs(halves=np.array([[1.0, np.inf, np.nan]], np.float16)).floats("halves", rank=1)
