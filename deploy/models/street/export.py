"""Writes the trained network as ONNX: `python -m deploy.models.street.export FILE.pt`. Wants PyTorch.

The normalisations are folded into the convolutions; what is left is Conv, Relu, Add and Resize by nearest neighbours.
"""

import argparse
import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch

from deploy.models.graph import Graph, Value
from deploy.models.street.network import HEIGHT, WIDTH, StreetNetwork, folded
from deploy.models.street.stage import print_line

SHIPPED = Path(__file__).resolve().parents[3] / "model_repository" / "street" / "1" / "model.onnx"
INPUT, OUTPUTS = "images", ("heatmap", "distances")
_TOLERANCE = 2e-3  # of answers between -20 and 5, after some 20 layers in float32


class _Writer:
    """Follows StreetNetwork.forward, node by node."""

    def __init__(self, network: StreetNetwork) -> None:
        self.graph = Graph("street")
        self._network = network

    def write(self) -> onnx.ModelProto:
        """The graph from the images to both outputs."""
        images = self.graph.input(INPUT, (3, HEIGHT, WIDTH))
        quarter = self._blocks(self._block(images, "stem"), "quarter")
        eighth = self._blocks(quarter, "eighth")
        sixteenth = self._blocks(eighth, "sixteenth")
        deep = self._block(sixteenth, "thirty_second")
        for name, side in (("thirty_second", sixteenth), ("sixteenth", eighth), ("eighth", quarter)):
            lifted = self._doubled(self._block(deep, f"lift_{name}"), f"lift_{name}.doubled")
            onto = {"thirty_second": "sixteenth", "sixteenth": "eighth", "eighth": "quarter"}[name]
            deep = self.graph.add(lifted, self._block(side, f"side_{onto}"), name=f"merge_{onto}")
        deep = self._block(deep, "neck")
        for name in OUTPUTS:
            head = self._network.get_submodule(name)
            weights, bias = head.weight.detach().numpy(), head.bias.detach().numpy()
            self.graph.output(self.graph.conv(deep, weights, bias, name=name))
        return self.graph.model()

    def _blocks(self, value: Value, name: str) -> Value:
        for number in range(len(self._network.get_submodule(name))):
            value = self._block(value, f"{name}.{number}")
        return value

    def _block(self, value: Value, name: str) -> Value:
        block = self._network.get_submodule(name)
        weights, bias = (tensor.detach().numpy() for tensor in folded(block))
        stride, pad = block[0].stride[0], block[0].padding[0]
        return self.graph.relu(self.graph.conv(value, weights, bias, name=name, stride=stride, pad=pad))

    def _doubled(self, value: Value, name: str) -> Value:
        channels, rows, columns = value.shape
        scales = self.graph.constant(f"{name}.scales", np.array([1, 1, 2, 2], np.float32))
        return self.graph.node(
            "Resize", [value, "", scales], (channels, rows * 2, columns * 2), name=name,
            mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor",
        )  # fmt: skip


def export(network: StreetNetwork) -> bytes:
    """The file's bytes. Raises ValueError where ONNX Runtime answers otherwise than PyTorch."""
    data: bytes = _Writer(network).write().SerializeToString(deterministic=True)
    difference = _difference(network, data)
    if difference > _TOLERANCE:
        raise ValueError(
            f"ONNX Runtime and PyTorch differ by {difference:.2g} (allowed {_TOLERANCE}); the graph is wrong"
        )
    print_line(f"ONNX Runtime and PyTorch agree within {difference:.2g}")
    return data


def _difference(network: StreetNetwork, data: bytes) -> float:
    """The largest, on a batch of three noisy pictures."""
    images = np.random.default_rng(0).random((3, 3, HEIGHT, WIDTH), dtype=np.float32)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    answers = session.run(list(OUTPUTS), {INPUT: images})
    with torch.no_grad():
        wanted = network(torch.from_numpy(images))
    return max(float(np.abs(a - b.numpy()).max()) for a, b in zip(answers, wanted, strict=True))


def main() -> None:
    """Exports as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("weights", type=Path, help="what train wrote")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    chosen = parser.parse_args()
    network = StreetNetwork()
    network.load_state_dict(torch.load(chosen.weights, map_location="cpu", weights_only=True))
    data = export(network.eval())
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_bytes(data)
    print_line(f"wrote {chosen.out}: {len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
