"""Records on the batch socket, however the socket cuts them."""

import msgspec
import pytest

from server.local.batch_line import BatchLine
from server.local.messages import UP, GiveUp, Known

RECORDS: tuple[UP, ...] = (GiveUp(1), Known(2), GiveUp(3))
WHOLE = b"".join(
    len(encoded).to_bytes(4, "little") + encoded for encoded in map(msgspec.msgpack.Encoder().encode, RECORDS)
)


class Line:
    """What was heard, in order."""

    def __init__(self) -> None:
        self.heard: list[UP] = []
        self.line = BatchLine(msgspec.msgpack.Decoder(UP), lambda _, record: self.heard.append(record), lambda _: None)


@pytest.mark.parametrize("size", range(1, len(WHOLE) + 1))
def test_records_are_heard_whole_and_in_order_wherever_they_are_cut(size: int) -> None:
    """In pieces of any size, several in one piece, and again behind a piece that ended inside a record."""
    line = Line()
    stream = WHOLE * 3
    for begin in range(0, len(stream), size):
        line.line.data_received(stream[begin : begin + size])
    assert line.heard == list(RECORDS) * 3


@pytest.mark.parametrize("cut", [4, len(WHOLE) - 1, len(WHOLE)])
def test_record_beyond_the_limit_ends_the_line_before_it_is_there(cut: int) -> None:
    """Nothing that stands behind it is heard, in the same piece or in later ones."""
    line = Line()
    line.line.max_record_bytes = 2
    line.line.data_received(WHOLE[:cut])
    line.line.data_received(WHOLE)
    assert line.heard == []
