"""Whether an engine's words mean that a call needed more memory than there was. Sans-IO."""

import re

# In the words of: ONNX Runtime's arena and CUDA calls · torch, CUDA and TensorRT · cuBLAS and cuDNN · TensorFlow ·
# Triton's Python backend, whose tensors pass through a pool in /dev/shm · Python, numpy and C++
_WORDS = re.compile(
    r"failed to allocate memory|cuda failure 2\b"
    r"|out[ _]of[ _]memory|cudaErrorMemoryAllocation|requested amount of gpu memory"
    r"|STATUS_ALLOC_FAILED"
    r"|\bOOM when allocating"
    r"|failed to increase the shared memory pool size"
    r"|\bMemoryError\b|unable to allocate .{1,40} for an array|\bbad_alloc\b",
    re.IGNORECASE,
)


def means_out_of_memory(reason: str) -> bool:
    """Whether a smaller batch may succeed where this one failed. reason: the engine's, of a failed inference."""
    return _WORDS.search(reason) is not None
