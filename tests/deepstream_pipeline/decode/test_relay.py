"""A source from an API client reaches only allowed hosts, also by redirects, playlists and DNS.

Here 127.0.0.1 is allowed and represents a public host; 127.0.0.2 is not allowed and represents a private one.
"""

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from penstock import outbound
from penstock.outbound import OutboundPolicy
from penstock_video.decode.container import DecodeOptions
from penstock_video.decode.decoder import Decoder
from penstock_video.errors import PipelineError, SourceNotAllowed, SourceRefused, SourceUnavailable
from tests.deepstream_pipeline.clips import write_clip
from tests.deepstream_pipeline.decode.web import Web, web
from tests.deepstream_pipeline.rtsp.cameras import Camera, RtspServer, reason_against, rtsp_server

ASKED = DecodeOptions(open_timeout_s=3.0, read_timeout_s=3.0, outbound=OutboundPolicy(("127.0.0.1",), is_from_api=True))
needs_cameras = pytest.mark.skipif(bool(reason_against()), reason=reason_against())


@pytest.fixture(name="site")
def _site() -> Iterator[Web]:
    with web() as site:
        yield site


@pytest.fixture(name="clip", scope="module")
def _clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_clip(tmp_path_factory.mktemp("clips") / "clip.ts", frames=10).read_bytes()


@pytest.fixture(name="cameras", scope="module")
def _cameras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RtspServer]:
    folder = tmp_path_factory.mktemp("cameras")
    clip = write_clip(folder / "small.mp4", frames=50, fps=25, gop=12)
    with rtsp_server([Camera("/a", [clip]), Camera("/k", [clip], user="anna", password="hunter2")], folder) as server:
        yield server


