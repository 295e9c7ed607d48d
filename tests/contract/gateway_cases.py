"""What the gateway and the bare Triton are asked alike, and where their answers may differ, with the reason."""

import gzip
import zlib
from collections.abc import Mapping

from penstock.protocol.call import HttpCall
from tests.contract import wire_generate_cases, wire_http_binary_cases, wire_http_cases
from tests.contract.wire_case import HttpCase, Json, get, infer, infer_binary, infer_x, post

PATHS = [
    "/", "/v2/", "//v2", "/V2", "/v2//models/plain", "/v2/models", "/v2/models/", "/v2/models/plain/",
    "/v2/models/plain/ready/", "/v2/models/plain/versions", "/v2/models/plain/versions/x",
    "/v2/models/plain/versions//ready", "/v2/models/plain/versions/1/odd", "/v2/health", "/v2/health/live/",
    "/v2/health/odd", "/v2/%68ealth/live", "/v2/../v2", "/redoc", "/metrics", "/v2/models/pl%61in",
    "/v2/models/plain%2Fready", "/v2/models/plain%20x", "/v2/models/a;b=c", "/v2/models/%zz/ready",
    "/v2/models/stats/ready", "/v2/models/plain/versions/1/trace/setting", "/v2/repository",
    "/v2/repository/index/", "/v2/repository/models", "/v2/repository/models/plain", "/v2/logging/",
    "/v2/trace", "/v2/trace/setting/", "/v2/models/plain/versions/01/ready",
    "/v2/models/plain/versions/99999999999999999999", "/v2/models/stats/stats", "/v2/systemsharedmemory",
    "/v2/models/plain?", "/v2/models/plain?x=%20&y", "/v2/repository/x/y/models/plain/load",
    "/v2/models/plain/versions/1/infer/x", "/v2/models/../load", "/v2/models/%2e%2e", "/v2/models/%00",
    "/v2/models/%FF",
]  # fmt: skip
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE")
TARGETS = [
    "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/models/plain",
    "/v2/models/plain/ready", "/v2/models/plain/config", "/v2/models/plain/stats", "/v2/models/plain/infer",
    "/v2/models/plain/generate", "/v2/models/plain/generate_stream", "/v2/repository/index",
    "/v2/repository/models/missing/unload", "/v2/trace/setting", "/v2/models/plain/trace/setting", "/v2/logging",
]  # fmt: skip

PLACES = [
    *(HttpCase(f"{method} of {path}", ask(path)) for path in PATHS for method, ask in (("GET", get), ("POST", post))),
    *(HttpCase(f"{method} at {target}", HttpCall(method, target.encode(), (), b""))
      for target in TARGETS for method in METHODS),
]  # fmt: skip

_TRACE, _LOG, _WORDS = "/v2/trace/setting", "/v2/logging", "/v2/models/words/generate"
SETTINGS = [
    *(HttpCase(f"trace: {index}", post(target, body))
      for index, body in enumerate((
          {}, {"trace_rate": "5"}, {"trace_rate": 5}, {"trace_rate": "x"}, {"trace_count": "-2"}, {"missing": "1"},
          {"trace_level": ["TIMESTAMPS"]}, {"trace_level": "OFF"}, {"trace_level": ["UNKNOWN"]}, {"trace_rate": None},
          {"trace_file": "/nowhere/x"}, {"trace_rate": "9", "trace_file": ""}, {"trace_mode": "opentelemetry"},
      ))
      for target in (_TRACE, "/v2/models/plain/trace/setting")),
    HttpCase("trace of an unknown model", get("/v2/models/missing/trace/setting")),
    HttpCase("trace of an unknown model, changed", post("/v2/models/missing/trace/setting", {"trace_rate": "5"})),
    *(HttpCase(f"log: {index}", post(_LOG, body))
      for index, body in enumerate((
          {}, {"log_verbose_level": 1}, {"log_verbose_level": 0}, {"log_verbose_level": "1"}, {"log_info": 1},
          {"log_verbose_level": -1}, {"log_format": "ISO8601"}, {"log_format": "default"}, {"log_format": "odd"},
          {"log_format": 5}, {"missing": 1}, {"log_file": "/nowhere/x"}, {"log_info": False, "log_file": ""},
      ))),
    *(HttpCase(f"{target}: {body.decode()!r}", post(target, body))
      for target in (_TRACE, _LOG) for body in (b"", b"{", b"[]", b"5")),
]  # fmt: skip
DECOUPLED = [
    *(HttpCase(f"words{suffix}: {index}", post(_WORDS + suffix, body))
      for suffix in ("", "_stream")
      for index, body in enumerate((
          {"text_input": "hi"}, {"text_input": "hi", "n": 1}, {"text_input": "é\"\\\n", "n": 2, "id": "7"},
          {"text_input": "hi", "n": 0}, {"text_input": "fail"}, {"text_input": "fail", "n": 1}, {"text_input": 5},
          {"text_input": ["a", "b"]}, {"text_input": "hi", "n": "1"},
      ))),
    HttpCase("words: infer", infer("words", {"inputs": [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}]})),
    HttpCase("words: version 9", post("/v2/models/words/versions/9/generate_stream", {"text_input": "hi"})),
    HttpCase("words: accepts gzip", post(_WORDS + "_stream", {"text_input": "hi"}, {"accept-encoding": "gzip"})),
]  # fmt: skip

