"""Inferences that every one of tritonclient's clients can ask for."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from tests.contract.clients.asking import Asker, Reply
from tests.contract.clients.models import DATATYPES

Calls = dict[str, Callable[[Asker], Reply]]
F6 = np.arange(6, dtype=np.float32).reshape(2, 3)
WORDS = np.array([[b"", "é".encode(), b"\x00\xff", b"x" * 300]], np.object_)
SPECIAL = np.array([[np.nan, np.inf, -np.inf, -0.0]], np.float32)


def fp32(asker: Asker, array: np.ndarray[Any, Any] = F6, **options: Any) -> list[Any]:
    """The usual input."""
    return [asker.tensor(array, "FP32", **options)]


def every_datatype(asker: Asker, **options: Any) -> Reply:
    """All of them in one request: bits that are no zero, and a value at each end of the range where there is one."""
    inputs = [asker.tensor(_values(datatype), datatype, f"in_{datatype}", **options) for datatype in DATATYPES]
    return asker.infer("types", inputs)


def in_json(asker: Asker) -> Reply:
    """Every datatype that JSON can carry, both ways."""
    names = [name for name in DATATYPES if name not in ("FP16", "BF16")]
    values = {name: np.array([b"caf\xc3\xa9", b""], np.object_) if name == "BYTES" else _values(name) for name in names}
    if not asker.is_http:
        return None
    inputs = [asker.tensor(values[name], name, f"in_{name}", binary_data=False) for name in names]
    outputs = [asker.output(f"out_{name}", binary_data=False) for name in names]
    return asker.infer("types", inputs, outputs=outputs)


def sequence(model: str, sequence_id: int | str) -> Callable[[Asker], Reply]:
    """Three requests of one sequence."""

    def ask(asker: Asker) -> Reply:
        return [
            asker.infer(
                model, [asker.tensor(np.array([[number]], np.int32), "INT32")],
                sequence_id=sequence_id, sequence_start=number == 1, sequence_end=number == 3,
            )
            for number in (1, 2, 3)
        ]  # fmt: skip

    return ask


def compressed(way: str) -> Callable[[Asker], Reply]:
    """The request and, over HTTP, the answer."""

    def ask(asker: Asker) -> Reply:
        array = np.zeros((1, 4096), np.float32)
        if asker.is_http:
            options = {"request_compression_algorithm": way, "response_compression_algorithm": way}
        else:
            options = {"compression_algorithm": way}
        return asker.infer("identity_fp32", fp32(asker, array), **options)

    return ask


def compressed_refusal(asker: Asker) -> Reply:
    """An error, where a compressed answer was asked for."""
    way = "response_compression_algorithm" if asker.is_http else "compression_algorithm"
    return asker.infer("identity_fp32", [asker.tensor(F6, "FP32", "wrong")], **{way: "gzip"})


def wanted_in_json(asker: Asker) -> Reply:
    """One output as JSON where it can be."""
    return asker.infer("identity_fp32", fp32(asker), outputs=[asker.output(binary_data=False)])


def late(asker: Asker) -> Reply:
    """A gRPC client that gives up after 0.2 s on a model that takes 0.4 s; whose text it sees is a race."""
    inputs = fp32(asker, np.array([400], np.float32))
    if asker.is_http:
        return asker.infer("sleeps", inputs)
    try:
        return asker.infer("sleeps", inputs, client_timeout=0.2)
    except InferenceServerException as error:
        return error.status()


def _infer(
    model: str, array: np.ndarray[Any, Any] = F6, datatype: str = "FP32", **options: Any
) -> Callable[[Asker], Reply]:
    return lambda asker: asker.infer(model, [asker.tensor(array, datatype)], **options)


def _classes(
    model: str, count: int, array: np.ndarray[Any, Any] = F6, datatype: str = "FP32"
) -> Callable[[Asker], Reply]:
    return lambda asker: asker.infer(model, [asker.tensor(array, datatype)], outputs=[asker.output(class_count=count)])


def _wrong(model: str, *inputs: tuple[str, np.ndarray[Any, Any], str]) -> Callable[[Asker], Reply]:
    return lambda asker: asker.infer(model, [asker.tensor(array, datatype, name) for name, array, datatype in inputs])


CALLS: Calls = {
    "every datatype": every_datatype,
    "every datatype in JSON": in_json,
    "strings": _infer("words", WORDS, "BYTES"),
    "not numbers": _infer("identity_fp32", SPECIAL),
    "no elements": _infer("identity_fp32", np.zeros((1, 0), np.float32)),
    "an id": _infer("identity_fp32", request_id="a b/ü%"),
    "a version": _infer("identity_fp32", model_version="1"),
    "an output": wanted_in_json,
    "an unknown output": lambda asker: asker.infer("identity_fp32", fp32(asker), outputs=[asker.output("z")]),
    "classes": _classes("labelled", 2),
    "more classes than there are": _classes("labelled", 9),
    "parameters": _infer("identity_fp32", parameters={"word": "ü", "number": 7, "yes": True}),
    "a reserved parameter": _infer("identity_fp32", parameters={"sequence_id": 7}),
    "a priority": _infer("ranked", np.array([[1]], np.float32), priority=1),
    "no such priority": _infer("ranked", np.array([[1]], np.float32), priority=9),
    "time enough": _infer("ranked", np.array([[1]], np.float32), timeout=10_000_000),
    "a sequence": sequence("sums", 7),
    "a sequence with a name": sequence("sums_by_word", "seven"),
    "a sequence without a start": _infer("sums", np.array([[1]], np.int32), "INT32", sequence_id=8),
    "a sequence without an id": _infer("sums", np.array([[1]], np.int32), "INT32"),
    "gzip": compressed("gzip"),
    "deflate": compressed("deflate"),
    "a refusal in gzip": compressed_refusal,
    "an unknown model": _infer("unknown"),
    "an unknown version": _infer("identity_fp32", model_version="9"),
    "a version that is no number": _infer("identity_fp32", model_version="one"),
    "a model that is not loaded": _infer("broken"),
    "a model that fails": _infer("fails", F6[0]),
    "a decoupled model": _infer("repeats", np.array([1], np.int32), "INT32"),
    "another input": _wrong("identity_fp32", ("wrong", F6, "FP32")),
    "another input besides": _wrong("identity_fp32", ("x", F6, "FP32"), ("wrong", F6, "FP32")),
    "an input twice": _wrong("identity_fp32", ("x", F6, "FP32"), ("x", F6, "FP32")),
    "no input": _wrong("identity_fp32"),
    "another datatype": _wrong("identity_fp32", ("x", np.zeros((1, 3), np.int8), "INT8")),
    "another rank": _infer("labelled", np.zeros((3,), np.float32)),
    "another shape": _infer("labelled", np.zeros((1, 4), np.float32)),
    "too many rows": _infer("labelled", np.zeros((9, 3), np.float32)),
    "too late": late,
}


def _values(datatype: str) -> np.ndarray[Any, Any]:
    if datatype == "BYTES":
        return WORDS[0]
    if datatype == "BOOL":
        return np.array([True, False, True])
    if datatype == "BF16":
        return np.array([1.5, -2, 3e38], ml_dtypes.bfloat16)
    kind = np.dtype(triton_to_np_dtype(datatype))
    if kind.kind == "f":
        return np.array([1.5, -2, np.finfo(kind).max], kind)
    return np.array([np.iinfo(kind).min, 1, np.iinfo(kind).max], kind)
