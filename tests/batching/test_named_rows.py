"""An engine's complaint of some rows of a batch finds the requests that they are of."""

import pytest

from server.batching.named_rows import refused_requests, refused_rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model 'm': row 3 of 16: the picture ends early", {3: "model 'm': the picture ends early"}),
        ("rows 0, 15 of 16: it ends; row 4 of 16: it is huge", {0: "it ends", 15: "it ends", 4: "it is huge"}),
        ("rows 0, 1 of 16: it ends; rows 2, …", {0: "it ends; rows 2, …", 1: "it ends; rows 2, …"}),
        ("row 3 of 17: of another call", {}),
        ("row 16 of 16: there is none", {}),
        ("rows 3; 4 of 16: another form", {}),
        ("cannot read 'row 3 of 16: you lose'", {}),
        ("Failed to process: row 3 of 16: you lose", {}),
        ("model 'another': row 3 of 16: you lose", {}),
        (
            "rows 0, 15 of 16: it ends row 4 of 16: in itself",
            {0: "it ends row 4 of 16: in itself", 15: "it ends row 4 of 16: in itself"},
        ),
        ("the picture in row 3 cannot be decoded", {}),
    ],
)
def test_rows_are_read_off_the_engines_own_words(text: str, said: dict[int, str]) -> None:
    """Counted from 0, each with what is said of it; what does not fit the call tells nothing, nor does what was cut."""
    assert refused_rows(text, 16, "m") == said


def test_rows_belong_to_requests_in_the_order_of_the_call() -> None:
    """Requests of several rows, which the call had in another order; of two bad rows the first counts."""
    assert refused_requests({0: "a", 4: "b"}, (2, 0, 1), (3, 1, 2)) == {2: "a", 1: "b"}
    assert refused_requests({2: "b", 1: "a"}, (2, 0, 1), (3, 1, 2)) == {2: "a"}
    assert refused_requests({}, (0,), (1,)) == {}
