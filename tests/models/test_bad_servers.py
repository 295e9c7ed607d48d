"""Pulls from servers that cut, dribble, refuse and lie: one sentence each, and nothing in the repository."""

import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.models import remote_file as remote
from penstock.models.catalogue import CatalogueEntry, PullFailed, WrongContent
from penstock.models.pull import pull
from penstock.models.remote_file import RateMonitor
from tests.models.conftest import CONTENT, ModelServer, entry_of, handler_of
from tests.models.test_pull import MODEL, left_in_repository, quiet

OTHERWISE = "or fetch the file by other means and name it, or its folder, with --from"


def partial_bytes(entry: CatalogueEntry, home: Path) -> int:
    """How much of the file is kept for the next time."""
    path = home / "downloads" / f"{entry.sha256}.partial"
    return path.stat().st_size if path.exists() else 0


def test_pull_over_a_connection_that_breaks_goes_on_by_itself(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """What came before each break is kept, only the rest is asked for, and progress never goes back."""
    model_server.breaks_after = 300_000
    seen: list[int] = []
    pull(entry, source=None, home=tmp_path, progress=seen.append)
    assert model_server.requests == ["", "bytes=300000-", "bytes=600000-"]
    assert seen == sorted(seen)
    assert (tmp_path / MODEL).read_bytes() == CONTENT


def test_pull_over_a_connection_that_breaks_again_and_again_gives_up_and_keeps_what_came(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """Five connections in one call, then the sentence; the next call goes on from there."""
    model_server.breaks_after = 100_000
    with pytest.raises(PullFailed, match="broke off after 500000 of 700001 bytes: run the same command again, it goes"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert len(model_server.requests) == 5
    assert left_in_repository(tmp_path) == []
    model_server.breaks_after = None
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert model_server.requests[5:] == ["bytes=500000-"]
    assert (tmp_path / MODEL).read_bytes() == CONTENT


def test_pull_where_the_server_breaks_and_cannot_resume_does_not_go_round_in_circles(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """A server that ignores Range and always breaks at the same place is given up at the second try."""
    model_server.breaks_after, model_server.has_ranges = 300_000, False
    with pytest.raises(PullFailed, match="broke off after 300000"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert model_server.requests == ["", "bytes=300000-"]
    model_server.breaks_after = None
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert (tmp_path / MODEL).read_bytes() == CONTENT


def test_pull_where_the_connection_ends_before_the_answer_is_one_sentence(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """A cut at the head leaves nothing, not even a partial file."""
    model_server.cuts_head = True
    with pytest.raises(PullFailed, match=r"cannot be reached \(Remote end closed connection"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert left_in_repository(tmp_path) == []
    assert os.listdir(tmp_path / "downloads") == ["fastestdet.lock"]


def test_pull_silent_server_is_given_up(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops sending in mid-file is left after the silence limit; what came is kept for the next time."""
    monkeypatch.setattr(remote, "SILENCE_TIMEOUT_S", 0.2)
    model_server.breaks_after, model_server.hold, model_server.has_ranges = 100_000, threading.Event(), False
    with pytest.raises(PullFailed, match=r"broke off \(nothing came for 0\.2 s\)"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert partial_bytes(entry, tmp_path) == 100_000
    assert left_in_repository(tmp_path) == []


@pytest.mark.parametrize(
    ("part", "why"), [("head", r"nothing came for 0\.3 s"), ("body", r"sends less than 10 kB/s: run .* again later")]
)
def test_pull_from_a_server_that_dribbles_for_ever_is_given_up(
    part: str,
    why: str,
    entry: CatalogueEntry,
    model_server: ModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A byte now and then keeps no pull alive, neither before the body nor in it: there is a least rate."""
    monkeypatch.setattr(remote, "SILENCE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(remote, "MIN_BYTES_PER_S", 10_000)
    monkeypatch.setattr(remote, "PACE_WINDOW_S", 0.3)
    model_server.dribbles = part
    with pytest.raises(PullFailed, match=why):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert len(model_server.requests) == 1
    assert left_in_repository(tmp_path) == []


def test_pace_judges_each_window_by_what_came_in_it() -> None:
    """A slow start is forgiven within the window, a burst before it does not count after it."""
    pace = RateMonitor(least_bytes_per_s=10, window_s=60, begin_s=0.0)
    assert not pace.is_too_slow(59.0, 1)
    assert not pace.is_too_slow(61.0, 900)
    assert not pace.is_too_slow(120.0, 1)
    assert pace.is_too_slow(121.5, 1)


@pytest.mark.parametrize(
    ("status", "headers", "why"),
    [
        (404, {}, "answered 404 Not Found: check the address"),
        (403, {}, "answered 403 Forbidden: it wants a login"),
        (429, {"Retry-After": "30"}, "answered 429 Too Many Requests: run the same command again in 30 s"),
        (500, {}, "answered 500 Internal Server Error: run the same command again later"),
        (503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, "answered 503 .*: run the same command again later"),
    ],
)
def test_pull_refused_by_the_server_says_how_to_go_on(
    status: int, headers: dict[str, str], why: str, entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """An error status is passed on with what to do, and always with the way that needs no network."""
    model_server.status, model_server.headers, model_server.content = status, headers, b"gone"
    with pytest.raises(PullFailed, match=f"{why}, {OTHERWISE}"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert left_in_repository(tmp_path) == []


@pytest.mark.parametrize("is_chunked", [False, True], ids=["with a length", "chunked"])
def test_pull_that_gets_a_web_page_says_so_and_keeps_what_came_before(
    is_chunked: bool, entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """The page of a hotel's network costs neither the repository nor the part that is there already."""
    model_server.breaks_after = 100_000
    with pytest.raises(PullFailed):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    model_server.breaks_after, model_server.has_ranges, model_server.is_chunked = None, False, is_chunked
    model_server.headers = {"Content-Type": "text/html; charset=utf-8"}
    model_server.content = b"<html>Please sign in</html>"
    with pytest.raises(PullFailed, match="is a web page, not the file"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert partial_bytes(entry, tmp_path) == 500_000
    assert left_in_repository(tmp_path) == []


@pytest.mark.parametrize(
    "how", ["chunked", "without a length", "with no length", "with a length that no file has", "under the wrong type"]
)
def test_pull_of_the_right_file_in_another_wrapping_lands(
    how: str, entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """What counts is the file: no length, one that is none, chunks, or a mirror that calls everything HTML."""
    model_server.is_chunked, model_server.is_without_length = how == "chunked", how == "without a length"
    if how == "with no length":
        model_server.headers = {"Content-Length": "-3", "Connection": "close"}
    if how == "with a length that no file has":
        model_server.headers = {"Content-Length": "9" * 5000, "Connection": "close"}
    if how == "under the wrong type":
        model_server.headers = {"Content-Type": "text/html"}
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert (tmp_path / MODEL).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("length", "why"), [("5", "has 5 bytes, fastestdet as catalogued 700001"), ("800000", "has 800000 bytes")]
)
def test_pull_with_a_wrong_content_length_leaves_nothing(
    length: str, why: str, entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """A length that is not the file's is another file."""
    model_server.headers = {"Content-Length": length, "Connection": "close"}
    with pytest.raises(WrongContent, match=why):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert left_in_repository(tmp_path) == []
    assert os.listdir(tmp_path / "downloads") == ["fastestdet.lock"]


def test_pull_through_a_redirect_lands_and_resumes(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """Large files are often behind one; what is asked of the first is asked of the second, and its body is not read."""
    model_server.redirects = {"/weights/FastestDet.onnx": "/storage/31cb?signature=x"}
    model_server.breaks_after = 400_000
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert model_server.paths == ["/weights/FastestDet.onnx", "/storage/31cb?signature=x"] * 2
    assert model_server.requests == ["", "", "bytes=400000-", "bytes=400000-"]
    assert (tmp_path / MODEL).read_bytes() == CONTENT


def test_pull_through_redirects_in_a_circle_ends(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """A redirect to itself is a sentence too."""
    model_server.redirects = {"/weights/FastestDet.onnx": "/weights/FastestDet.onnx"}
    with pytest.raises(PullFailed, match="redirect"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert left_in_repository(tmp_path) == []


def test_pull_from_a_closed_port_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection is one sentence."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(PullFailed, match=r"http://127\.0\.0\.1:9/x\.onnx cannot be reached \(.*Connection refused\)"):
        pull(entry_of("http://127.0.0.1:9/x.onnx"), source=None, home=tmp_path, progress=quiet)


def test_pull_by_https_from_a_server_without_tls_says_so(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """An HTTP server behind an https:// address has another message than an untrusted certificate."""
    with pytest.raises(PullFailed, match="does not speak TLS as it should"):
        pull(entry, source=model_server.url.replace("http", "https", 1), home=tmp_path, progress=quiet)
    assert left_in_repository(tmp_path) == []


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate of 127.0.0.1, with its key."""
    path = tmp_path / "certificate.pem"
    if shutil.which("openssl") is None:
        pytest.skip("no certificate can be made here: there is no openssl")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=penstock -addext"
    command = ["openssl", *words.split(), "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.fixture
def tls_server(certificate: Path, model_server: ModelServer) -> Iterator[str]:
    """The model server's twin behind TLS; its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(model_server))
    server.daemon_threads = True
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # a client that hangs up is meant
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}/FastestDet.onnx"
    server.shutdown()
    server.server_close()
    thread.join()


def test_pull_by_https_trusts_only_known_certificates(
    tls_server: str, certificate: Path, entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown certificate is refused with the way out, and the way out works."""
    home = tmp_path / "home"
    with pytest.raises(
        PullFailed, match=r"its certificate is not trusted \(self-signed certificate\): .*SSL_CERT_FILE"
    ):
        pull(entry, source=tls_server, home=home, progress=quiet)
    assert left_in_repository(home) == []
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    pull(entry, source=tls_server, home=home, progress=quiet)
    assert (home / MODEL).read_bytes() == CONTENT
