"""Pieces put together."""

import tracemalloc

from penstock.protocol.http_body import BodyBuffer


def test_gathering_gives_the_pieces_in_order_and_is_empty_then() -> None:
    """None, one, or many; empty pieces between them change nothing."""
    for pieces in ([], [b"one"], [b"", b"one"], [b"one", b"", b"two", b"three"]):
        gathering = BodyBuffer()
        for piece in pieces:
            gathering.add(piece)
        assert gathering.size_bytes == len(b"".join(pieces))
        assert gathering.take() == b"".join(pieces)
        assert gathering.take() == b""


def test_gathering_of_one_piece_copies_nothing() -> None:
    """It is the same object."""
    gathering, piece = BodyBuffer(), bytes(1000)
    gathering.add(piece)
    assert gathering.take() is piece


def test_gathering_of_many_pieces_holds_them_once() -> None:
    """Growing and giving away take an eighth more than the bytes themselves, never twice as much."""
    size_bytes, piece = 64 << 20, bytes(256 << 10)
    gathering = BodyBuffer()
    tracemalloc.start()
    while gathering.size_bytes < size_bytes:
        gathering.add(piece)
    whole = gathering.take()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(whole) == size_bytes
    assert peak_bytes < 1.2 * size_bytes
