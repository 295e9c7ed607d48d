"""Calls over gRPC."""

from typing import Any

from tritonclient.grpc import service_pb2

from tests.contract.wire_case import (
    F123,
    Difference,
    GrpcCase,
    Unsigned,
    grpc_call,
    infer_request,
    set_parameter,
    strings,
)
from tests.contract.wire_http_cases import COUNTS

ANOTHER_SERVER = Difference("another server", aside=("name", "version", "extensions"))
RUNTIME = Difference("Triton runs model.py here; in NGC's container the member is empty too", aside=("runtime",))
REASONS = Difference("Triton's reason has its Python traceback in it", aside=("reason",))
TIMES = Difference("what was counted, and how long it took", aside=COUNTS)
STRANGE_VERSIONS = ("x", " 1", "+1", "1_0", "1.0", "1x", "-1", "\uff11", str(2**63), str(2**64 + 1))
MODELS = ("plain", "pair", "types", "versions", "missing", "broken", "")


def _read(method: str, model: str, version: str = "", but: Difference | None = None) -> GrpcCase:
    kind: Any = getattr(service_pb2, f"{method}Request")
    message = kind(name=model, version=version)
    return GrpcCase(f"{method} of {model or 'no name'} {version}".strip(), method, grpc_call(method, message), but)


def _infer(name: str, request: Any, but: Difference | None = None) -> GrpcCase:
    return GrpcCase(f"infer: {name}", "ModelInfer", grpc_call("ModelInfer", request), but)


