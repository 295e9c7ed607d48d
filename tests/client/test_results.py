"""Results convert to NumPy, pandas and supervision, draw themselves, and show in a notebook."""

import base64
import builtins
import re
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
import pandas as pd
import pytest
import supervision as sv

from penstock.client import DepthResult, DetectionResult, EmbeddingResult, Result, SegmentationResult, TextResult
from penstock.client.results import result_of_response
from penstock.gateway.rest.image_results import result_json
from penstock.protocol.batch_reports import RequestExplanation
from penstock.protocol.errors import InvalidRequest, NotSupported
from penstock.protocol.image_answer import ImageAnswer, MaskForm
from penstock.protocol.inference import BatchOwner
from penstock.protocol.vision_results import (
    DepthMap,
    Detections,
    Embedding,
    Mask,
    SegmentationMap,
    TextLine,
    TextLines,
    VisionResult,
)
from tests.cli.conftest import jpeg

HEIGHT, WIDTH = 60, 100
LABELS = ("background", "person", "<img src=x onerror=alert(1)>")
EXPLANATION = RequestExplanation("m", BatchOwner.GATEWAY, "waited <b>0.1 ms</b>")
BITS = np.array([[1, 0], [1, 1]], np.bool_)
MASKS = (Mask(HEIGHT, WIDTH, 10, 20, BITS), Mask(HEIGHT, WIDTH, 50, 30, BITS))


def result_of(found: VisionResult, masks: MaskForm = MaskForm.RLE, picture: bytes = b"", model: str = "m") -> Any:
    """The client's result for the JSON that the gateway sends."""
    answer = ImageAnswer(model, "1", [result_json(found, LABELS, masks)], {"infer": 2.0, "total": 3.5}, 4)
    answer.explain = [EXPLANATION]
    read = msgspec.json.decode(msgspec.json.encode(answer), type=ImageAnswer)
    return result_of_response(read, picture or jpeg(WIDTH, HEIGHT))


def boxes(**more: Any) -> Detections:
    """Two objects of classes 1 and 2."""
    corners = np.array([[10, 20, 30, 40], [50, 30, 70, 50]], np.float32)
    return Detections(corners, np.array([0.9, 0.5], np.float32), np.array([1, 2], np.int64), **more)


def test_detections_convert_to_pandas_and_supervision() -> None:
    """Class names, masks of the image's size, keypoints and oriented boxes are converted."""
    keypoints = np.ones((2, 3, 3), np.float32)
    xywhr = np.array([[20, 30, 20, 20, 0], [60, 40, 20, 20, 0.5]], np.float32)
    result = result_of(boxes(masks=MASKS, keypoints=keypoints, xywhr=xywhr))
    assert isinstance(result, DetectionResult)
    table = result.to_pandas()
    assert isinstance(table, pd.DataFrame)
    assert table.columns.tolist() == ["label", "score", "x1", "y1", "x2", "y2", "class_id"]
    assert table.iloc[0].tolist()[0] == "person"
    full = result.full_masks()
    assert full is not None
    assert (full.shape, full.sum(), full[0, 20:22, 10:12].tolist()) == ((2, HEIGHT, WIDTH), 6, BITS.tolist())
    found = result.to_supervision()
    assert isinstance(found, sv.Detections)
    assert found.xyxy.tolist() == result.xyxy.tolist()
    assert found.data["class_name"].tolist() == list(LABELS[1:])
    assert found.mask is not None
    assert found.data["xyxyxyxy"].shape == (2, 4, 2)
    assert (result.keypoints.shape, result.xywhr.shape) == ((2, 3, 3), (2, 5))


def test_run_lengths_and_polygons_give_equal_masks() -> None:
    """Masks from polygons have the size in the image's header; without masks the result is None."""
    square = Mask(HEIGHT, WIDTH, 10, 20, np.ones((5, 7), np.bool_))
    outlined = result_of(boxes(masks=(square, square)), MaskForm.POLYGON)
    encoded = result_of(boxes(masks=(square, square)))
    assert (outlined.full_masks() == encoded.full_masks()).all()
    assert result_of(boxes()).masks is None


