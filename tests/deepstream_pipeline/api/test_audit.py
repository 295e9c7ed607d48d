"""The control API's audit log: a line for each request that changes something, and for each refused key."""

import http.client
import json
import ssl
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from penstock.gateway.audit import AuditLog
from penstock.protocol.identity import Role
from penstock.tls import Certificates, TlsFiles, subject_of
from penstock_video.api.options import ApiOptions, Audit
from tests.auth.authorities import Authority
from tests.deepstream_pipeline.api.asking import JSON, ask
from tests.deepstream_pipeline.api.pipeline import FakePipeline, one_key, serving

KEY = "a-key-that-is-long"
STREAM = {"uri": "rtsp://user:pk-secret@camera.example/1?token=pk-secret", "source_id": "cam"}
Lines = list[tuple[str, str, str, str, str]]


@pytest.fixture
def lines() -> Lines:
    return []


@pytest.fixture
def audit(lines: Lines) -> Audit:
    return Audit(lambda *line: lines.append(line), lambda _: "certificate:CN=ops")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "line"),
    [
        ("POST", "/v1/streams", STREAM, {"x-api-key": KEY}, ("api-key", "post", "/v1/streams", "ok")),
        ("DELETE", "/v1/streams/none", None, {"x-api-key": KEY}, ("api-key", "delete", "/v1/streams/none", "refused")),
        ("POST", "/v1/streams?key=pk-secret", STREAM, {}, ("", "access", "POST /v1/streams", "unauthenticated")),
        ("GET", "/v1/streams", None, {"x-api-key": "pk-secret"}, ("", "access", "GET /v1/streams", "unauthenticated")),
        ("GET", "/", None, {"authorization": "Bearer pk-secret"}, ("", "access", "GET /", "unauthenticated")),
    ],
)
def test_change_and_refused_key_give_one_line_each(
    lines: Lines, audit: Audit, method: str, path: str, body: object, headers: Mapping[str, str], line: tuple[str, ...]
) -> None:
    """The line has client, address, action and outcome, but no key and no camera URL."""
    with serving(FakePipeline(), ApiOptions(port=0, access=one_key(KEY), audit=audit)) as api:
        ask(api.url, method, path, body, {"content-type": "application/json", **headers})
    client, *rest = line
    assert lines == [(client, "127.0.0.1", *rest)]
    assert "pk-secret" not in str(lines)


def test_key_without_the_role_is_named_in_the_line(lines: Lines, audit: Audit) -> None:
    """A key that may only read and tries to change gives one line with its name."""
    with serving(FakePipeline(), ApiOptions(port=0, access=one_key(KEY, Role.READ, name="wall"), audit=audit)) as api:
        assert ask(api.url, "POST", "/v1/streams", STREAM, {**JSON, "x-api-key": KEY}).status == 403
    assert lines == [("wall", "127.0.0.1", "access", "POST /v1/streams", "permission_denied")]


def test_request_that_changes_nothing_gives_no_line(lines: Lines, audit: Audit) -> None:
    """Reads with the key and health checks without one write no line."""
    with serving(FakePipeline(), ApiOptions(port=0, access=one_key(KEY), audit=audit)) as api:
        assert ask(api.url, "GET", "/v1/streams", headers={"x-api-key": KEY}).status == 200
        assert ask(api.url, "GET", "/health/live").status == 200
    assert lines == []


def test_client_certificate_is_the_client(lines: Lines, tmp_path: Path) -> None:
    """Without a key, the client is the certificate's subject; the file has JSON lines."""
    ours, file = Authority("ours"), tmp_path / "audit.jsonl"
    certificates = Certificates(TlsFiles(*ours.sign(tmp_path, "api"), ours.file(tmp_path)))
    context = ssl.create_default_context(cafile=str(ours.file(tmp_path, "trusted.pem")))
    context.load_cert_chain(*ours.sign(tmp_path, "ops"))
    with closing(AuditLog(file)) as log:
        audit = Audit(log.record, subject_of)
        with serving(FakePipeline(), ApiOptions(port=0, tls=certificates.context, audit=audit)) as api:
            assert delete(api.url, context) == 404
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["client"].startswith("CN=ops")


def delete(url: str, context: ssl.SSLContext) -> int:
    """The status of a DELETE over TLS."""
    connection = http.client.HTTPSConnection(url.removeprefix("https://"), timeout=20, context=context)
    with closing(connection):
        connection.request("DELETE", "/v1/streams/none")
        return connection.getresponse().status
