"""The bench of output layouts: its examples are outputs that the layouts decode."""

import pytest

from loadtest.bench.gateway.layouts import HEAD, LayoutExample, examples, measure, table_of


@pytest.mark.parametrize("example", examples(), ids=lambda example: f"{example.layout} {example.name}")
def test_each_example_is_decoded_to_a_result(example: LayoutExample) -> None:
    """A bench of outputs without objects would measure less than a user sees."""
    (row,) = measure([example], calls=2)
    assert row["results"] > 0
    assert 0 < row["median_ms"] <= row["p90_ms"]


def test_table_has_a_line_for_each_example_with_milliseconds() -> None:
    """With the layout's name first."""
    row = {"layout": "yolov8", "example": "[84, 8400]", "median_ms": 0.5, "p10_ms": 0.4, "p90_ms": 1.25, "results": 46}
    head, _, line = table_of([row]).splitlines()
    assert head.split() == " ".join(HEAD).split()
    assert line.split() == ["yolov8", "[84,", "8400]", "0.500", "0.400", "1.250", "46"]
