"""Reads, and inferences in JSON, over REST."""

from tests.contract.wire_case import Difference, HttpCase, X, get, infer, infer_x, post

# The gateway makes 400 of the 500 that Triton has for JSON it cannot read, and tells where: so does the engine.
UNREADABLE = Difference("Triton calls JSON that it cannot read its own failure", code=400)
OWN_WORDS = Difference("the parser has its own words", is_text=True)
ANOTHER_SERVER = Difference("another server", aside=("name", "version", "extensions"))
RUNTIME = Difference("Triton runs model.py here; in NGC's container the member is empty too", aside=("runtime",))
REASONS = Difference("Triton's reason has its Python traceback in it", aside=("reason",))
COUNTS = ("ns", "count", "last_inference", "inference_count", "execution_count", "batch_stats")
TIMES = Difference("what was counted, and how long it took", aside=COUNTS)
WITHOUT_BRACKET = Difference("Triton's list of the missing inputs loses a bracket where it is empty", is_text=True)
NAMES = Difference("Triton lists the inputs in no order", is_text=True)

READS = [
    HttpCase("server", get("/v2"), ANOTHER_SERVER),
    HttpCase("live", get("/v2/health/live")),
    HttpCase("ready", get("/v2/health/ready"), Difference("Triton is not ready while one model is broken", code=200)),
    HttpCase("no such path", get("/v2/")),
    HttpCase("no such path of a model", get("/v2/models/plain/nonsense")),
    HttpCase("version that is no number", get("/v2/models/plain/versions/x")),
    HttpCase("wrong method", post("/v2/models/plain")),
    HttpCase("query is ignored", get("/v2/models/plain?x=1")),
    *(
        HttpCase(f"metadata of {model}", get(f"/v2/models/{model}"))
        for model in (
            "plain",
            "pair",
            "types",
            "dynamic",
            "scalars",
            "text",
            "optional",
            "versions",
            "missing",
            "broken",
        )
    ),
    HttpCase("metadata of a version", get("/v2/models/versions/versions/1")),
    HttpCase("metadata of no version", get("/v2/models/versions/versions/9")),
    HttpCase("metadata of version 0", get("/v2/models/versions/versions/0")),
    *(
        HttpCase(f"config of {model}", get(f"/v2/models/{model}/config"), RUNTIME)
        for model in ("plain", "pair", "lookup", "optional", "scalars", "versions", "types")
    ),
    HttpCase("config of an unknown model", get("/v2/models/missing/config")),
    HttpCase("config of broken", get("/v2/models/broken/config")),
    HttpCase("config of no version", get("/v2/models/versions/versions/9/config")),
    HttpCase("statistics of a model", get("/v2/models/versions/stats"), TIMES),
    HttpCase("statistics of a version", get("/v2/models/versions/versions/2/stats"), TIMES),
    HttpCase("statistics of all", get("/v2/models/stats"), TIMES),
    HttpCase("statistics of an unknown model", get("/v2/models/missing/stats")),
    HttpCase("statistics of no version", get("/v2/models/versions/versions/9/stats")),
    *(
        HttpCase(f"readiness of {path}", get(f"/v2/models/{path}/ready"))
        for path in ("plain", "versions/versions/2", "versions/versions/9", "missing", "broken")
    ),
    HttpCase("index", post("/v2/repository/index"), REASONS),
    HttpCase("index, empty object", post("/v2/repository/index", {}), REASONS),
    HttpCase("index of what is ready", post("/v2/repository/index", {"ready": True})),
    HttpCase("index, ready is a word", post("/v2/repository/index", {"ready": "x"}), UNREADABLE),
    HttpCase("index, malformed", post("/v2/repository/index", b"{"), UNREADABLE),
    HttpCase("index by GET", get("/v2/repository/index")),
]


