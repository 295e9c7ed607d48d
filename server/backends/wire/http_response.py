"""The answer to POST …/infer: JSON, the binary tensors behind it, compressed where the client asks for it."""

import msgspec

from server.backends.wire.asks import InferAsk
from server.backends.wire.json_tensors import tensor_text
from server.core.compression import deflate
from server.core.infer import InferResponse
from server.core.relay import HttpAnswer, HttpHeaders

JSON_TYPE = (b"content-type", b"application/json")
_BINARY_TYPE = (b"content-type", b"application/octet-stream")
_HEADER_LENGTH = b"inference-header-content-length"


def infer_answer(response: InferResponse, ask: InferAsk, encoding: str) -> HttpAnswer:
    """encoding: as `accepted_encoding` chose it. Raises InvalidRequest for a datatype that must come as binary."""
    head: dict[str, object] = {"id": response.id} if response.id else {}
    head |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        head["parameters"] = response.parameters
    outputs, binary = [], []
    for tensor in response.outputs:
        entry: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": tensor.shape}
        wanted = ask.output(tensor.name)
        if wanted.region is not None:
            pass  # it is where it was wanted
        elif wanted.is_binary:
            entry["parameters"] = {"binary_data_size": tensor.data.nbytes}
            if tensor.data.nbytes:  # nothing behind the JSON makes it plain JSON, as in Triton
                binary.append(tensor.data)
        else:
            entry["data"] = msgspec.Raw(tensor_text(tensor))
        outputs.append(entry)
    text = msgspec.json.encode(head | {"outputs": outputs})
    headers: HttpHeaders = (JSON_TYPE,)
    if binary:
        headers = (_BINARY_TYPE, (_HEADER_LENGTH, b"%d" % len(text)))
    if encoding:
        headers = (*headers, (b"content-encoding", encoding.encode()))
    return HttpAnswer(200, headers, deflate(b"".join((text, *binary)), encoding))


def accepted_encoding(header: bytes) -> str:
    """gzip or deflate, whichever the accept-encoding weighs most, the first of equals; empty for neither."""
    best, weight = "", 0.0
    for entry in header.decode("latin-1").split(","):
        name, _, quality = entry.strip().partition(";q=")
        value = _weight(quality) if quality else 1.0
        if name in ("gzip", "deflate", "identity") and value > weight:
            best, weight = name, value
    return "" if best == "identity" else best


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
