"""Bad requests: the same class and the same sentence from a real Triton and from the embedded engine."""

import re
import struct

import numpy as np
import pytest

from penstock.protocol.engine import Engine
from penstock.protocol.errors import InferenceError, InvalidRequest, ModelNotFound
from penstock.protocol.inference import Datatype, InferRequest, Tensor, tensor_from_numpy
from tests.engines.onnx_models import SAMPLES

pytestmark = [pytest.mark.xdist_group("contract"), pytest.mark.asyncio(loop_scope="module")]


def fp32(name: str, shape: tuple[int, ...], count: int, datatype: Datatype = Datatype.FP32) -> Tensor:
    """A tensor of so many floats, whatever its shape says."""
    return Tensor(name, datatype, shape, memoryview(np.ones(count, np.float32).tobytes()))


def strings(packed: bytes) -> tuple[Tensor, ...]:
    """The inputs of `types`, its BYTES [1, 2] in these bytes."""
    plain = [tensor_from_numpy(f"in_{name}", SAMPLES[name]) for name in SAMPLES if name != "BYTES"]
    return (*plain, Tensor("in_BYTES", Datatype.BYTES, (1, 2), memoryview(packed)))


X, ID = fp32("x", (1, 3), 3), "[request id: <id_unknown>] "
A, NOTE = fp32("a", (1, 3), 3), " NOTE: Setting a non-zero max_batch_size"
ONE = struct.pack("<I", 1) + b"a"
REFUSALS: list[tuple[str, str, tuple[Tensor, ...], str]] = [
    ("too many inputs", "versions", (X, A), ID + "expected 1 inputs but got 2 inputs for model 'versions'. Got input"),
    ("unknown input", "versions", (A,), "unexpected inference input 'a' for model 'versions'"),
    (
        "missing input",
        "no_config",
        (A,),
        ID + "expected 2 inputs but got 1 inputs for model 'no_config'. Got input(s) ['a'], but missing required "
        "input(s) ['b']. Please provide all required input(s).",
    ),
    ("no input", "versions", (), ID + "expected 1 inputs but got 0 inputs for model 'versions'. Got input(s) [], but "),
    ("input twice", "no_config", (A, A), ID + "input 'a' already exists in request"),
    (
        "too many for an optional one",
        "optional",
        (fp32("x", (3,), 3), fp32("bias", (1,), 1), A),
        ID + "expected number of inputs between 1 and 2 but got 3 inputs for model 'optional'. Got input",
    ),
    ("required one missing", "optional", (fp32("bias", (1,), 1),), "model 'optional': Required inputs (['x'])"),
    ("rows differ", "no_config", (A, fp32("b", (2, 3), 6)), " batch size does not match other inputs for 'no_config'"),
    (
        "wrong datatype",
        "versions",
        (fp32("x", (1, 3), 3, Datatype.INT32),),
        ID + "inference input 'x' data-type is 'INT32', but model 'versions' expects 'FP32'",
    ),
    (
        "wrong shape",
        "versions",
        (fp32("x", (1, 4), 4),),
        ID + "unexpected shape for input 'x' for model 'versions'. Expected [-1,3], got [1,4]." + NOTE,
    ),
    (
        "wrong rank",
        "versions",
        (fp32("x", (3,), 3),),
        ID + "unexpected shape for input 'x' for model 'versions'. Expected [-1,3], got [3]." + NOTE,
    ),
    (
        "no rank",
        "versions",
        (fp32("x", (), 1),),
        ID + "input 'x' has no shape but model requires batch dimension for 'versions'",
    ),
    (
        "wrong shape without batches",
        "scalar",
        (fp32("x", (2,), 2),),
        ID + "unexpected shape for input 'x' for model 'scalar'. Expected [1], got [2].",
    ),
    ("negative size", "versions", (fp32("x", (-1, 3), 3),), "input 'x' for model 'versions'. Expected"),
    (
        "large batch",
        "versions",
        (fp32("x", (9, 3), 27),),
        ID + "inference request batch-size must be <= 8 for 'versions'",
    ),
    ("no rows", "versions", (fp32("x", (0, 3), 0),), "input byte size mismatch for input 'x' for model 'versions'."),
    (
        "few bytes",
        "versions",
        (fp32("x", (1, 3), 2),),
        ID + "input byte size mismatch for input 'x' for model 'versions'. Expected 12, got 8",
    ),
    (
        "many bytes",
        "versions",
        (fp32("x", (1, 3), 4),),
        ID + "input byte size mismatch for input 'x' for model 'versions'. Expected 12, got 16",
    ),
    (
        "few strings",
        "types",
        strings(ONE),
        ID + "expected 2 string elements for inference input 'in_BYTES' for model 'types', got 1",
    ),
    (
        "many strings",
        "types",
        strings(ONE * 3),
        ID + "unexpected number of string elements 3 for inference input 'in_BYTES' for model 'types', expecting 2",
    ),
    (
        "string cut",
        "types",
        strings(ONE + struct.pack("<I", 4) + b"bb"),
        "incomplete string data for inference input 'in_BYTES', expecting string of length 4 but only 2 bytes",
    ),
    (
        "length cut",
        "types",
        strings(ONE + b"\1\0"),
        ID
        + "incomplete string length indicator for inference input 'in_BYTES' for model 'types', expecting 4 bytes but "
        "only 2 bytes available.",
    ),
    (
        "no text",
        "types",
        strings(struct.pack("<I", 1) + b"\xff" + ONE),
        "model 'types': input 'in_BYTES' holds bytes that are not UTF-8",
    ),
    (
        "value out of range",
        "table",
        (tensor_from_numpy("index", np.array([[9]])),),
        "model 'table': Gather node 'lookup': indices element out of data bounds, idx=9",
    ),
]


@pytest.mark.parametrize(("model", "inputs", "text"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
async def test_infer_bad_inputs_are_refused_with_tritons_sentence(
    engine: Engine, model: str, inputs: tuple[Tensor, ...], text: str
) -> None:
    """The caller's mistake has one class and one text, whichever engine looks at it."""
    with pytest.raises(InvalidRequest, match=re.escape(text)):
        await engine.infer(InferRequest(model, inputs))


@pytest.mark.parametrize(
    ("model", "version", "outputs", "kind", "text"),
    [
        ("nope", "", (), ModelNotFound, "Request for unknown model: 'nope' is not found"),
        ("broken_dims", "", (), ModelNotFound, "Request for unknown model: 'broken_dims' has no available versions"),
        ("versions", "9", (), ModelNotFound, "Request for unknown model: 'versions' version 9 is not found"),
        ("versions", "x", (), InvalidRequest, "failed to get model version from specified version string 'x'"),
        ("versions", "-1", (), InvalidRequest, "invalid model version specified '-1' , version should be an integral"),
        ("versions", "", ("z",), InvalidRequest, "unexpected inference output 'z' for model 'versions'"),
    ],
)
async def test_infer_unknown_names_are_refused_with_tritons_sentence(
    engine: Engine, model: str, version: str, outputs: tuple[str, ...], kind: type[InferenceError], text: str
) -> None:
    """Models, versions and outputs that are not there; metadata and config of such a model say the same."""
    with pytest.raises(kind, match=re.escape(text)):
        await engine.infer(InferRequest(model, (X,), version, outputs=outputs))
    if not outputs:
        with pytest.raises(kind, match=re.escape(text)):
            await engine.model_metadata(model, version)
        with pytest.raises(kind, match=re.escape(text)):
            await engine.model_config(model, version)
        assert not await engine.ready(model, version)
