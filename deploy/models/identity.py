"""The model that answers its input, for measuring the way there and back: `python -m deploy.models.identity`."""

import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from deploy.models.graph import IR_VERSION, OPSET, PRODUCER

SHIPPED = Path(__file__).resolve().parents[2] / "model_repository" / "identity_fp32" / "1" / "model.onnx"
INPUT, OUTPUT = "x", "y"


def identity() -> bytes:
    """The file's bytes: one Identity, float32 [N, SIZE], both dimensions free; the same wherever onnx runs."""
    shape = ["N", "SIZE"]
    graph = helper.make_graph(
        [helper.make_node("Identity", [INPUT], [OUTPUT], name="identity")],
        "identity",
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, shape)],
    )
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name=PRODUCER)
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


if __name__ == "__main__":
    SHIPPED.write_bytes(identity())
    sys.stdout.write(f"wrote {SHIPPED}\n")
