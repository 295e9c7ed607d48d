"""Which TensorRT supports a GPU, by compute capability. Only building engines was ever run.

Sources, read in November 2026: tensorrt-rtx 1.7.1 (ComputeCapability; engines were built for each of them);
tensorrt_rtx_provider_options.h of onnxruntime-ep-nv-tensorrt-rtx-cu13 0.5.0, which names the architectures that the
plug-in supports; TensorRT-RTX's support matrix. TensorRT-RTX refused an H200 when it was tried.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from penstock.gpu.triton_images import TURING, Capability, advise

MIN_DRIVER = 580  # the first branch for CUDA 13, with which the packages are built
_PLUGIN = "ONNX Runtime's plug-in 0.5 runs engines of 8.6, 8.9 and 12.x only"


@dataclass(frozen=True, slots=True)
class _Row:
    """Cards from compute capability `first` up to the next row's. is_served: by the plug-in."""

    first: Capability
    cards: str
    is_served: bool = False


_TABLE = (
    _Row((0, 0), "older than Pascal"),
    _Row((6, 0), "Pascal: P4, P40, P100"),
    _Row((7, 0), "Volta: V100"),
    _Row((7, 5), "Turing: T4, RTX 20"),
    _Row((8, 0), "Ampere: A100, A30"),
    _Row((8, 6), "Ampere: A10, A40, RTX 30", is_served=True),
    _Row((8, 7), "Jetson Orin"),
    _Row((8, 9), "Ada: L4, L40, RTX 40", is_served=True),
    _Row((9, 0), "Hopper: H100, H200"),
    _Row((10, 0), "Blackwell for data centres: B200, B300"),
    _Row((12, 0), "Blackwell: RTX 50, RTX PRO", is_served=True),
    _Row((12, 2), "unknown"),
)
ARCHITECTURES: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1))


# Names and capabilities as in NVIDIA's list "CUDA GPU Compute Capability", those that serve models most often.
_CAPABILITIES: dict[Capability, str] = {
    (6, 0): "P100",
    (6, 1): "P4 P40",
    (7, 0): "V100",
    (7, 5): "T4 RTX2060 RTX2070 RTX2080",
    (8, 0): "A100 A30",
    (8, 6): "A2 A10 A10G A16 A40 RTX3050 RTX3060 RTX3070 RTX3080 RTX3090 RTXA2000 RTXA4000 RTXA5000 RTXA6000",
    (8, 9): "L4 L40 L40S RTX4050 RTX4060 RTX4070 RTX4080 RTX4090",
    (9, 0): "H100 H200 GH200",
    (10, 0): "B200 GB200",
    (10, 3): "B300 GB300",
    (12, 0): "RTX5050 RTX5060 RTX5070 RTX5080 RTX5090",
    (12, 1): "GB10",
}
_BY_NAME = {name: capability for capability, names in _CAPABILITIES.items() for name in names.split()}
GPU_NAMES = "7.5 T4, RTX 20; 8.0 A100, A30; 8.6 A2, A10, A16, A40, RTX 30; 8.9 L4, L40, RTX 40; 12.0 RTX 50; 12.1 GB10"


def capability_of(text: str) -> Capability | None:
    """The compute capability of `8.9`, or of a name such as `L4` or `NVIDIA GeForce RTX 4090`; None if unknown."""
    if found := re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", text, re.ASCII):
        return int(found[1]), int(found[2])
    name = re.sub(r"NVIDIA|GEFORCE|TESLA|[ _-]", "", text.upper())
    return _BY_NAME.get(name.removesuffix("SUPER").removesuffix("TI"))


@dataclass(frozen=True, slots=True)
class TensorRtAdvice:
    """is_built: engines can be built for it. is_served: they can be run. sentence: what runs models on the card."""

    cards: str
    is_built: bool
    is_served: bool
    sentence: str


def advise_tensorrt(capability: Capability) -> TensorRtAdvice:
    """What runs models on a GPU of this compute capability, (8, 9) for 8.9."""
    row = next(row for row in reversed(_TABLE) if row.first <= capability)
    is_built = capability in ARCHITECTURES
    sentence = _other(capability)
    if is_built and row.is_served:
        sentence = (
            f"TensorRT-RTX (penstock models build NAME --for {capability_text(capability)}; driver {MIN_DRIVER} or "
            f"newer; Penstock never ran it on such a GPU), else {sentence}"
        )
    elif is_built:
        sentence = f"{sentence}; TensorRT-RTX builds engines for it, but {_PLUGIN}"
    return TensorRtAdvice(row.cards, is_built, is_built and row.is_served, sentence)


def _other(capability: Capability) -> str:
    """What runs models on a card without TensorRT-RTX."""
    image = advise(capability, None).image
    if image is None:
        return "the CPU"
    ngc = f"TensorRT in Triton's image {image} (penstock models add --accelerator tensorrt)"
    if capability < TURING:  # PyTorch and ONNX Runtime for CUDA 13 start with Turing
        return f"ONNX Runtime built for CUDA 12, or {ngc}"
    return f"CUDA (run make gpu, then penstock models add FILE), or {ngc}"


def capability_text(capability: Capability) -> str:
    """8.9 of (8, 9)."""
    return f"{capability[0]}.{capability[1]}"


def why_not_built(capability: Capability) -> str:
    """Why no engine can be built for it, and what runs models on such a card; empty if one can."""
    advice = advise_tensorrt(capability)
    if advice.is_built:
        return ""
    name = f"{capability_text(capability)} ({advice.cards})"
    return f"TensorRT-RTX builds no engine for {name}, and nothing was built; for such a GPU use {advice.sentence}"


class Accelerator(StrEnum):
    """TensorRT in NGC's onnxruntime backend, by the precision of its kernels."""

    TENSORRT = "tensorrt"  # FP32
    TENSORRT_FP16 = "tensorrt-fp16"

    @property
    def precision(self) -> str:
        """As NGC's backend names it."""
        return "FP16" if self is Accelerator.TENSORRT_FP16 else "FP32"
