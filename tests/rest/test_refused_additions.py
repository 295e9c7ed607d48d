"""A model's file that the gateway refuses before it is received."""

from pathlib import Path

import pytest

from tests.rest.harness import Headers
from tests.rest.test_add_model import ADD, FILE, LIMITS, adding_front


@pytest.mark.parametrize(
    ("name", "body", "headers", "outcome"),
    [
        ("taken", FILE, (), "invalid"),
        ("-flag", FILE, (), "invalid"),
        ("m", b"", (), "invalid"),
        ("m", FILE, [(b"content-encoding", b"gzip")], "invalid"),
        ("m", FILE, [(b"content-type", b"multipart/form-data")], "unsupported_media"),
        ("m", bytes(LIMITS.max_model_bytes + 1), (), "too_large"),
    ],
)
async def test_refused_file_has_a_line_in_the_audit_log(
    tmp_path: Path, name: str, body: bytes, headers: Headers, outcome: str
) -> None:
    """Also an attempt to overwrite a model of the gateway; a file that is received has its line when it is added."""
    (tmp_path / "shipped" / "taken").mkdir(parents=True)
    front = adding_front(tmp_path)
    assert (await front.ask("POST", ADD.format(name), body, headers)).status >= 400
    assert front.plane.refused_additions == [(name, outcome)]
    assert (await front.ask("POST", ADD.format("m"), FILE)).status == 200
    assert (front.plane.refused_additions[1:], front.plane.added) == ([], ["m"])
