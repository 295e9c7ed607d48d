"""What a URI means, and what of it may be shown."""

import re

import pytest

from penstock_video.decode.uri import MAX_URI_CHARACTERS, UriKind, is_file, is_live, kind_of, path_of, redacted
from penstock_video.errors import SourceNotAllowed

KINDS = [
    ("clip.mp4", UriKind.FILE),
    ("/srv/a b/clip.mp4", UriKind.FILE),
    ("file:///srv/clip.mp4", UriKind.FILE),
    ("subfile,,start,0,end,0,,:/etc/passwd", UriKind.FILE),  # a file of that odd name, never FFmpeg's protocol
    ("/dev/video0", UriKind.DEVICE),
    ("file:///dev/video12", UriKind.DEVICE),
    ("rtsp://camera/1", UriKind.RTSP),
    ("RTSPS://u:p@camera:322/1", UriKind.RTSP),
    ("http://camera/mjpeg", UriKind.HTTP),
    ("https://[::1]:8443/live.m3u8", UriKind.HTTP),
]


@pytest.mark.parametrize(("uri", "kind"), KINDS)
def test_kind_of_a_source_is_reported_by_its_address(uri: str, kind: UriKind) -> None:
    """Each address that can be a source is of one kind, before anything is opened."""
    assert kind_of(uri) is kind
    assert is_file(uri) is (kind is UriKind.FILE)


@pytest.mark.parametrize(
    "uri",
    [
        *(
            "",
            "ftp://host/a.mp4",
            "concat:a.ts|b.ts",
            "data:video/mp4,abc",
            "pipe:0",
            "udp://239.0.0.1:1234",
            "rtmp://h/a",
        ),
        *("crypto:file:/etc/passwd", "http:///nohost", "rtsp://", "rtsp://host:port/1", "http://[::1/a", "a\nb.mp4"),
        *("file://otherhost/etc/passwd", "x" * (MAX_URI_CHARACTERS + 1), "C:\\clip.mp4"),
    ],
)
def test_address_that_cannot_be_a_source_is_refused_with_words(uri: str) -> None:
    """What is not on the list of protocols, or is no address, is refused before FFmpeg sees it."""
    with pytest.raises(SourceNotAllowed) as refused:
        kind_of(uri)
    assert len(refused.value.message) > 10


@pytest.mark.parametrize("login", ["u:pa#ss", "u#1:pass", "u:p/a", "u:p@#"])
def test_password_that_must_be_escaped_is_refused_with_the_way_to_write_it(login: str) -> None:
    """The message does not contain the password."""
    with pytest.raises(SourceNotAllowed, match="# as %23") as refused:
        kind_of(f"rtsp://{login}@127.0.0.1:554/live")
    assert login not in refused.value.message
    assert kind_of("rtsp://u:pa%23ss@127.0.0.1:554/live#track") is UriKind.RTSP


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("clip.mp4", False),
        ("rtsp://camera/1.mp4", True),
        ("/dev/video1", True),
        ("http://host/clip.MP4?x=1", False),
        ("http://host/stream.m3u8", True),
        ("http://host/video.mjpg", True),
        ("https://host/", True),
    ],
)
def test_source_is_live_unless_its_address_is_of_a_file(uri: str, expected: bool) -> None:
    """Cameras lose what is not taken in time, files wait; of HTTP the name's end tells which it is."""
    assert is_live(uri) is expected


def test_path_of_a_file_address_is_decoded() -> None:
    """file: addresses have percent signs and may name this host; a path is taken as it stands."""
    assert path_of("file:///srv/a%20b.mp4") == "/srv/a b.mp4"
    assert path_of("file://localhost/srv/a.mp4") == "/srv/a.mp4"
    assert path_of("file:a.mp4") == "a.mp4"
    assert path_of("/srv/100%25.mp4") == "/srv/100%25.mp4"


@pytest.mark.parametrize(
    "uri",
    [
        "rtsp://anna:hunter2@camera:554/1",
        "rtsp://anna:hunter2@camera:554/a@b",
        "rtsp://anna:hun/hunter2@camera/1",
        "rtsp://anna:hun@hunter2@camera/1",
        "rtsp://anna:hun?hunter2#@camera/1",
        "rtsp://anna:hun hunter2'\"@camera/1",
        "http://hunter2@camera/",
        "http://camera/mjpg?user=anna&password=hunter2&channel=1",
        "http://camera/mjpg?Token=hunter2",
        "rtsp:/anna:hunter2@camera/1",
        "xyz://anna:hunter2@camera/1",
        "rtsp://anna:hunter2",
    ],
)
def test_user_and_password_are_never_shown(uri: str) -> None:
    """However odd the password is, and wherever it stands, nothing of it is left; the refusal's text is no leak."""
    assert "hunter2" not in redacted(uri)
    assert "anna" not in redacted(uri)
    assert redacted(uri) != uri
    assert not {"anna", "hunter2"} & set(re.findall(r"\w+", refusal_of(uri)))


def refusal_of(uri: str) -> str:
    """Why it is refused; empty where it is not."""
    try:
        kind_of(uri)
    except SourceNotAllowed as refused:
        return refused.message
    return ""


def test_address_without_secrets_is_shown_as_it_is() -> None:
    """People still see which camera it is."""
    for uri in ("rtsp://camera:554/1", "http://[::1]:80/a@b?channel=1", "clip@home.mp4", "/srv/a:b@c/clip.mp4"):
        assert redacted(uri) == uri
