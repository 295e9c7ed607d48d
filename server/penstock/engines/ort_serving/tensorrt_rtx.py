"""Names of TensorRT-RTX engines beside a model. `penstock models build` writes them."""

import hashlib

from .placement import Precision

PROVIDER = "NvTensorRTRTXExecutionProvider"
FOLDER = "tensorrt-rtx"  # beside the ONNX file
RUNTIME_CACHE = "runtime-cache"  # in FOLDER: kernels that the plug-in compiles at the first runs


def engine_key(model_sha256: str, version: str) -> str:
    """An engine fits one file and one version of TensorRT-RTX, such as 1.7.1.116 (only the first three numbers)."""
    release = ".".join(version.split(".")[:3])
    return hashlib.sha256(f"{model_sha256} {release}".encode()).hexdigest()[:16]


def engine_prefix(stem: str, capability: tuple[int, int], precision: Precision) -> str:
    """Prefix of the names of a model's engines for a compute capability. stem: of the ONNX file's name."""
    return f"{stem}-sm{capability[0]}{capability[1]}-{precision.value}-"
