"""Headers from a file are sent with every call to an external engine; their values appear nowhere else."""

from pathlib import Path

import pytest

from penstock.engines.call_options import EngineHeaders, HeaderFileError, read_header_file
from penstock.protocol.call import HttpCall

SECRET = "s3cret of the engine"


def test_header_file_gives_names_and_values_and_skips_comments(tmp_path: Path) -> None:
    """One NAME: VALUE per line, with any line ends; values may contain spaces and colons."""
    file = tmp_path / "headers"
    file.write_bytes(f"# for the engine\r\n\r\nAdmin-Key: {SECRET}\r\nauthorization:Basic a:b=\n".encode())
    assert read_header_file(file) == (("Admin-Key", SECRET), ("authorization", "Basic a:b="))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "no header in it"),
        (b"# only a comment\n", "no header in it"),
        (b"key: s3cret\ns3cret\n", ":2: not a header"),
        (b"key:\n", ":1: not a header"),
        (b"two words: s3cret\n", ":1: not a header"),
        (b"key: s3cret\x00\n", ":1: not a header"),
        ("key: s3cr\u00e9t".encode(), "ASCII"),
        (b"key: " + b"s" * 20_000, "more than 16384 bytes"),
    ],
)
def test_header_file_that_is_not_valid_is_refused_without_its_secret(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    """The error names the file and the line, and says what to write; it repeats no value."""
    file = tmp_path / "headers"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(HeaderFileError) as error:
        read_header_file(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)
    assert "s3cr" not in str(error.value)


def test_engine_headers_replace_those_of_a_client_on_both_protocols() -> None:
    """A client cannot send other values under their names; over gRPC they are sent with and without Triton's prefix."""
    headers = EngineHeaders((("Admin-Key", SECRET),))
    call = HttpCall("GET", b"/v2", ((b"ADMIN-key", b"guess"), (b"accept", b"*/*")), b"")
    assert headers.over_http(call).headers == ((b"accept", b"*/*"), (b"admin-key", SECRET.encode()))
    sent = (("admin-key", "guess"), ("triton-grpc-protocol-admin-key", "guess"), ("x-request-id", "7"))
    expected = (("x-request-id", "7"), ("admin-key", SECRET), ("triton-grpc-protocol-admin-key", SECRET))
    assert headers.over_grpc(sent) == expected
    assert SECRET not in repr(headers)


def test_without_headers_calls_are_sent_as_they_are() -> None:
    """An engine without a header file gets what the client sent."""
    call = HttpCall("GET", b"/v2", ((b"admin-key", b"mine"),), b"")
    assert EngineHeaders().over_http(call) is call
    assert EngineHeaders().over_grpc((("admin-key", "mine"),)) == (("admin-key", "mine"),)
