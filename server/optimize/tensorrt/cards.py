"""Which TensorRT builds what for which card. Pure.

Sources, read in November 2026: the support matrices of TensorRT 8.6.1, 10.1.0 and 10.16 (docs.nvidia.com/deeplearning/
tensorrt), the release notes of 10.0 (Pascal removed), 10.5 (Volta removed) and 10.8 (Blackwell added), and the
migration guide from 10.x to 11.x (weak typing removed).
"""

from enum import StrEnum

OLDEST = (8, 6)
LAST_FOR_PASCAL, LAST_FOR_VOLTA, FIRST_FOR_BLACKWELL = (8, 6), (10, 4), (10, 8)
VOLTA, TURING, BLACKWELL = (7, 0), (7, 5), (10, 0)
_SLOW_HALF = (6, 1)  # P4, P40 and every GeForce of that family
_SLOW_INT8 = (6, 0)  # P100

Version = tuple[int, int]
Capability = tuple[int, int]


class Precision(StrEnum):
    """What the layers compute in, where TensorRT has a kernel for it."""

    FP16 = "fp16"
    INT8 = "int8"


def refusal(version: Version, capability: Capability, precision: Precision) -> str | None:
    """Why this TensorRT builds nothing of the kind for the card, with what would; None where it does."""
    said, card = _dotted(version), f"compute capability {_dotted(capability)}"
    if version < OLDEST:
        return f"TensorRT {said} is too old: 8.6 is the oldest that is understood"
    if capability < VOLTA and version > LAST_FOR_PASCAL:
        return f"TensorRT {said} does not build for {card} (Pascal): 8.6 was the last, in Triton's image 24.04"
    if VOLTA <= capability < TURING and version > LAST_FOR_VOLTA:
        return f"TensorRT {said} does not build for {card} (Volta): 10.4 was the last, in Triton's image 24.10"
    if capability >= BLACKWELL and version < FIRST_FOR_BLACKWELL:
        return f"TensorRT {said} does not know {card} (Blackwell): 10.8 was the first that does"
    if precision is Precision.FP16 and capability == _SLOW_HALF:
        return f"{card} computes FP16 at a crawl: add --int8"
    if precision is Precision.INT8 and capability == _SLOW_INT8:
        return f"{card} has no 8-bit instructions: leave out --int8"
    return None


def computes_half(capability: Capability) -> bool:
    """Whether layers that are not quantised should be let into FP16."""
    return capability != _SLOW_HALF


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
