"""What a model file declares, as plain values that can cross a process boundary."""

from dataclasses import dataclass, field
from enum import StrEnum

from penstock.protocol.inference import Datatype

_LONGEST_AXIS = 24  # characters; exporters write whole formulas


class UnreadableModel(Exception):
    """The file cannot be inspected. str() is one sentence for the user, with the file's fault."""


class FileFormat(StrEnum):
    """Of a model file. PT2: a program of torch.export."""

    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"
    PT2 = "pt2"

    @property
    def is_torch(self) -> bool:
        """Whether PyTorch runs it. Such a file can contain any code."""
        return self is not FileFormat.ONNX


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A declared input or output. shape: -1 for a free axis. axes: the free axes' names, "" for fixed or unnamed.

    measured: an output's shape in a run of one picture, None before it.
    """

    name: str
    datatype: Datatype | None  # None for a type that no tensor of the protocol has, such as a sequence
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    has_shape: bool = True  # False if the file declares no rank
    measured: tuple[int, ...] | None = None

    def __str__(self) -> str:
        sides = (
            (name if len(name) <= _LONGEST_AXIS else f"{name[:_LONGEST_AXIS]}…") or str(side)
            for side, name in zip(self.shape, self.axes, strict=True)
        )
        shape = f"[{', '.join(sides)}]" if self.has_shape else "of unknown rank"
        return f"{self.name} {self.datatype or 'no tensor'} {shape}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the file declares. inputs: without initializers. tail: operator types near each output, nearest first.
    outputs: empty for TorchScript, until a run shows them.

    metadata: metadata_props, bounded. external_data: locations, as in the file. custom_domains: of operators that
    ONNX Runtime does not have.
    """

    path: str
    size_bytes: int
    sha256: str
    producer: str
    ir_version: int
    opset: int
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    tail: dict[str, tuple[str, ...]] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    custom_domains: tuple[str, ...] = ()
    external_data: tuple[str, ...] = ()
    is_quantised: bool = False
    node_count: int = 0
    first_convolution_channels: int = 0  # input channels of the first Conv; 0 if it has none
    stem_kernel: int = 0  # largest side of the kernels that read 1 or 3 channels: 14 or 16 in a vision transformer
    file_format: FileFormat = FileFormat.ONNX

    def output(self, name: str) -> TensorFacts | None:
        """The output of that name."""
        return next((tensor for tensor in self.outputs if tensor.name == name), None)

    def all_tail(self) -> frozenset[str]:
        """Operator types near any output."""
        return frozenset(kind for kinds in self.tail.values() for kind in kinds)