_BF16: Json = {"name": "x", "shape": [2], "datatype": "BF16", "parameters": {"binary_data_size": 4}}
_ONE_AND_NAN = b"\x80\x3f\xc0\x7f"
_ALL_BINARY: Json = {"parameters": {"binary_data_output": True}}
_PACKED = infer_binary("bf16", {"inputs": [_BF16], **_ALL_BINARY}, _ONE_AND_NAN)
NARROW_AND_PACKED = [
    HttpCase("BF16 in and out", _PACKED),
    HttpCase("BF16 out as JSON", infer_binary("bf16", {"inputs": [_BF16]}, _ONE_AND_NAN)),
    HttpCase("BF16, raw", infer("bf16", _ONE_AND_NAN, {"inference-header-content-length": "0"})),
    HttpCase("BF16, an odd byte", infer("bf16", _ONE_AND_NAN[:3], {"inference-header-content-length": "0"})),
    *(
        HttpCase(f"binary both ways, {encoding}", HttpCall(
            "POST", _PACKED.target,
            (*_PACKED.headers, (b"content-encoding", encoding.encode()), (b"accept-encoding", accepted)),
            pack(_PACKED.body),
        ))
        for encoding, accepted, pack in (("gzip", b"deflate", gzip.compress), ("deflate", b"gzip", zlib.compress))
    ),
]  # fmt: skip

_NUL_KEY: Json = {"a\0b": 1}
KEYS_WITH_NUL = [
    HttpCase("generate: U+0000 in a key", post("/v2/models/plain/generate", _NUL_KEY)),
    HttpCase("generate_stream: U+0000 in a key", post("/v2/models/plain/generate_stream", _NUL_KEY)),
    HttpCase("generate: U+0000 in a parameter's key", post("/v2/models/plain/generate", {"parameters": _NUL_KEY})),
    HttpCase("infer: U+0000 in a parameter's key", infer_x(request={"parameters": _NUL_KEY})),
]

CASES = [
    *wire_http_cases.READS,
    *wire_http_cases.INFERS,
    *wire_http_cases.PARAMETERS,
    *wire_http_binary_cases.BINARY,
    *wire_http_binary_cases.RAW,
    *wire_http_binary_cases.COMPRESSED,
    *wire_http_binary_cases.CLASSES,
    *wire_generate_cases.GENERATE,
    *PLACES,
    *SETTINGS,
    *DECOUPLED,
    *NARROW_AND_PACKED,
    *KEYS_WITH_NUL,
    HttpCase("an odd header", infer("plain", infer_x().body, {"x-odd": "1", "traceparent": "00-ab"})),
]

# Of every answer: an error made here is JSON by its content type, too (Triton's is text/plain now and then); a 405
# says what is allowed; what Triton calls its own failure (500, 503) and is a request that it cannot read is a 400.

HEALTH = "KServe's client reads JSON there; and ready means the gateway, not that each model of the repository loads"
SHARED_MEMORY = "off until it is allowed"
HOME_PAGE = "leads browsers to the console"
OURS = "a request that cannot be, or that could kill Triton, is refused here, with the member's name and what to do"
NO_NAME = "a name that could forge a header, a log line or a path is refused"
ORDER = "Triton's Python backend gives outputs in no order"
COUNTED = "it counts calls and time"

# status: the gateway's, where it is not Triton's (a 400 for a 5xx aside). A text or body is not compared.
DIFFERENCES: Mapping[str, tuple[str, int | None]] = {
    **dict.fromkeys(("server", "GET at /v2"), (SHARED_MEMORY, None)),
    **dict.fromkeys(("live", "GET at /v2/health/live"), (HEALTH, None)),
    **dict.fromkeys(("ready", "GET at /v2/health/ready"), (HEALTH, 200)),
    **dict.fromkeys(("statistics of a model", "statistics of a version", "statistics of all",
                     "GET at /v2/models/stats", "GET at /v2/models/plain/stats"), (COUNTED, None)),
    **dict.fromkeys(("inputs of two names", "both outputs, the other way round", "optional input given",
                     "all datatypes as JSON", "all datatypes as binary"), (ORDER, None)),
    **dict.fromkeys(("region of an input", "region and data", "region of an output"), (SHARED_MEMORY, 501)),
    "an output twice": (OURS, 400),
    "GET of /": (HOME_PAGE, 200),
    "POST of /": (HOME_PAGE, 405),
    "unknown model comes before malformed JSON": (OURS, 400),
    **dict.fromkeys(("GET of /v2/models/%2e%2e", "GET of /v2/models/%00", "GET of /v2/models/%FF"), (NO_NAME, 400)),
    **dict.fromkeys(("/v2/trace/setting: '[]'", "/v2/trace/setting: '5'", "/v2/logging: '[]'", "/v2/logging: '5'"),
                    (OURS, 400)),
}  # fmt: skip
# Refused here with 400 as there, or where Triton says 500; in our words.
OUR_WORDS = frozenset(
    (
        *("no dimensions", "no data", "an input twice", "an input is a number", "unknown datatype", "too few strings"),
        *("parameter a null", "size below the shape's", "size over the shape's", "fewer bytes than announced"),
        *("more bytes than announced", "unannounced bytes", "header length is JSON's and more"),
        *("header length is negative", "length of a string ends too early", "too few binary strings"),
        *("not gzip", "nothing, gzip", "brotli", "a batch of 0"),
    )
)
