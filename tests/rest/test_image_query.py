"""The query parameters of POST …/image."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.rest.image_query import DEFAULT_QUERY, QUERY_PARAMETERS, ImageQuery, query_of
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.image_answer import MaskForm
from penstock.vision.results import ResultOptions
from tests.rest.harness import Front, described_by


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", DEFAULT_QUERY),
        ("conf=0.05", ImageQuery(ResultOptions(conf=0.05))),
        ("conf=0&iou=1", ImageQuery(ResultOptions(conf=0.0, iou=1.0))),
        ("classes=person,%20car%20,7", ImageQuery(ResultOptions(classes=("person", "car", "7")))),
        ("classes=caf%C3%A9", ImageQuery(ResultOptions(classes=("café",)))),
        ("max_detections=1024", ImageQuery(ResultOptions(max_detections=1024))),
        ("masks=polygon", ImageQuery(ResultOptions(needs_masks=True), MaskForm.POLYGON)),
        ("masks=none", ImageQuery(ResultOptions(needs_masks=False), MaskForm.NONE)),
        ("draw=1", ImageQuery(is_drawn=True)),
        ("draw=0", DEFAULT_QUERY),
    ],
)
def test_query_of_valid_parameters(query: str, expected: ImageQuery) -> None:
    """Each parameter becomes its option; a missing one is the model's."""
    found = query_of(query.encode())
    assert found == expected


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("conf=1.1", "query parameter 'conf' is '1.1'; it must be a number from 0 to 1"),
        ("conf=nan", "'nan'; it must be a number from 0 to 1"),
        ("conf=-0.1", "it must be a number from 0 to 1"),
        ("conf=", "query parameter 'conf' is ''"),
        ("iou=high", "query parameter 'iou' is 'high'"),
        ("max_detections=0", "it must be an integer from 1 to 1024"),
        ("max_detections=1025", "it must be an integer from 1 to 1024"),
        ("max_detections=" + "9" * 5000, "it must be an integer from 1 to 1024"),
        ("max_detections=%D9%A3", "it must be an integer from 1 to 1024"),
        ("classes=", "it must be class ids or labels, separated by commas"),
        ("classes=car,,bus", "it must be class ids or labels, separated by commas"),
        ("classes=" + "1," * 1000 + "1", "has 1001 classes (limit 1000)"),
        ("masks=png", "it must be one of: rle, polygon, none"),
        ("draw=yes", "it must be one of: 0, 1, false, true"),
        ("conf=0.1&conf=0.1", "query parameter 'conf' is given twice; send it once"),
        ("Conf=0.1", "unknown query parameter 'Conf'; did you mean 'conf'? allowed: conf, iou, classes, "),
        ("max_detection=3", "did you mean 'max_detections'?"),
        ("&".join(f"x{n}=1" for n in range(65)), "more than 64 query parameters"),
    ],
)
def test_query_of_invalid_parameters_says_what_is_allowed(query: str, why: str) -> None:
    """The message names the parameter, its value and what is allowed."""
    with pytest.raises(InvalidRequest) as refused:
        query_of(query.encode())
    assert why in refused.value.message
    assert len(refused.value.message) < 400


@given(
    st.binary(max_size=60)
    | st.sampled_from(list(QUERY_PARAMETERS)).flatmap(
        lambda name: st.binary(max_size=20).map(lambda text: name.encode() + b"=" + text)
    )
)
def test_query_of_any_bytes_is_a_query_or_an_invalid_request(query: bytes) -> None:
    """Nothing else is raised."""
    try:
        found = query_of(query)
    except InvalidRequest:
        return
    assert found.result_options.conf is None or 0 <= found.result_options.conf <= 1


def test_description_has_the_parameters_of_images() -> None:
    """Each has its schema, and none is required."""
    described = described_by(Front())["paths"]["/v2/models/{model}/image"]["post"]["parameters"]
    query = {one["name"]: one for one in described if one["in"] == "query"}
    assert set(query) == set(QUERY_PARAMETERS)
    assert not any(one["required"] for one in query.values())
    assert query["conf"]["schema"] == {"type": "number", "minimum": 0, "maximum": 1}
    assert query["masks"]["schema"] == {"type": "string", "enum": ["rle", "polygon", "none"]}
