"""The locustfile against a server that wants an API key."""

import pytest

from tests.loadtest.stand_in import running_stand_in
from tests.loadtest.test_locustfile import locust

KEY = "secret-of-the-load-test"


@pytest.mark.parametrize("way", ["flag", "variable", "none"])
def test_users_show_the_key_with_every_request(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """By --api-key or PENSTOCK_API_KEY; with what is asked before the load, too, and nowhere in what is printed."""
    monkeypatch.setenv("PENSTOCK_API_KEY", KEY if way == "variable" else "")  # empty: Compose hands it on so
    with running_stand_in() as stand_in:
        stand_in.image_body = {"results": [{}], "outputs": []}
        words = ["--api-key", KEY] if way == "flag" else []
        address = ["--host", stand_in.http_url, "--grpc", stand_in.grpc_address]
        answer = locust(*address, *words, "-u", "4", "-r", "4")
    assert answer.returncode == 0, answer.stderr
    asked = ("image", "metadata", "infer", "stream", "model")
    assert stand_in.keys == {(call, None if way == "none" else KEY) for call in asked}
    assert KEY not in answer.stdout + answer.stderr
