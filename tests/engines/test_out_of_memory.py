"""An engine's words for too little memory, as engines of many kinds have written them."""

import grpc
import pytest

from penstock.engines.triton.grpc_client import error_of
from penstock.gateway.grpc import status_codes as grpc_errors
from penstock.gateway.rest.responses import response_of
from penstock.protocol.errors import EngineFailed, InvalidRequest, OutOfMemory

ONNX_RUNTIME = (
    "onnx runtime error 6: Non-zero status code returned while running Mul node. Name:'Mul_8702' Status Message: "
    "/workspace/onnxruntime/onnxruntime/core/framework/bfc_arena.cc:368 void* onnxruntime::BFCArena::"
    "AllocateRawInternal(size_t, bool, onnxruntime::Stream*, bool, onnxruntime::WaitNotificationFn) "
    "Failed to allocate memory for requested buffer of size 2830172160"
)
TOO_LITTLE = [
    ONNX_RUNTIME,
    "CUDA failure 2: out of memory ; GPU=0 ; hostname=a ; expr=cudaMalloc((void**)&p, size);",
    "Failed to process the request(s) for model 'm_0_0', message: OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 12.00 GiB. GPU 0 has a total capacity of 23.69 GiB\n\nAt:\n  /m/1/model.py(20): execute\n",
    "PyTorch execute failure: CUDA error: out of memory",
    "defaultAllocator.cpp::nvinfer1::internal::DefaultAllocator::allocate::63] Error Code 1: Cuda Runtime (out of "
    "memory)",
    "Requested amount of GPU memory (4294967296 bytes) could not be allocated. There may not be enough free memory "
    "for allocation to succeed.",
    "CUDA runtime error in ::cudaMallocAsync(ptr, n, mCudaStream->get()): out of memory",
    "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CNMEM_STATUS_OUT_OF_MEMORY",
    "OOM when allocating tensor with shape[64,3,640,640] and type float on /job:localhost",
    "Failed to increase the shared memory pool size for key 'triton_python_backend_shm_region_1' to 67108864 bytes",
    "message: MemoryError: Unable to allocate 2.66 GiB for an array with shape (357913942,) and data type int64",
    "std::bad_alloc",
    "onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*) Available memory of 3220176640 is "
    "smaller than requested bytes of 3999999983616",
]


@pytest.mark.parametrize("text", TOO_LITTLE, ids=range(len(TOO_LITTLE)))
def test_engines_words_for_too_little_memory_are_out_of_memory(text: str) -> None:
    """Whichever library says so: who forms batches may halve them."""
    error = error_of(grpc.StatusCode.INTERNAL, text)

    assert isinstance(error, OutOfMemory)
    assert "\n" not in error.message


@pytest.mark.parametrize(
    "text",
    [
        "index 9 is out of bounds for axis 0 with size 4",
        "onnx runtime error 2: node index out of range, memory layout NCHW expected",
        "the weights are gone",
        "unable to allocate a sequence slot",
        "bloom when allocating petals",
    ],
)
def test_other_failures_are_not_taken_for_too_little_memory(text: str) -> None:
    """A batch is not made smaller because a model is broken."""
    assert type(error_of(grpc.StatusCode.INTERNAL, text)) is EngineFailed


def test_what_the_caller_did_wrong_stays_the_callers() -> None:
    """An INVALID_ARGUMENT that speaks of memory is one."""
    assert type(error_of(grpc.StatusCode.INVALID_ARGUMENT, "shared memory out of memory")) is InvalidRequest


def test_out_of_memory_is_503_with_retry_after_and_resource_exhausted() -> None:
    """The table's row: waiting may help, and the engine lives."""
    error = OutOfMemory("model 'm' failed: CUDA out of memory")
    answer = response_of(error)

    assert (answer.status_code, error.reason) == (503, "engine_out_of_memory")
    assert answer.headers["retry-after"] in ("1", "2")
    status = grpc_errors.status_of(error)
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 1 <= float(dict(status.trailing_metadata)["retry-after"]) <= 2
