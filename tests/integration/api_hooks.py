"""Schemathesis hooks: names of existing models, and the one 5xx status that is allowed.

Loaded by the process that asks (SCHEMATHESIS_HOOKS); nothing here is random, so that a seed repeats a run.
"""

import os
import zlib
from typing import Any

import schemathesis

MODELS = ("identity_fp32", "identity_bytes", "slow", "people", "street", "broken")
VERSIONS = ("1", "1", "2")
INPUT = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2.5]}
SLOW_CALLS_ONE_IN = int(os.environ.get("SLOW_CALLS_ONE_IN", "1"))
ENCODINGS = {"", "identity", "gzip", "deflate"}


def _dice(value: object, sides: int) -> int:
    """The same for the same value."""
    return zlib.crc32(repr(value).encode()) % sides


@schemathesis.hook
def map_path_parameters(_: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two of three calls go to a model of the repository."""
    if path_parameters and "model" in path_parameters and _dice(path_parameters, 3):
        path_parameters["model"] = MODELS[_dice(path_parameters["model"], len(MODELS))]
        if "version" in path_parameters:
            path_parameters["version"] = VERSIONS[_dice(path_parameters["version"], len(VERSIONS))]
    return path_parameters


@schemathesis.hook
def filter_case(_: Any, case: Any) -> bool:
    """One in SLOW_CALLS_ONE_IN of what may load a model or start a process, of which each takes up to half a second."""
    is_slow = case.path.startswith("/v2/repository/models/") or case.path == "/v1/inspect"
    about = (case.path_parameters, case.query, case.headers, case.body)
    return not is_slow or not _dice(about, SLOW_CALLS_ONE_IN)


@schemathesis.hook
def map_case(_: Any, case: Any) -> Any:
    """Half of the inferences that are to be valid have an input that a model takes, so that the rest is looked at."""
    is_valid = case.meta is not None and case.meta.generation.mode.is_positive
    if is_valid and isinstance(case.body, dict) and case.path.endswith("/infer") and _dice(case.body, 2):
        case.body["inputs"] = [INPUT]
    return case


@schemathesis.check
def no_surprising_server_error(_: Any, response: Any, case: Any) -> None:
    """504 for a deadline that was asked for, 501 for an odd compression, 503 for a model that the run unloaded."""
    headers = {name.lower(): str(value) for name, value in (case.headers or {}).items()}
    body = case.body if isinstance(case.body, dict) else {}
    parameters = body.get("parameters")
    has_deadline = "x-request-timeout-ms" in headers or (isinstance(parameters, dict) and parameters.get("timeout"))
    is_odd_encoding = headers.get("content-encoding", "") not in ENCODINGS
    is_unloaded = "is not at ready state" in response.text
    allowed = {504: bool(has_deadline), 501: is_odd_encoding, 503: is_unloaded}
    status = response.status_code
    if status >= 500 and not allowed.get(status, False):
        raise AssertionError(f"{status} {response.text[:500]}")
    if "Traceback" in response.text:
        raise AssertionError(f"a traceback in the answer: {response.text[:500]}")
