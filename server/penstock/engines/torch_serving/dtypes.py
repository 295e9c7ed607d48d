"""The torch.dtype of tensors in requests and in the network."""

from typing import Any

import torch

from .config import Precision

FLOATS = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}
WIRE_TYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}


def network_type(wire_type: str, precision: Precision) -> Any:
    """The program's dtype for an input of that wire type: floats have its precision; UINT8 stays."""
    dtype = WIRE_TYPES[wire_type]
    return FLOATS[precision] if dtype.is_floating_point else dtype
