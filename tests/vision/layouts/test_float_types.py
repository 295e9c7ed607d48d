"""Every layout of other detectors takes FP16 and FP64: a network's precision is its own matter."""

import numpy as np
import pytest

from tests.support.plain_detections import plain_iou
from tests.vision.layouts import test_detr, test_faces, test_final_boxes, test_nanodet
from tests.vision.layouts.pictures import BOXES, Array, Case

EXAMPLES: dict[str, tuple[Case, dict[str, Array]]] = {
    **{name: (Case(name), make()) for name, make in test_detr.MAKERS.items()},
    **{name: (Case(name), make()) for name, make in test_final_boxes.MAKERS.items()},
    **{name: (test_faces.case_of(name), make()) for name, make in test_faces.MAKERS.items()},
    **{
        name: (test_nanodet.case_of(name), test_nanodet.outputs_of(name, test_nanodet.encoded(name, BOXES[3:])))
        for name in test_nanodet.STRIDES
    },
}


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("layout", EXAMPLES)
def test_outputs_of_another_float_type_give_the_same_boxes(layout: str, dtype: type) -> None:
    """Within the type's precision."""
    case, outputs = EXAMPLES[layout]
    wanted = case.detect(outputs)
    found = case.detect(
        {name: array.astype(dtype) if array.dtype == np.float32 else array for name, array in outputs.items()}
    )
    assert found.class_id.tolist() == wanted.class_id.tolist()
    assert found.score.tolist() == pytest.approx(wanted.score.tolist(), abs=2e-3)
    assert all(plain_iou(one, other) > 0.97 for one, other in zip(found.xyxy, wanted.xyxy, strict=True))
    assert len(wanted.score) == 4 or layout in test_nanodet.STRIDES
