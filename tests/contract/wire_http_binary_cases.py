"""Inferences over REST with binary tensors, compressed, raw, and with classes for answers."""

import gzip
import json
import zlib
from typing import Any

import numpy as np

from tests.contract.wire_case import F123, Difference, HttpCase, Json, X, infer, infer_binary, infer_x, strings
from tests.contract.wire_http_cases import UNREADABLE

DEFECTIVE = Difference("a body that cannot be decompressed is an empty one to Triton", is_text=True)
ANY_CASE = Difference("content codings have no case in HTTP", code=200)
NAMED = Difference("it names the output", is_text=True)
RAW_NAME = Difference("Triton calls the input of a raw request raw_input", is_text=True)
AS_JSON = json.dumps({"inputs": [X]}).encode()
SAMPLES: dict[str, Any] = {
    "BOOL": np.array([[True, False]]),
    "UINT8": np.array([[0, 255]], np.uint8),
    "UINT16": np.array([[0, 65535]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 127]], np.int8),
    "INT16": np.array([[-32768, 32767]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "FP16": np.array([[0.1, -65504]], np.float16),
    "FP32": np.array([[0.1, -np.inf]], np.float32),
    "FP64": np.array([[0.1, -1e300]]),
}


def _x(size: object = 12, **members: object) -> Json:
    """The usual input, its data behind the JSON."""
    return {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": size}} | members


def _binary(size: object = 12, raw: bytes = F123, model: str = "plain", **members: Any) -> Any:
    return infer_binary(model, {"inputs": [_x(size, **members)]}, raw)


def _output(name: str = "y", **parameters: object) -> Json:
    return {"outputs": [{"name": name, "parameters": parameters}]}


def _types(outputs: list[Json] | None = None, *, is_json: bool = False, **top: Any) -> Any:
    """All datatypes at once: FP16 as binary, the others as JSON or as binary."""
    inputs, raw = [], b""
    for name, array in SAMPLES.items():
        entry: Json = {"name": f"in_{name}", "shape": [1, 2], "datatype": name}
        if is_json and name != "FP16":
            inputs.append(entry | {"data": array.ravel().tolist()})
            continue
        inputs.append(entry | {"parameters": {"binary_data_size": array.nbytes}})
        raw += array.tobytes()
    inputs.append({"name": "in_BYTES", "shape": [1, 2], "datatype": "BYTES", "data": ["é", ""]})
    head = {"inputs": inputs, **top} | ({"outputs": outputs} if outputs is not None else {})
    return infer_binary("types", head, raw)


BINARY = [
    HttpCase("binary in, JSON out", _binary()),
    HttpCase("binary in and out", infer_binary("plain", {
        "inputs": [_x()], "id": "7", **_output(binary_data=True)}, F123)),
    HttpCase("JSON in, binary out", infer_x(request=_output(binary_data=True))),
    HttpCase("all outputs binary", infer_x(request={"parameters": {"binary_data_output": True}, "id": "5"})),
    HttpCase("all binary, but an output is named", infer_x(request={
        "parameters": {"binary_data_output": True}, "outputs": [{"name": "y"}]})),
    HttpCase("binary_data is a number", infer_x(request=_output(binary_data=1)), UNREADABLE),
    HttpCase("unknown parameter of an output", infer_x(request=_output(nonsense=3))),
    HttpCase("size below the shape's", _binary(8, F123[:8])),
    HttpCase("size over the shape's", _binary(16, F123 + F123[:4])),
    HttpCase("fewer bytes than announced", _binary(12, F123[:11])),
    HttpCase("more bytes than announced", _binary(12, F123 + b"x")),
    HttpCase("unannounced bytes", infer_binary("plain", {"inputs": [X]}, F123)),
    HttpCase("size and data", _binary(data=[1, 2, 3])),
    HttpCase("size is a word", _binary("12"), UNREADABLE),
    HttpCase("size is negative", _binary(-1), UNREADABLE),
    HttpCase("no bytes for a dimension of 0", _binary(0, b"", "vary", shape=[1, 0])),
    HttpCase("no bytes in and out", infer_binary("vary", {
        "inputs": [_x(0, shape=[1, 0])], "parameters": {"binary_data_output": True}}, b"")),
    HttpCase("no strings in and out", infer_binary("text", {
        "inputs": [_x(0, shape=[1, 0], datatype="BYTES")], "parameters": {"binary_data_output": True}}, b"")),
    HttpCase("header length is JSON's and more", infer_binary("plain", {"inputs": [X]}, b"", extra_length=1)),
    HttpCase("header length is negative", infer("plain", F123, {"inference-header-content-length": "-5"})),
    HttpCase("header length cuts the JSON", infer_binary("plain", {"inputs": [X]}, b"", extra_length=-1), UNREADABLE),
    HttpCase("strings", _binary(16, strings(b"a", b"bcdefgh"), "text", shape=[1, 2], datatype="BYTES")),
    HttpCase("strings in and out", infer_binary("text", {
        "inputs": [_x(16, shape=[1, 2], datatype="BYTES")], "parameters": {"binary_data_output": True}},
        strings(b"a", b"bcdefgh"))),
    HttpCase("string ends too early", _binary(6, b"\x09\0\0\0ab", "text", shape=[1, 1], datatype="BYTES")),
    HttpCase("length of a string ends too early", _binary(3, b"\x09\0\0", "text", shape=[1, 1], datatype="BYTES")),
    HttpCase("string is not UTF-8", _binary(6, strings(b"\xff\xfe"), "text", shape=[1, 1], datatype="BYTES")),
    HttpCase("too few binary strings", _binary(5, strings(b"a"), "text", shape=[1, 2], datatype="BYTES")),
    HttpCase("all datatypes as JSON", _types([{"name": f"out_{name}", "parameters": {"binary_data": name == "FP16"}}
                                              for name in (*SAMPLES, "BYTES")], is_json=True)),
    HttpCase("all datatypes as binary", _types(parameters={"binary_data_output": True})),
    HttpCase("FP16 out as JSON", _types([{"name": "out_FP16"}]), NAMED),
]  # fmt: skip

RAW = [
    HttpCase("raw", infer("plain", F123, {"inference-header-content-length": "0"})),
    HttpCase("raw by a header that is no number", infer("plain", F123, {"inference-header-content-length": "x"})),
    HttpCase("raw of a varying width", infer("vary", F123, {"inference-header-content-length": "0"})),
    HttpCase("raw reshaped", infer("scalars", F123[:4], {"inference-header-content-length": "0"})),
    HttpCase("raw of the highest version", infer("versions", F123, {"inference-header-content-length": "0"})),
    HttpCase("raw string", infer("word", b"hello", {"inference-header-content-length": "0"})),
    HttpCase("raw string for a varying shape", infer("text", b"hello", {"inference-header-content-length": "0"})),
    HttpCase("raw for two inputs", infer("pair", F123, {"inference-header-content-length": "0"})),
    HttpCase("raw for an optional input", infer("optional", F123, {"inference-header-content-length": "0"})),
    HttpCase("raw of two varying sizes", infer("dynamic", F123, {"inference-header-content-length": "0"})),
    HttpCase("raw of too many bytes", infer("plain", F123 * 2, {"inference-header-content-length": "0"}), RAW_NAME),
    HttpCase("raw of too few bytes", infer("plain", F123[:11], {"inference-header-content-length": "0"}), RAW_NAME),
    HttpCase("empty body", infer("plain", b""), RAW_NAME),
    HttpCase("empty body for a varying width", infer("vary", b"")),
    HttpCase("raw of nothing", infer("vary", b"", {"inference-header-content-length": "0"})),
    HttpCase("empty body for a string", infer("word", b"")),
    HttpCase("raw for an unknown model", infer("missing", F123, {"inference-header-content-length": "0"})),
]

COMPRESSED = [
    HttpCase("gzip", infer("plain", gzip.compress(AS_JSON), {"content-encoding": "gzip"})),
    HttpCase("deflate", infer("plain", zlib.compress(AS_JSON), {"content-encoding": "deflate"})),
    HttpCase("deflate that says gzip", infer("plain", zlib.compress(AS_JSON), {"content-encoding": "gzip"})),
    HttpCase("identity", infer("plain", AS_JSON, {"content-encoding": "identity"})),
    HttpCase("brotli", infer("plain", AS_JSON, {"content-encoding": "br"}), Difference("it names it", is_text=True)),
    HttpCase("GZIP", infer("plain", gzip.compress(AS_JSON), {"content-encoding": "GZIP"}), ANY_CASE),
    HttpCase("not gzip", infer("plain", AS_JSON, {"content-encoding": "gzip"}), DEFECTIVE),
    HttpCase("nothing, gzip", infer("plain", b"", {"content-encoding": "gzip"}), DEFECTIVE),
    *(
        HttpCase(f"accepts {accepted}", infer("plain", AS_JSON, {"accept-encoding": accepted}))
        for accepted in ("gzip", "deflate", "br", "br, gzip", "deflate, gzip", "gzip;q=0", "gzip;q=0.5, deflate;q=1")
    ),
    HttpCase("binary, gzip", infer("plain", json.dumps({
        "inputs": [X], "parameters": {"binary_data_output": True}}).encode(), {"accept-encoding": "gzip"})),
    HttpCase("error, accepts gzip", infer("plain", {"inputs": []}, {"accept-encoding": "gzip"})),
]  # fmt: skip

CLASSES = [
    *(HttpCase(f"{n} classes", infer_x(request=_output(classification=n))) for n in (0, 2, 9)),
    HttpCase("classes of two rows", infer_x(shape=[2, 3], data=[1, 3, 2, 6, 4, 5], request=_output(classification=2))),
    HttpCase("classes as binary", infer_x(request=_output(classification=2, binary_data=True))),
    HttpCase("classes of equal values", infer_x(data=[2, 2, 2], request=_output(classification=2))),
    HttpCase("classes of small and large values", infer_x(data=[1e-9, -1e30, 12345.678],
                                                           request=_output(classification=3))),
    HttpCase("classes of infinities", infer_x(data=[1, float("inf"), -float("inf")],
                                              request=_output(classification=3))),
    HttpCase("classes without labels", infer_x("vary", request=_output(classification=2))),
    HttpCase("classes without a batch dimension", infer_x("dynamic", shape=[1, 2, 2], data=[1, 4, 2, 3],
                                                          request=_output(classification=3))),
    *(
        HttpCase(f"classes of {name}", _types(_output(f"out_{name}", classification=2)["outputs"]),
                 NAMED if name in ("BOOL", "FP16") else None)
        for name in SAMPLES
    ),
    HttpCase("classes: -1", infer_x(request=_output(classification=-1)), UNREADABLE),
    HttpCase("classes: a word", infer_x(request=_output(classification="2")), UNREADABLE),
]  # fmt: skip
