"""Converts an ONNX file to FP16 in memory, by ONNX Runtime's own converter. Inputs and outputs keep their types."""

import warnings
from pathlib import Path

from .config import OrtLoadError

_MAX_BYTES = (1 << 31) - 1  # of a protobuf message


def converted_to_fp16(path: Path) -> bytes:
    """The model with FP16 weights and operators. Raises OrtLoadError."""
    try:
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16
    except ImportError as error:
        raise OrtLoadError(f"the conversion needs the package onnx ({error})") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each constant that FP16 cannot represent; outputs are compared
            model = convert_float_to_float16(onnx.load(str(path)), keep_io_types=True)
        size = int(model.ByteSize())
        if size > _MAX_BYTES:
            raise OrtLoadError(f"the converted model has {size} bytes (limit {_MAX_BYTES})")
        return bytes(model.SerializeToString())
    except OrtLoadError:
        raise
    except Exception as error:  # the converter raises whatever its checks and protobuf raise
        raise OrtLoadError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
