"""TLS on every port of a real stack: real clients, a certificate replaced under load, client certificates."""

import http.client
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.auth.authorities import Authority
from tests.integration.embedded_stack import start_embedded, write_models
from tests.integration.living import fails_to_start
from tests.support.stack import CHECKOUT, RunningStack, stop_stack
from tests.support.waiting import wait_for

ACCESS = """[certificates]
roles = ["infer"]

[certificates.subjects."CN=ops,O=acme"]
roles = ["infer", "read", "admin"]
"""
OURS, THEIRS = Authority("ours"), Authority("theirs")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Guarded"]:
    """Two workers and their core that require client certificates and give roles by subject."""
    folder = tmp_path_factory.mktemp("tls")
    write_models(folder / "models")
    (folder / "access.toml").write_text(ACCESS)
    guarded = Guarded(folder)
    flags = ("--tls-cert", guarded.certificate, "--tls-key", guarded.key, "--tls-client-ca", guarded.ca)
    more = ("--access-file", folder / "access.toml", "--audit-log", guarded.audit, "--workers", 2)
    words = map(str, (*flags, *more))
    guarded.stack = start_embedded(folder, *words)
    yield guarded
    assert stop_stack(guarded.stack) == 0


class Guarded:
    """The stack, its files, and clients with certificates."""

    stack: RunningStack

    def __init__(self, folder: Path) -> None:
        self.folder, self.audit = folder, folder / "audit.jsonl"
        self.certificate, self.key = OURS.sign(folder, "server")
        self.ca = OURS.file(folder, "client-ca.pem")
        self.trusted = OURS.file(folder, "trusted.pem")
        self.clients = {name: OURS.sign(folder, name) for name in ("camera", "ops")}
        self.clients["stranger"] = THEIRS.sign(folder, "stranger")

    def context(self, name: str | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.trusted))
        if name is not None:
            context.load_cert_chain(*self.clients[name])
        return context

    def http(self, method: str, url: str, name: str | None) -> tuple[int, bytes, bytes]:
        """Status, body, and the server's certificate (DER)."""
        parts = urlsplit(url)
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=30, context=self.context(name)
        )
        try:
            connection.request(method, parts.path, body=b"{}" if method == "POST" else None)
            seen = connection.sock.getpeercert(binary_form=True) or b""
            answer = connection.getresponse()
            return answer.status, answer.read(), seen
        finally:
            connection.close()

    def grpc(self, name: str | None) -> tritonclient.grpc.InferenceServerClient:
        certificate, key = self.clients[name] if name is not None else (None, None)
        credentials = grpc.ssl_channel_credentials(
            self.trusted.read_bytes(),
            key.read_bytes() if key is not None else None,
            certificate.read_bytes() if certificate is not None else None,
        )
        return tritonclient.grpc.InferenceServerClient(self.stack.grpc_address, creds=credentials, ssl=True)


def refused(call: Callable[[], object]) -> str:
    """The error of a client whose connection is refused."""
    with pytest.raises((OSError, http.client.HTTPException, tritonclient.grpc.InferenceServerException)) as error:
        call()
    return str(error.value)


def test_client_certificates_are_demanded_on_every_port(guarded: Guarded) -> None:
    """REST, metrics and gRPC do not answer without one, with one of another CA, or over plain HTTP."""
    stack = guarded.stack
    assert stack.http_url.startswith("https://")
    assert stack.metrics_url.startswith("https://")
    for url in (f"{stack.http_url}/v2/health/live", stack.metrics_url):
        assert guarded.http("GET", url, "camera")[0] == 200
        for name in (None, "stranger"):
            assert refused(lambda url=url, name=name: guarded.http("GET", url, name))
        parts = urlsplit(url)
        plain = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        assert refused(lambda plain=plain: (plain.request("GET", "/v2"), plain.getresponse()))
    assert guarded.grpc("camera").is_server_live(client_timeout=20)
    for name in (None, "stranger"):
        assert "failed to connect" in refused(lambda name=name: guarded.grpc(name).is_server_live(client_timeout=3))


