"""Bytes that come in pieces, put together without a second copy of them."""

import io


class Gathering:
    """The pieces so far. One piece alone is kept as it is, more grow in one place; `take` gives that place away."""

    __slots__ = ("_buffer", "_first", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self._first = b""
        self._buffer: io.BytesIO | None = None

    def add(self, piece: bytes) -> None:
        """One more piece at the end."""
        self.size_bytes += len(piece)
        if self._buffer is not None:
            self._buffer.write(piece)
        elif self._first:
            self._buffer = io.BytesIO()
            self._buffer.write(self._first)
            self._buffer.write(piece)
            self._first = b""
        else:
            self._first = piece

    def take(self) -> bytes:
        """All of it, once; the gathering is empty then.

        What BytesIO wrote it gives away without a copy, as long as nobody else holds it.
        """
        whole = self._first if self._buffer is None else self._buffer.getvalue()
        self._first, self._buffer, self.size_bytes = b"", None, 0
        return whole
