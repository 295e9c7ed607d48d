"""Who is let in: keys, names of this machine, pages of other sites, types and sizes of bodies."""

import base64
import socket

import pytest

from penstock_video.api.options import ApiOptions, ApiRefused
from penstock_video.api.server import ApiServer
from tests.deepstream_pipeline.api.asking import JSON, ask, connect, read_all, send_on
from tests.deepstream_pipeline.api.pipeline import FakePipeline, one_key, serving

DOOR = {"uri": "rtsp://camera/1", "source_id": "door"}
KEY = "a-key-that-is-long"
BASIC = "Basic " + base64.b64encode(f"anybody:{KEY}".encode()).decode()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "camera-server"])
def test_api_without_a_key_does_not_start_exposed(host: str) -> None:
    """The fix is in the message."""
    with pytest.raises(ApiRefused, match=r"give it API keys, or let it listen on 127\.0\.0\.1"):
        ApiOptions(host=host)
    assert ApiOptions(host=host, access=one_key(KEY)).is_local is False


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1"])
def test_api_on_this_machine_alone_needs_no_key(host: str) -> None:
    """And may be given files."""
    assert ApiOptions(host=host).is_local


def test_key_is_not_in_the_options_words() -> None:
    """What is logged of them does not hold it."""
    assert KEY not in repr(ApiOptions(access=one_key(KEY)))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": KEY + "x"}, 401),
        ({"x-api-key": "ключ".encode().decode("latin-1")}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic !!"}, 401),
        ({"authorization": "Digest x"}, 401),
        ({"x-api-key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {KEY}"}, 200),
        ({"authorization": BASIC}, 200),
    ],
)
def test_key_is_asked_for(headers: dict[str, str], status: int) -> None:
    """The key in any of three forms; everything but health requires it, and a browser gets a challenge."""
    with serving(FakePipeline(), ApiOptions(port=0, access=one_key(KEY))) as api:
        for path in ("/v1/streams", "/", "/metrics", "/openapi.json", "/api/v1/stream/get-stream-info"):
            answer = ask(api.url, "GET", path, headers=headers)
            assert answer.status == status
            if status == 401:
                assert "API key" in answer.error
                assert answer.headers["www-authenticate"].startswith("Basic ")
        for path in ("/health/live", "/health/ready"):
            assert ask(api.url, "GET", path, headers=headers).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::2]"])
def test_name_that_is_not_this_machines_is_refused(api: ApiServer, host: str) -> None:
    """FAULTS 87: a foreign name that resolves to this machine (DNS rebinding) is refused except for health checks.

    The answer names the flag that allows the name.
    """
    for method in ("GET", "POST"):
        answer = ask(api.url, method, "/v1/streams", headers={"host": host})
        assert (answer.status, "--allowed-host" in answer.error) == (421, True)
    assert ask(api.url, "GET", "/health/live", headers={"host": host}).status == 200


def test_host_that_is_none_is_malformed(api: ApiServer) -> None:
    """A malformed Host gets 400, as RFC 9112 requires."""
    assert ask(api.url, "GET", "/v1/streams", headers={"host": ""}).status == 400


def test_request_with_the_key_may_use_any_name() -> None:
    """A page that uses DNS rebinding does not have the key."""
    with serving(FakePipeline(), ApiOptions(port=0, access=one_key(KEY))) as api:
        headers = {"host": "video.example", "x-api-key": KEY}
        assert ask(api.url, "GET", "/v1/streams", headers=headers).status == 200
        assert ask(api.url, "GET", "/v1/streams", headers={"host": "video.example"}).status == 401


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8010", "127.0.0.1:1", "[::1]:8010"])
def test_names_of_this_machine_are_let_in(api: ApiServer, host: str) -> None:
    """With any port: it may be forwarded."""
    assert ask(api.url, "GET", "/v1/streams", headers={"host": host}).status == 200


def test_name_that_is_allowed_is_let_in() -> None:
    """A reverse proxy's name can be allowed, and all subdomains of a name."""
    with serving(FakePipeline(), ApiOptions(port=0, allowed_hosts=("Video.example", "*.lan.example"))) as api:
        for host in ("video.example", "a.lan.example:8010"):
            assert ask(api.url, "GET", "/v1/streams", headers={"host": host}).status == 200


