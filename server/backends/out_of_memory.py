"""Engine errors that mean too little memory for a call, and the text that clients get for them. Sans-IO."""

import re

# In the words of: ONNX Runtime's arena and CUDA calls · torch, CUDA and TensorRT · cuBLAS and cuDNN · TensorFlow ·
# Triton's Python backend, whose tensors pass through a pool in /dev/shm · Python, numpy and C++
_WORDS = re.compile(
    r"failed to allocate memory|cuda failure 2\b"
    r"|out[ _]of[ _]memory|cudaErrorMemoryAllocation|requested amount of gpu memory"
    r"|STATUS_ALLOC_FAILED"
    r"|\bOOM when allocating"
    r"|failed to increase the shared memory pool size|unable to initialize shared memory key"
    r"|failed to create new mapped region"
    r"|\bMemoryError\b|unable to allocate .{1,40} for an array|\bbad_alloc\b",
    re.IGNORECASE,
)

# Errors of Triton's Python backend with the key of the region, up to the end of the JSON string or line.
_SHARED_MEMORY = re.compile(
    r"(?:failed to increase the shared memory pool size|unable to initialize shared memory key"
    r"|failed to create new mapped region)[^\"\n]*",
    re.IGNORECASE,
)
_SHARED_MEMORY_BYTES = re.compile(_SHARED_MEMORY.pattern.encode(), re.IGNORECASE)
_MARK = b"shared memory"
SHARED_MEMORY_FULL = (
    "the engine has too little shared memory for this request; retry later, send less data, or give /dev/shm more room"
)


def means_out_of_memory(reason: str) -> bool:
    """Whether a smaller batch may succeed where this one failed. reason: the engine's, of a failed inference."""
    return _WORDS.search(reason) is not None


def means_shared_memory_full(reason: str) -> bool:
    """Whether /dev/shm was full for Triton's Python backend. reason: the engine's text, with the key of a region."""
    return _SHARED_MEMORY.search(reason) is not None


def without_keys(piece: bytes) -> bytes:
    """A part of an engine's answer, without the keys of regions in errors about shared memory."""
    return _SHARED_MEMORY_BYTES.sub(SHARED_MEMORY_FULL.encode(), piece) if _MARK in piece else piece