def test_other_results_have_their_arrays() -> None:
    """Embeddings, text lines, areas and depth maps convert to arrays."""
    vector = result_of(Embedding(np.array([0.5, 1.5], np.float32)))
    assert isinstance(vector, EmbeddingResult)
    assert (vector.vector.tolist(), repr(vector)) == ([0.5, 1.5], "<EmbeddingResult of m: 2 values>")
    lines = result_of(TextLines((TextLine("EXIT", 0.9), TextLine("2", 0.8))))
    assert isinstance(lines, TextResult)
    assert (lines.text, [line.score for line in lines]) == ("EXIT\n2", [0.9, 0.8])
    areas = result_of(SegmentationMap(HEIGHT, WIDTH, np.array([1, 2]), MASKS))
    assert isinstance(areas, SegmentationResult)
    assert ([area.area for area in areas], areas.full_masks().sum()) == ([3, 3], 6)
    assert areas.to_supervision().xyxy.tolist() == [[10, 20, 12, 22], [50, 30, 52, 32]]
    assert result_of(SegmentationMap(HEIGHT, WIDTH, np.array([1]), MASKS[:1]), MaskForm.NONE).masks == ()
    values = np.linspace(1, 2, HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
    depth = result_of(DepthMap(values))
    assert isinstance(depth, DepthResult)
    assert np.abs(depth.values - values).max() < 1e-4
    for one in (vector, lines, areas, depth):
        assert len(one.to_pandas()) > 0
        assert one.draw().shape == (HEIGHT, WIDTH, 3)


def test_drawing_can_be_saved_and_does_not_change_the_given_array(tmp_path: Path) -> None:
    """draw() draws on the image that was sent, or on a copy of an array."""
    result = result_of(boxes())
    drawn = result.draw()
    assert (drawn != 128).any()
    saved = drawn.save(tmp_path / "out.png")
    assert (cv2.imread(str(saved)) == drawn).all()
    given = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    assert result.draw(given).any()
    assert not given.any()
    for path, sentence in (
        (tmp_path / "out.txt", "unsupported image format"),
        (tmp_path / "no" / "a.jpg", "cannot be written"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            drawn.save(path)


def test_notebook_html_has_the_image_and_escapes_all_text() -> None:
    """The image is a data URL; names, labels and explanations of a hostile server are escaped."""
    result = result_of(boxes(), model="<script>alert(1)</script>", picture=jpeg(2000, 1200))
    shown = result._repr_html_()
    assert set(re.findall(r"<(\w+)", shown)) == {"div", "img", "table", "tr", "th", "td"}
    (source,) = re.findall(r'src="([^"]*)"', shown)
    picture = cv2.imdecode(np.frombuffer(base64.b64decode(source.partition(",")[2]), np.uint8), cv2.IMREAD_COLOR)
    assert picture.shape == (480, 800, 3)
    assert "http" not in shown
    assert "&lt;script&gt;" in shown
    assert "waited &lt;b&gt;" in shown


def test_masks_of_another_size_are_rejected() -> None:
    """A mask or depth map of a billion pixels is rejected before it is allocated."""
    result = result_of(boxes(masks=MASKS), picture=jpeg(10, 10))
    with pytest.raises(InvalidRequest, match="a mask has 100x60 pixels, but the image has 10x10"):
        result.draw()
    depth = result_of(DepthMap(np.ones((HEIGHT, WIDTH), np.float32)))
    depth.found.depth.size = [1 << 20, 1 << 20]
    with pytest.raises(ValueError, match="its size field says"):
        _ = depth.values


@pytest.mark.parametrize("package", ["pandas", "supervision"])
def test_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package to install."""
    real = builtins.__import__

    def without(name: str, *words: Any, **options: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real(name, *words, **options)

    result: Result = result_of(boxes())
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NotSupported, match=f"needs {package}: pip install"):
        getattr(result, f"to_{package}")()