class Listener:
    """Listens on 127.0.0.2, to which API clients' sources must not connect. connections: number accepted."""

    def __init__(self) -> None:
        self.connections = 0
        self._socket = socket.create_server(("127.0.0.2", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._socket.accept()
                self.connections += 1
                connection.close()
        except OSError:
            return


@pytest.fixture(name="hidden")
def _hidden() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()
    assert listener.connections == 0


@contextmanager
def rtsp_answers(answer: bytes, *, pieces: int = 1) -> Iterator[str]:
    """A server that sends this answer to each request (CSEQ is the request's number), in this many pieces."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                if line.lower().startswith(b"cseq:"):
                    said = answer.replace(b"CSEQ", line[5:].strip())
                    size = -(-len(said) // pieces)
                    for start in range(0, len(said), size):
                        self.request.sendall(said[start : start + size])

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"rtsp://127.0.0.1:{server.server_address[1]}/a"
        server.shutdown()
        thread.join(10)


def frames_of(uri: str, options: DecodeOptions = ASKED, *, most: int = 1000) -> int:
    """The number of pictures that it has, up to a limit."""
    decoder, count = Decoder(uri, options), 0
    try:
        for packet in decoder.packets():
            count += len(decoder.decode(packet))
            if count >= most:
                break
        return count
    finally:
        decoder.close()


def failure(uri: str, options: DecodeOptions = ASKED) -> PipelineError:
    with pytest.raises(PipelineError) as raised:
        frames_of(uri, options)
    return raised.value


def leads(monkeypatch: pytest.MonkeyPatch, name: str, address: Callable[[], str]) -> None:
    """Replaces the DNS answer for a name."""
    asked = socket.getaddrinfo

    def found(host: object, *more: object, **named: object) -> object:
        return asked(address() if host == name else host, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_web_server_is_read(site: Web, clip: bytes) -> None:
    """This covers a clip with redirects, a playlist with segments, and a user name with password."""
    site.pages["/1.ts"] = clip
    site.pages["/live.m3u8"] = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n1.ts\n#EXT-X-ENDLIST\n"
    site.redirects["/moved"] = site.url("/1.ts")
    for path in ("/1.ts", "/moved", "/live.m3u8"):
        assert frames_of(site.url(path, "anna:hunter2@")) == 10, path


def test_web_server_that_redirects_to_another_host_is_not_followed(site: Web, hidden: Listener) -> None:
    """A redirect is refused at once, after others, and in every notation; the reason has the address and the flag."""
    site.redirects["/2"] = site.url("/1")
    for host in ("127.0.0.2", "[::ffff:127.0.0.2]", "2130706434", "0x7f.2", "127.2"):
        site.redirects["/1"] = f"http://{host}:{hidden.port}/secret"
        for path in ("/1", "/2"):
            error = failure(site.url(path))
            assert isinstance(error, SourceNotAllowed), (host, error)
            assert "--allow-outbound 127.0.0.2" in error.message


def test_tls_to_another_host_is_not_followed(site: Web, hidden: Listener) -> None:
    """A redirect from http to https is checked before the first byte of TLS."""
    site.redirects["/1"] = f"https://127.0.0.2:{hidden.port}/secret"
    assert isinstance(failure(site.url("/1")), SourceNotAllowed)


def test_playlist_leads_to_no_other_host(site: Web, clip: bytes, hidden: Listener) -> None:
    """Segments, keys and playlists on other hosts are not read."""
    site.pages["/1.ts"] = clip
    there = f"http://127.0.0.2:{hidden.port}/secret"
    lines = "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n1.ts\n"
    site.pages["/segment.m3u8"] = f"{lines}#EXTINF:9,\n{there}.ts\n#EXT-X-ENDLIST\n".encode()
    site.pages["/key.m3u8"] = f'#EXT-X-KEY:METHOD=AES-128,URI="{there}"\n#EXTINF:9,\n1.ts\n#EXT-X-ENDLIST\n'.encode()
    site.pages["/key.m3u8"] = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n" + site.pages["/key.m3u8"]
    site.pages["/nested.m3u8"] = f"#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=9\n{there}.m3u8\n".encode()
    for name in ("key", "nested"):
        assert isinstance(failure(site.url(f"/{name}.m3u8")), SourceNotAllowed), name
    assert frames_of(site.url("/segment.m3u8")) == 10  # those before it: FFmpeg skips unreadable ones


@pytest.mark.parametrize("scheme", ["http", "https", "rtsp", "rtsps"])
def test_host_that_is_not_allowed_is_not_connected_to(scheme: str, hidden: Listener) -> None:
    """The reason has the address and the flag, but no password."""
    error = failure(f"{scheme}://anna:hunter2@127.0.0.2:{hidden.port}/1")
    assert isinstance(error, SourceNotAllowed)
    assert "--allow-outbound 127.0.0.2" in error.message
    assert "hunter2" not in error.message


@pytest.mark.parametrize("scheme", ["http", "rtsp"])
def test_name_is_connected_to_where_it_was_checked(
    scheme: str, site: Web, clip: bytes, hidden: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name whose address changes at each lookup (DNS rebinding) is only connected to at allowed addresses."""
    site.pages["/1.ts"] = clip
    answers = iter(["127.0.0.1"])
    leads(monkeypatch, "camera.example", lambda: next(answers, "127.0.0.2"))
    if scheme == "http":
        assert frames_of(f"http://camera.example:{site.port}/1.ts") == 10
    assert isinstance(failure(f"{scheme}://camera.example:{hidden.port}/1.ts"), PipelineError)
    assert isinstance(failure(f"{scheme}://camera.example:{hidden.port}/1.ts"), SourceNotAllowed)


@pytest.mark.parametrize("scheme", ["http", "rtsp"])
def test_source_of_the_operator_is_read_wherever_it_is_but_on_a_metadata_service(
    scheme: str, hidden: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by address and by name, and used if it is allowed."""
    here = outbound.ip_address("127.0.0.2")
    monkeypatch.setattr(outbound, "METADATA", frozenset([here]))
    leads(monkeypatch, "camera.example", lambda: "127.0.0.2")
    for host in ("127.0.0.2", "camera.example"):
        error = failure(f"{scheme}://{host}:{hidden.port}/1", DecodeOptions(open_timeout_s=3.0))
        assert isinstance(error, SourceNotAllowed)
        assert "metadata" in error.message
    allowed = DecodeOptions(open_timeout_s=3.0, outbound=OutboundPolicy(("127.0.0.2",)))
    assert not isinstance(failure(f"{scheme}://127.0.0.2:1/1", allowed), SourceNotAllowed)


def test_refusals_of_a_web_server_keep_their_meaning(site: Web) -> None:
    """Errors are the same with and without the proxy; a port without a server is named."""
    for path, expected in (("/status/401", SourceRefused), ("/status/404", SourceUnavailable)):
        assert type(failure(site.url(path))) is expected
    for scheme in ("http", "https", "rtsp", "rtsps"):
        error = failure(f"{scheme}://127.0.0.1:1/1")
        assert type(error) is SourceUnavailable
        assert "127.0.0.1:1 cannot be reached" in error.message


@needs_cameras
def test_camera_is_read(cameras: RtspServer) -> None:
    """A camera is read through the relay, also with user name and password."""
    for path in ("/a", "/k"):
        assert frames_of(cameras.url(path), most=5) == 5
    assert isinstance(failure(cameras.url("/k", password="wrong")), SourceRefused)
    assert isinstance(failure(cameras.url("/nothing")), SourceUnavailable)


@pytest.mark.parametrize("pieces", [1, 7, 60])
@pytest.mark.parametrize(
    "status", [b"RTSP/1.0 302 Moved", b"RTSP/1.0 301 Moved", b"RTSP/1.0  0302 x", b"RTSP/x +303 y"]
)
def test_camera_that_redirects_is_not_followed(status: bytes, pieces: int, hidden: Listener) -> None:
    """This holds for every notation of the status, and for any number of pieces."""
    there = f"rtsp://127.0.0.2:{hidden.port}/secret".encode()
    with rtsp_answers(status + b"\r\nCSeq: CSEQ\r\nLocation: " + there + b"\r\n\r\n", pieces=pieces) as uri:
        error = failure(uri)
    assert isinstance(error, SourceNotAllowed)
    assert "redirects to another address" in error.message


def test_camera_that_hides_its_redirection_in_a_longer_answer_is_not_followed(hidden: Listener) -> None:
    """The redirect follows the answer to OPTIONS, where a parser that uses the length would read it as a body."""
    there = f"rtsp://127.0.0.2:{hidden.port}/secret".encode()
    moved = b"RTSP/1.0 302 Moved\r\nCSeq: CSEQ\r\nLocation: " + there + b"\r\n\r\n"
    with rtsp_answers(b"RTSP/1.0 200 OK\r\nCSeq: CSEQ\r\nContent-Length: -1\r\n\r\n" + moved) as uri:
        assert isinstance(failure(uri), SourceNotAllowed)


def test_camera_over_udp_is_for_the_operator() -> None:
    """With UDP the server chooses the host that packets are sent to."""
    options = DecodeOptions(is_udp=True, outbound=ASKED.outbound)
    assert "RTSP over UDP" in failure("rtsp://127.0.0.1:1/1", options).message


def test_nothing_is_left_of_a_source_that_was_read(site: Web, clip: bytes) -> None:
    """The relay's thread and port are released, also after a failure."""
    site.pages["/1.ts"] = clip
    for path in ("/1.ts", "/status/404", "/1.ts/stops"):
        try:
            frames_of(site.url(path))
        except PipelineError:
            continue
        finally:
            assert not [thread for thread in threading.enumerate() if thread.name == "relay"]