def test_client_certificate_has_its_subjects_roles_over_http_and_grpc(guarded: Guarded) -> None:
    """A camera may infer but not read; ops may load. The refusal names the certificate's subject."""
    url = guarded.stack.http_url
    index = f"{url}/v2/repository/index"
    assert guarded.http("POST", index, "ops")[0] == 200
    status, body, _ = guarded.http("POST", index, "camera")
    assert status == 403
    assert b"CN=camera,O=acme" in body
    asked = tritonclient.grpc.InferInput("index", [1, 1], "INT64")
    asked.set_data_from_numpy(np.array([[3]], np.int64))
    with guarded.grpc("camera") as camera, guarded.grpc("ops") as ops:
        assert camera.infer("lookup", [asked], client_timeout=20).as_numpy("value").shape == (1, 1)
        assert ops.get_model_repository_index(client_timeout=20).models
        assert "CN=camera,O=acme" in refused(lambda: camera.get_model_repository_index(client_timeout=20))
        streamed: list[object] = []
        camera.start_stream(lambda result, error: streamed.append(error or result))
        camera.async_stream_infer("lookup", [asked])
        wait_for(lambda: bool(streamed), 20, "the stream answers")
        camera.stop_stream()
        assert isinstance(streamed[0], tritonclient.grpc.InferResult)


def test_audit_log_names_the_certificates_subject(guarded: Guarded) -> None:
    """It does so for a refusal and an admin action, over HTTP and gRPC."""
    earlier = len(guarded.audit.read_text().splitlines())
    load = f"{guarded.stack.http_url}/v2/repository/models/lookup/load"
    with guarded.grpc("camera") as camera, guarded.grpc("ops") as ops:
        assert guarded.http("POST", load, "camera")[0] == 403
        assert refused(lambda: camera.load_model("lookup", client_timeout=20))
        assert guarded.http("POST", load, "ops")[0] == 200
        ops.load_model("lookup", client_timeout=20)
    lines = [json.loads(line) for line in guarded.audit.read_text().splitlines()[earlier:]]
    assert [(line["client"], line["action"], line["outcome"]) for line in lines] == [
        *[("certificate:CN=camera,O=acme", "access", "permission_denied")] * 2,
        *[("certificate:CN=ops,O=acme", "load", "ok")] * 2,
    ]


def test_tritons_http_client_and_the_command_line_show_their_certificates(guarded: Guarded) -> None:
    """This covers the unmodified tritonclient.http, and `penstock models list` with two variables."""
    url = guarded.stack.http_url
    certificate, key = guarded.clients["ops"]
    options = {"keyfile": str(key), "certfile": str(certificate), "ca_certs": str(guarded.trusted)}
    client = tritonclient.http.InferenceServerClient(
        url.removeprefix("https://"), ssl=True, ssl_options=options, insecure=False
    )
    assert client.is_server_ready()
    client.close()
    both = guarded.folder / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    environ = dict(os.environ, SSL_CERT_FILE=str(guarded.trusted), PENSTOCK_CLIENT_CERTIFICATE=str(both))
    command = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "models",
        "list",
        "--url",
        url,
        "--home",
        str(guarded.stack.home),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=CHECKOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert "lookup" in done.stdout
    strange = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert "SSL_CERT_FILE" in strange.stdout + strange.stderr


def test_certificate_is_replaced_under_load_without_a_failed_request(guarded: Guarded) -> None:
    """Open connections stay open, new ones get the new certificate, over HTTP and gRPC."""
    stack, stop = guarded.stack, threading.Event()
    statuses: list[int] = []
    live = f"{stack.http_url}/v2/health/live"

    def ask() -> None:
        while not stop.is_set():
            statuses.append(guarded.http("GET", live, "camera")[0])

    with guarded.grpc("camera") as kept:
        assert kept.is_server_live(client_timeout=20)
        before = guarded.http("GET", live, "camera")[2]
        thread = threading.Thread(target=ask)
        thread.start()
        fresh = OURS.sign(guarded.folder, "fresh")
        for path, new in zip((guarded.certificate, guarded.key), fresh, strict=True):
            os.replace(new, path)
        wait_for(lambda: guarded.http("GET", live, "camera")[2] != before, 20, "new connections see the new one")
        stop.set()
        thread.join()
        assert set(statuses) == {200}
        assert kept.is_server_live(client_timeout=20)
    with guarded.grpc("camera") as anew:
        assert anew.is_server_live(client_timeout=20)
    expires = "penstock_tls_certificate_expires_timestamp_seconds"
    assert expires.encode() in guarded.http("GET", stack.metrics_url, "ops")[1]


def test_start_with_a_key_of_another_certificate_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """The command ends with exit code 2 before anything starts, without a traceback."""
    certificate, _ = OURS.sign(tmp_path, "one")
    _, key = OURS.sign(tmp_path, "other")
    code, text = fails_to_start(tmp_path, "--engine", "embedded", "--tls-cert", str(certificate), "--tls-key", str(key))
    assert code == 2
    assert "cannot be used with tls_cert" in text
    assert "Traceback" not in text