def _two(**members: object) -> dict[str, object]:
    """A request of model pair."""
    tensor = {"shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6.5]}
    return {"inputs": [{"name": "a", **tensor}, {"name": "b", **tensor}], **members}


INFERS = [
    HttpCase("flat", infer_x()),
    HttpCase("with an id", infer_x(request={"id": "7"})),
    HttpCase("with an empty id", infer_x(request={"id": ""})),
    HttpCase("id is a number", infer_x(request={"id": 7}), UNREADABLE),
    HttpCase("nested", infer_x(data=[[1, 2, 3]])),
    HttpCase("nested in another way", infer_x(data=[[[1], [2, 3]]])),
    HttpCase("two rows", infer_x(shape=[2, 3], data=[1, 2, 3, 4, 5, 6])),
    HttpCase("numbers of many digits", infer_x(data=[0.1, 123456789.125, 1e-7])),
    HttpCase("large numbers", infer_x(data=[3.4e38, 1e39, -1e39])),
    HttpCase("NaN and infinities", infer_x(data=[float("nan"), float("inf"), -float("inf")])),
    HttpCase("number over 64 bits", infer("plain", b'{"inputs":[{"name":"x","shape":[1,3],"datatype":"FP32",'
             b'"data":[1e400,1,2]}]}'), UNREADABLE),
    HttpCase("a dimension of 0", infer_x("vary", shape=[1, 0], data=[])),
    HttpCase("a batch of 0", infer_x(shape=[0, 3], data=[])),
    HttpCase("batch too large", infer_x(shape=[9, 3], data=[1] * 27)),
    HttpCase("batch too large, with an id", infer_x(shape=[9, 3], data=[1] * 27, request={"id": "7"})),
    HttpCase("no batch dimension", infer_x(shape=[3])),
    HttpCase("another width", infer_x(shape=[1, 4], data=[1, 2, 3, 4])),
    HttpCase("too many dimensions", infer_x(shape=[1, 3, 1])),
    HttpCase("no dimensions", infer_x(shape=[], data=[1])),
    HttpCase("negative dimension", infer_x(shape=[-1, 3]), UNREADABLE),
    HttpCase("dimension with a fraction", infer_x(shape=[1.0, 3]), UNREADABLE),
    HttpCase("shape is a word", infer_x(shape="1"), UNREADABLE),
    HttpCase("too few numbers", infer_x(data=[1, 2]), UNREADABLE),
    HttpCase("too many numbers", infer_x(data=[1, 2, 3, 4]), UNREADABLE),
    HttpCase("a word among numbers", infer_x(data=[1, "2", 3]), UNREADABLE),
    HttpCase("null among numbers", infer_x(data=[1, None, 3]), UNREADABLE),
    HttpCase("true among numbers", infer_x(data=[True, 2, 3]), UNREADABLE),
    HttpCase("data is a number", infer_x(data=5), UNREADABLE),
    HttpCase("no data", infer_x(data=None)),
    *(HttpCase(f"no {member}", infer_x(**{member: None}), UNREADABLE) for member in ("name", "shape", "datatype")),
    HttpCase("unknown input", infer_x(name="wrong")),
    HttpCase("one input too many", infer("plain", {"inputs": [X, {**X, "name": "more"}]}),
             Difference(f"{NAMES.why}; {WITHOUT_BRACKET.why}", is_text=True)),
    HttpCase("an input twice", infer("plain", {"inputs": [X, X]})),
    HttpCase("no inputs", infer("plain", {"inputs": []})),
    HttpCase("an input is missing", infer("pair", {"inputs": _two()["inputs"][:1]})),  # type: ignore[index]
    HttpCase("nothing", infer("plain", {}), UNREADABLE),
    HttpCase("inputs is an object", infer("plain", {"inputs": {}}), UNREADABLE),
    HttpCase("an input is a number", infer("plain", {"inputs": [1]}), OWN_WORDS),
    HttpCase("an array", infer("plain", b"[]"), UNREADABLE),
    HttpCase("malformed", infer("plain", b'{"inputs": nonsense}'), UNREADABLE),
    HttpCase("not UTF-8", infer("plain", b"\xff\xfe"), UNREADABLE),
    HttpCase("another datatype", infer_x(datatype="INT8")),
    HttpCase("strings for numbers", infer_x(datatype="BYTES", data=["a", "b", "c"])),
    HttpCase("unknown datatype", infer_x(datatype="WRONG")),
    HttpCase("FP16 in JSON", infer_x(datatype="FP16")),
    HttpCase("BF16 in JSON", infer_x(datatype="BF16")),
    HttpCase("unknown model", infer_x("missing")),
    HttpCase("unknown model comes before malformed JSON", infer("missing", b"{")),
    HttpCase("model that is not loaded", infer_x("broken")),
    HttpCase("highest version", infer_x("versions")),
    HttpCase("a version", infer_x("versions/versions/1")),
    HttpCase("a version with a zero before it", infer_x("versions/versions/01")),
    HttpCase("unknown version", infer_x("versions/versions/9")),
    HttpCase("version over 64 bits", infer_x("versions/versions/99999999999999999999")),
    HttpCase("model's name percent-encoded", infer_x("pl%61in")),
    HttpCase("inputs of two names", infer("pair", _two())),
    HttpCase("batches that differ", infer("pair", {"inputs": [
        _two()["inputs"][0], {**_two()["inputs"][1], "shape": [1, 3], "data": [1, 2, 3]},  # type: ignore[index]
    ]}), Difference("Triton may begin with either input", is_text=True)),
    HttpCase("one of two outputs", infer("pair", _two(outputs=[{"name": "product"}]))),
    HttpCase("both outputs, the other way round", infer("pair", _two(outputs=[{"name": "product"}, {"name": "sum"}]))),
    HttpCase("unknown output", infer("pair", _two(outputs=[{"name": "nothing"}]))),
    HttpCase("an output twice", infer("pair", _two(outputs=[{"name": "sum"}, {"name": "sum"}]))),
    HttpCase("an output without a name", infer("pair", _two(outputs=[{}])), UNREADABLE),
    HttpCase("outputs is an object", infer("pair", _two(outputs={})), UNREADABLE),
    HttpCase("reshaped", infer_x("scalars", shape=[1], data=[3])),
    HttpCase("dynamic", infer_x("dynamic", shape=[1, 2, 2], data=[1, 2, 3, 4])),
    HttpCase("wrong rank for a model without batches", infer_x("dynamic", shape=[4], data=[1, 2, 3, 4])),
    HttpCase("optional input left out", infer_x("optional", shape=[3])),
    HttpCase("optional input given", infer("optional", {"inputs": [
        {**X, "shape": [3]}, {"name": "bias", "shape": [1], "datatype": "FP32", "data": [7]}]})),
    HttpCase("failure inside the model", infer("lookup", {"inputs": [
        {"name": "index", "shape": [4, 1], "datatype": "INT64", "data": [0, 1, 99, 2]}]})),
    HttpCase("strings", infer_x("text", shape=[2, 2], datatype="BYTES", data=["a", "bé中", "", '"\\\n\x01/\x00'])),
    HttpCase("strings, nested", infer_x("text", shape=[2, 1], datatype="BYTES", data=[["a"], ["b"]])),
    HttpCase("a number among strings", infer_x("text", shape=[1, 2], datatype="BYTES", data=["a", 5]), UNREADABLE),
    HttpCase("too few strings", infer_x("text", shape=[1, 2], datatype="BYTES", data=["a"])),
    HttpCase("too many strings", infer_x("text", shape=[1, 1], datatype="BYTES", data=["a", "b"])),
]  # fmt: skip

KNOWN = [("priority", 1), ("timeout", 100_000), ("sequence_id", 1), ("sequence_id", "s"), ("sequence_start", True),
         ("a", 1), ("a", "s"), ("a", True), ("a", 1.5)]  # fmt: skip
WRONG = [("priority", -1), ("timeout", "x"), ("sequence_start", 1), ("binary_data_output", "x")]
PARAMETERS = [
    *(HttpCase(f"parameter {name} {value}", infer_x(request={"parameters": {name: value}})) for name, value in KNOWN),
    *(
        HttpCase(f"parameter {name} {value}", infer_x(request={"parameters": {name: value}}), UNREADABLE)
        for name, value in WRONG
    ),
    HttpCase("parameter a null", infer_x(request={"parameters": {"a": None}}), OWN_WORDS),
    HttpCase("parameter of Triton's", infer_x(request={"parameters": {"triton_x": 1}})),
    HttpCase("parameters is an array", infer_x(request={"parameters": []}), UNREADABLE),
    HttpCase("parameter of an input", infer_x(parameters={"a": 1})),
    HttpCase("region of an input", infer_x(data=None, parameters={"shared_memory_region": "r",
                                                                   "shared_memory_byte_size": 12})),
    HttpCase("region and data", infer_x(parameters={"shared_memory_region": "r"})),
    HttpCase("region of an output", infer_x(request={"outputs": [
        {"name": "y", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 12}}]})),
]  # fmt: skip