def _typed(datatype: str = "FP32", model: str = "plain", shape: tuple[int, ...] = (1, 3), **contents: Any) -> Any:
    request = infer_request(model, x=None, datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(request.inputs[0].contents, field).extend(values)
    return request


def _typed_and_raw() -> Any:
    request = _typed(fp32_contents=[1, 2, 3])
    request.raw_input_contents.append(F123)
    return request


def _more_contents() -> Any:
    request = infer_request()
    request.raw_input_contents.append(F123)
    return request


def _all_types() -> Any:
    """Every datatype with typed contents but FP16, which has none, and so comes alone as raw elsewhere."""
    request = service_pb2.ModelInferRequest(model_name="types")
    contents = {
        "BOOL": ("bool_contents", [True, False]), "UINT8": ("uint_contents", [0, 255]),
        "UINT16": ("uint_contents", [0, 65535]), "UINT32": ("uint_contents", [0, 2**32 - 1]),
        "UINT64": ("uint64_contents", [0, 2**64 - 1]), "INT8": ("int_contents", [-128, 127]),
        "INT16": ("int_contents", [-32768, 32767]), "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
        "INT64": ("int64_contents", [-(2**63), 2**63 - 1]), "FP32": ("fp32_contents", [0.5, float("inf")]),
        "FP64": ("fp64_contents", [0.1, 1e300]), "BYTES": ("bytes_contents", [b"a", b""]),
        "FP16": ("fp32_contents", [0.5, 1.5]),
    }  # fmt: skip
    for name, (field, values) in contents.items():
        tensor = request.inputs.add(name=f"in_{name}", datatype=name, shape=[1, 2])
        getattr(tensor.contents, field).extend(values)
    return request


def _twice(name: str) -> Any:
    request = infer_request()
    request.inputs.add(name=name, datatype="FP32", shape=[1, 3])
    request.raw_input_contents.append(F123)
    return request


def _region(size: int | None) -> Any:
    request = infer_request(x=None)
    set_parameter(request.inputs[0].parameters["shared_memory_region"], "r")
    if size is not None:
        set_parameter(request.inputs[0].parameters["shared_memory_byte_size"], size)
    return request


READS = [
    GrpcCase("ServerLive", "ServerLive", grpc_call("ServerLive", b"")),
    GrpcCase("ServerReady", "ServerReady", grpc_call("ServerReady", b""),
             Difference("Triton is not ready while one model is broken", aside=("ready",))),
    GrpcCase("ServerMetadata", "ServerMetadata", grpc_call("ServerMetadata", b""), ANOTHER_SERVER),
    *(_read("ModelReady", model) for model in MODELS),
    *(_read("ModelMetadata", model) for model in MODELS),
    *(_read("ModelConfig", model, but=RUNTIME) for model in MODELS),
    *(_read("ModelStatistics", model, but=TIMES) for model in MODELS),
    *(
        _read(method, "versions", version, TIMES if method == "ModelStatistics" else RUNTIME)
        for method in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
        for version in ("1", "9", "x")
    ),
    GrpcCase("index", "RepositoryIndex", grpc_call("RepositoryIndex", b""), REASONS),
    GrpcCase("index of what is ready", "RepositoryIndex",
             grpc_call("RepositoryIndex", service_pb2.RepositoryIndexRequest(ready=True))),
    GrpcCase("index of a repository", "RepositoryIndex",
             grpc_call("RepositoryIndex", service_pb2.RepositoryIndexRequest(repository_name="here"))),
    GrpcCase("no such method", "Nonsense", grpc_call("Nonsense", b""), Difference("it says which", is_text=True)),
    GrpcCase("bytes that are no message", "ModelInfer", grpc_call("ModelInfer", b"\xff\xff\xff")),
]  # fmt: skip

INFERS = [
    _infer("raw", infer_request()),
    _infer("with an id", infer_request(id="7")),
    _infer("a version", infer_request("versions", version="1")),
    _infer("highest version", infer_request("versions")),
    _infer("unknown version", infer_request("versions", version="9")),
    *(_infer(f"version {version!r}", infer_request("versions", version=version)) for version in STRANGE_VERSIONS),
    _infer("unknown model", infer_request("missing")),
    _infer("model that is not loaded", infer_request("broken")),
    _infer("no model", b""),
    _infer("batch too large", infer_request(x=F123 * 9, shape=(9, 3), id="z")),
    _infer("too few bytes", infer_request(x=F123[:11])),
    _infer("too many bytes", infer_request(x=F123 * 2)),
    _infer("no data", infer_request(x=None)),
    _infer("another datatype", infer_request(x=F123[:3], datatype="INT8")),
    _infer("unknown datatype", infer_request(datatype="WRONG"), Difference("it names it", is_text=True)),
    _infer("unknown input", infer_request(name="wrong")),
    _infer("no inputs", service_pb2.ModelInferRequest(model_name="plain")),
    _infer("no batch dimension", infer_request(shape=(3,))),
    _infer("no dimensions", infer_request(shape=())),
    _infer("negative dimension", infer_request(shape=(-1, 3)), Difference("Triton multiplies it", is_text=True)),
    _infer("an input twice", _twice("x")),
    _infer("one input too many", _twice("more"), Difference("the order of the names", is_text=True)),
    _infer("more contents than inputs", _more_contents()),
    _infer("typed", _typed(fp32_contents=[1, 2, 3])),
    _infer("typed strings", _typed("BYTES", "text", (1, 2), bytes_contents=[b"a", b"bc"])),
    _infer("typed, too few", _typed(fp32_contents=[1, 2])),
    _infer("typed, too many", _typed(fp32_contents=[1, 2, 3, 4])),
    _infer("typed as another type", _typed(int_contents=[1, 2, 3])),
    _infer("typed twice", _typed(fp32_contents=[1, 2, 3], int_contents=[1, 2, 3])),
    _infer("typed and raw", _typed_and_raw()),
    _infer("all datatypes typed, FP16 cannot be", _all_types()),
    _infer("string ends too early", infer_request("text", x=b"\x09\0\0\0ab", shape=(1, 1), datatype="BYTES")),
    _infer("too few strings", infer_request("text", x=strings(b"a"), shape=(1, 3), datatype="BYTES")),
    _infer("failure inside the model", infer_request("lookup", name="index", x=b"\x09" + bytes(7), shape=(1, 1),
                                                     datatype="INT64")),
    _infer("an output", infer_request(outputs={"y": {}})),
    _infer("unknown output", infer_request(outputs={"nothing": {}})),
    _infer("binary_data means nothing here", infer_request(outputs={"y": {"binary_data": True}})),
    *(
        _infer(f"classification {value!r}", infer_request(outputs={"y": {"classification": value}}))
        for value in (2, 9, 0, -1, "2")
    ),
    _infer("region of an output", infer_request(outputs={"y": {"shared_memory_region": "r",
                                                               "shared_memory_byte_size": 12}})),
    _infer("region of an output without a size", infer_request(outputs={"y": {"shared_memory_region": "r"}})),
    _infer("region of an input", _region(12)),
    _infer("region of an input without a size", _region(None)),
    *(
        _infer(f"parameter {name} {value!r}", infer_request(**{name: value}))
        for name, value in (
            ("a", 1), ("a", 1.5), ("a", "s"), ("a", True), ("triton_x", 1),
            ("triton_enable_empty_final_response", True), ("sequence_id", 1), ("sequence_id", "s"),
            ("sequence_id", 1.0), ("sequence_start", True), ("sequence_start", 1), ("priority", 1), ("priority", -1),
            ("priority", "x"), ("timeout", 5), ("timeout", "x"),
        )
    ),
    *(
        _infer(f"unsigned parameter {name} {value}", infer_request(**{name: Unsigned(value)}))
        for name, value in (
            ("a", 0), ("a", 1), ("priority", 0), ("priority", 1), ("timeout", 0), ("timeout", 5), ("sequence_id", 0),
            ("sequence_id", 1), ("sequence_start", 0), ("triton_x", 1),
        )
    ),
]  # fmt: skip
