"""The body of an infer request, read."""

import json

import pytest

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.http_inference import decode_infer_body

HEAD = json.dumps(
    {
        "inputs": [
            {"name": "x", "shape": [2], "datatype": "UINT8", "parameters": {"binary_data_size": 2}},
            {"name": "y", "shape": [1], "datatype": "UINT8", "data": [7]},
            {"name": "z", "shape": [3], "datatype": "UINT8", "parameters": {"binary_data_size": 3}},
        ]
    }
).encode()


@pytest.mark.parametrize("binary", [b"abcde", b"fghij"])
def test_tensors_behind_the_same_json_are_each_requests_own(binary: bytes) -> None:
    """The JSON may be remembered, its bytes are not: each binary input takes its share, in order."""
    ask = decode_infer_body(HEAD + binary, len(HEAD), "m")
    assert [bytes(tensor.data) for tensor in ask.inputs] == [binary[:2], b"\x07", binary[2:]]


@pytest.mark.parametrize(
    ("binary", "said"), [(b"abcd", "expecting 1 additional bytes"), (b"abcdef", "unexpected additional input data")]
)
def test_bytes_that_do_not_add_up_are_refused_every_time(binary: bytes, said: str) -> None:
    """Also where the same JSON came with the right number of bytes before."""
    decode_infer_body(HEAD + b"abcde", len(HEAD), "m")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=said):
            decode_infer_body(HEAD + binary, len(HEAD), "m")