def test_page_of_an_allowed_origin_may_change_and_read(pipeline: FakePipeline) -> None:
    """With --cors-origin its preflights are answered and it can read answers; other pages cannot."""
    page, other = {"origin": "https://page.example"}, {"origin": "https://evil.example"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with serving(pipeline, ApiOptions(port=0, cors_origins=(page["origin"],))) as api:
        before = ask(api.url, "OPTIONS", "/v1/streams", headers={**page, **asks})
        assert before.headers["access-control-allow-origin"] == page["origin"]
        added = ask(api.url, "POST", "/v1/streams", DOOR, {**JSON, **page, "sec-fetch-site": "cross-site"})
        assert (added.status, added.headers["access-control-allow-origin"]) == (201, page["origin"])
        assert ask(api.url, "OPTIONS", "/v1/streams", headers={**other, **asks}).status == 400
        assert ask(api.url, "POST", "/v1/streams", DOOR, {**JSON, **other}).status == 403


@pytest.mark.parametrize("wrong", [{"allowed_hosts": ("https://a.example",)}, {"cors_origins": ("page.example",)}])
def test_name_or_origin_that_no_browser_sends_is_refused_at_the_start(wrong: dict[str, tuple[str, ...]]) -> None:
    """The message says what to give."""
    with pytest.raises(ApiRefused, match=r"give a name or IP address|give the page's origin"):
        ApiOptions(port=0, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example", "content-type": "text/plain"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/streams", "/api/v1/stream/add"])
def test_page_of_another_site_changes_nothing(
    api: ApiServer, pipeline: FakePipeline, path: str, headers: dict[str, str]
) -> None:
    """FAULTS 87: requests with any body and content type are refused; the answer names the flag that allows them."""
    answer = ask(api.url, "POST", path, DOOR, {**JSON, **headers})
    assert (answer.status, "--cors-origin" in answer.error) == (403, True)
    assert pipeline.sources == {}


def test_own_page_may_change(api: ApiServer) -> None:
    """A browser says that it is the same origin."""
    headers = {**JSON, "origin": api.url, "sec-fetch-site": "same-origin"}
    assert ask(api.url, "POST", "/v1/streams", DOOR, headers).status == 201


SIMPLE_TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]


@pytest.mark.parametrize("mark", ["origin", "referer", "sec-fetch-site"])
@pytest.mark.parametrize("kind", SIMPLE_TYPES)
def test_body_that_a_page_can_send_unasked_is_refused(
    api: ApiServer, pipeline: FakePipeline, kind: str, mark: str
) -> None:
    """FAULTS 87: it gets 415 and nothing is added, even from the API's own origin."""
    marks = {"origin": api.url, "referer": f"{api.url}/", "sec-fetch-site": "same-origin"}
    answer = ask(api.url, "POST", "/v1/streams", DOOR, {"content-type": kind, mark: marks[mark]})
    assert (answer.status, "application/json" in answer.error) == (415, True)
    assert pipeline.sources == {}


@pytest.mark.parametrize("kind", [*SIMPLE_TYPES, "application/json", ""])
def test_body_that_no_page_sent_is_read_as_json(api: ApiServer, kind: str) -> None:
    """`curl -d` sends JSON with the content type of a form."""
    answer = ask(api.url, "POST", "/v1/streams", DOOR, {"content-type": kind} if kind else {})
    assert answer.status == 201


HEAD = b"POST /v1/streams HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNK = b"10000\r\n" + b" " * 65536 + b"\r\n"


def test_body_over_the_limit_is_refused_unread(api: ApiServer) -> None:
    """413 by its announced length, before it comes."""
    with connect(api.url) as connection:
        connection.sendall(HEAD + b"content-length: 1048577\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'{"error":"a body of 1048577 bytes (at most 1048576)"}' in answer


def test_body_of_many_pieces_is_cut_at_the_limit(api: ApiServer) -> None:
    """413 as soon as the chunks are more than the limit, though more are to come."""
    with connect(api.url) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n" + CHUNK * 17)
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")


def test_body_without_an_end_is_hung_up_on(api: ApiServer) -> None:
    """Its sender is stopped long before it is through."""
    with connect(api.url) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_on(connection, CHUNK, times=2000)


def test_body_just_under_the_limit_is_read(api: ApiServer) -> None:
    """Its fault is another one."""
    body = b'{"uri": "rtsp://c/1", "source_id": "a", "camera_name": "' + b"x" * 1_048_500 + b'"}'
    answer = ask(api.url, "POST", "/v1/streams", body)
    assert (answer.status, "camera_name" in answer.error) == (400, True)


def test_header_that_is_there_twice_is_refused(api: ApiServer) -> None:
    """Which of two keys or names was meant is not guessed."""
    with connect(api.url) as connection:
        connection.sendall(b"GET /v1/streams HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", ["/", "/v1/streams", "/nothing", "/metrics"])
def test_every_answer_has_the_headers_that_keep_browsers_apart(api: ApiServer, path: str) -> None:
    """No sniffing, no embedding elsewhere, no storing, and CORS admits no other origin."""
    headers = ask(api.url, "GET", path, headers={"origin": "https://evil.example"}).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"
    assert not any(name.startswith("access-control") for name in headers)
