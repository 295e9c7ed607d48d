"""Output layouts of users: the example of docs/extend.md."""

import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed, InvalidRequest
from penstock.protocol.vision_results import Detections
from penstock.vision.results import parse
from tests.support.stack import CHECKOUT
from tests.vision.test_card import card
from tests.vision.test_parsers import GEOMETRY, answer, detector

NAME = "centre_layout:parse_centres"


@pytest.fixture(autouse=True)
def _example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is importable and allowed."""
    monkeypatch.syspath_prepend(str(CHECKOUT / "deepstream_pipeline" / "examples" / "extend"))
    monkeypatch.setenv("PENSTOCK_LAYOUTS", f"other:parse, {NAME}")


def test_layout_of_a_user_parses_the_outputs() -> None:
    """As the built-in ones: threshold, suppression and the way back to the picture's pixels are shared."""
    response = answer(points=np.array([[20, 20, 10, 0.9], [30, 30, 4, 0.1]], np.float32))
    found = parse(detector(NAME), response, None, GEOMETRY)
    assert isinstance(found, Detections)
    assert found.score.tolist() == pytest.approx([0.9])
    made = card({"network-type": "0", "parse-bbox-func-name": NAME})
    assert made.layout.name == NAME


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("os:getcwd", "is not allowed here: add it to PENSTOCK_LAYOUTS"),
        ("nosuch", "is not one of: boxes"),
        ("other:parse", "it cannot be loaded (ModuleNotFound"),
    ],
)
def test_layout_that_is_not_allowed_or_not_there_is_refused(name: str, why: str) -> None:
    """A model's parameters decide nothing about what is imported."""
    with pytest.raises(InvalidRequest, match="parse-bbox-func-name") as refused:
        card({"network-type": "0", "parse-bbox-func-name": name})
    assert why in str(refused.value)


@pytest.mark.parametrize(("made", "why"), [(ValueError("odd"), "failed: ValueError: odd"), ([1], "returned list")])
def test_layout_that_fails_or_returns_another_thing_is_an_error_of_the_model(
    monkeypatch: pytest.MonkeyPatch, made: object, why: str
) -> None:
    """A bug in a user's layout is a sentence with its name, not a traceback."""

    def parse_odd(*_: object) -> object:
        if isinstance(made, Exception):
            raise made
        return made

    name = f"centre_layout:odd_{type(made).__name__}"
    monkeypatch.setattr(f"centre_layout.{name.partition(':')[2]}", parse_odd, raising=False)
    monkeypatch.setenv("PENSTOCK_LAYOUTS", name)
    with pytest.raises(EngineFailed, match=f"the layout '{name}' {why}"):
        parse(detector(name), answer(points=np.zeros((1, 4), np.float32)), None, GEOMETRY)
