"""What follows a convolution, in one kernel: bias, activation, sums, and the copy into a concatenation.

By PyTorch each of them reads and writes the whole tensor. Tensors that the kernel does not support (not channels last)
are computed by PyTorch's operators, also on a CPU.
"""

import ctypes
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from .cuda_kernel import CudaFunction, load_kernel


class Activation(IntEnum):
    """In the kernel's numbers. CLAMP has two parameters, LEAKY_RELU one."""

    IDENTITY = 0
    RELU = 1
    CLAMP = 2
    LEAKY_RELU = 3
    SILU = 4
    HARD_SWISH = 5
    SIGMOID = 6
    MISH = 7
    GELU = 8
    HARD_SIGMOID = 9
    TANH = 10


def end_convolution(
    x: Any,
    bias: Any,
    activation: tuple[int, float, float],
    before: Any = None,
    after: Any = None,
    place: tuple[Any, int] | None = None,
) -> Any:
    """activated(x + bias + before) + after, in x's memory if there is no place: nothing else may read x.

    x, before, after: (N, C, H, W). bias: (C,). All but x may be None. activation: of Activation, and its parameters.
    place: (target, channel): the result is written to the tensor `target` from that channel on; that part is returned.
    """
    target = x if place is None else place[0][:, place[1] : place[1] + x.shape[1]]
    if _can_be_launched(x, bias, target):
        _launch(x, bias, activation, [_as_rows(one, x) for one in (before, after)], target)
        return target
    answer = x if bias is None else x + bias.reshape(1, -1, 1, 1)
    answer = answer if before is None else answer + before
    answer = _by_operators(answer, *activation)
    answer = answer if after is None else answer + after
    return answer if place is None else target.copy_(answer)


def empty_concatenation(like: Any, channels: int) -> Any:
    """An empty tensor (N, channels, H, W) for a concatenation. like: one of its parts' convolutions."""
    count, _, height, width = like.shape
    return torch.empty(
        (count, channels, height, width), dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def joined(target: Any, *parts: Any) -> Any:
    """The concatenation `target`, which all parts were written into."""
    del parts
    return target


def _by_operators(x: Any, activation: int, first: float, second: float) -> Any:
    by_operators = {
        Activation.IDENTITY: lambda: x,
        Activation.RELU: lambda: functional.relu(x),
        Activation.CLAMP: lambda: x.clamp(first, second),
        Activation.LEAKY_RELU: lambda: functional.leaky_relu(x, first),
        Activation.SILU: lambda: functional.silu(x),
        Activation.HARD_SWISH: lambda: functional.hardswish(x),
        Activation.SIGMOID: lambda: x.sigmoid(),
        Activation.MISH: lambda: functional.mish(x),
        Activation.GELU: lambda: functional.gelu(x),
        Activation.HARD_SIGMOID: lambda: functional.hardsigmoid(x),
        Activation.TANH: lambda: x.tanh(),
    }
    return by_operators[Activation(activation)]()


_WORDS = {torch.float16: "HALF", torch.bfloat16: "BRAIN", torch.float32: "SINGLE"}
_VECTOR_BYTES = 16
_THREADS = 256
_MOST_ELEMENTS = 1 << 31  # the kernel counts in 32 bits


def _can_be_launched(x: Any, bias: Any, target: Any) -> bool:
    is_known = x.is_cuda and x.dtype in _WORDS and 0 < x.numel() < _MOST_ELEMENTS
    has_rows = _row_step(x) is not None and _row_step(target) is not None and target.shape == x.shape
    return is_known and has_rows and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))


def _row_step(tensor: Any) -> int | None:
    """Elements from one pixel's channels to the next pixel's; None if the memory is not in such rows."""
    if tensor.dim() != 4 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        return None
    count, channels, height, width = tensor.shape
    axes = ((width, tensor.stride(3), 1), (height, tensor.stride(2), width), (count, tensor.stride(0), width * height))
    several = [(stride, rows) for size, stride, rows in axes if size > 1]
    step = int(several[0][0] // several[0][1]) if several else int(channels)
    return step if all(stride == step * rows for stride, rows in several) else None


def _as_rows(other: Any, x: Any) -> Any:
    """The other operand of a sum in x's shape and kind of memory."""
    if other is None:
        return None
    other = other.to(x.dtype).expand(x.shape)
    return other if _row_step(other) is not None else other.contiguous(memory_format=torch.channels_last)


def _launch(x: Any, bias: Any, activation: tuple[int, float, float], others: list[Any], target: Any) -> None:
    tensors = (x, bias, *others, target)
    channels = x.shape[1]
    lanes = _lanes(channels, tensors)
    steps = [0 if one is None else (_row_step(one) or 0) // lanes for one in (x, *others, target)]
    vectors = x.numel() // lanes
    arguments = (
        *(ctypes.c_void_p(0 if one is None else one.data_ptr()) for one in tensors),
        *(ctypes.c_uint(number) for number in (vectors, channels // lanes, *steps)),
        *(ctypes.c_float(number) for number in activation[1:]),
    )
    kernel = _kernel(x.device.index, x.dtype, lanes, Activation(activation[0]))
    stream = torch.cuda.current_stream(x.device).cuda_stream
    kernel((-(-vectors // _THREADS), 1, 1), (_THREADS, 1, 1), arguments, stream=stream)


def _lanes(channels: int, tensors: tuple[Any, ...]) -> int:
    """Elements that a thread handles: 16 bytes of them where all addresses and rows are multiples of that, else 1."""
    lanes = _VECTOR_BYTES // tensors[0].element_size()
    present = [one for one in tensors if one is not None]
    is_aligned = all(one.data_ptr() % _VECTOR_BYTES == 0 for one in present)
    has_whole_rows = all((_row_step(one) or 0) % lanes == 0 for one in present if one.dim() == 4)
    return lanes if channels % lanes == 0 and is_aligned and has_whole_rows else 1


@lru_cache(maxsize=64)
def _kernel(device: int, dtype: Any, lanes: int, activation: Activation) -> CudaFunction:
    source = f"#define {_WORDS[dtype]}\n#define LANES {lanes}\n#define ACTIVATION {activation:d}\n{SOURCE}"
    return load_kernel(source, _NAME, torch.device("cuda", device))


_NAME = "end_convolution"
SOURCE = r"""
#ifdef HALF
typedef unsigned short Word;
static __device__ float number(Word word) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(word)); return f; }
static __device__ Word word(float f) { Word w; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(w) : "f"(f)); return w; }
#endif
#ifdef BRAIN
typedef unsigned short Word;
static __device__ float number(Word word) { return __uint_as_float((unsigned int)word << 16); }
static __device__ Word word(float f) {
  unsigned int bits = __float_as_uint(f);
  return f != f ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#endif
#ifdef SINGLE
typedef float Word;
static __device__ float number(Word word) { return word; }
static __device__ Word word(float f) { return f; }
#endif

#if LANES > 1
typedef uint4 Whole;
#else
typedef Word Whole;
#endif
union Vector { Whole whole; Word words[LANES]; };

static __device__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

static __device__ float activated(float x, float first, float second) {
  switch (ACTIVATION) {
    case 1: return x > 0.0f || x != x ? x : 0.0f;
    case 2: return x < first ? first : (x > second ? second : x);
    case 3: return x > 0.0f ? x : x * first;
    case 4: return x * sigmoid(x);
    case 5: return x * (x < -3.0f ? 0.0f : x > 3.0f ? 1.0f : (x + 3.0f) * (1.0f / 6.0f));
    case 6: return sigmoid(x);
    case 7: return x * tanhf(x > 20.0f ? x : log1pf(__expf(x)));
    case 8: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case 9: return x < -3.0f ? 0.0f : x > 3.0f ? 1.0f : (x + 3.0f) * (1.0f / 6.0f);
    case 10: return tanhf(x);
    default: return x;
  }
}

// Rows of channels, in vectors of LANES; steps from row to row in vectors, 0 for a tensor that is not there.
extern "C" __global__ void end_convolution(
    const Whole* x, const Whole* bias, const Whole* before, const Whole* after, Whole* out,
    unsigned int vectors, unsigned int row_vectors, unsigned int step,
    unsigned int before_step, unsigned int after_step, unsigned int out_step, float first, float second) {
  unsigned int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= vectors) return;
  unsigned int row = at / row_vectors, column = at - row * row_vectors;
  Vector values, biases, earlier, later;
  values.whole = x[(unsigned long long)row * step + column];
  if (bias) biases.whole = bias[column];
  if (before) earlier.whole = before[(unsigned long long)row * before_step + column];
  if (after) later.whole = after[(unsigned long long)row * after_step + column];
  #pragma unroll
  for (int lane = 0; lane < LANES; lane++) {
    float value = number(values.words[lane]);
    if (bias) value += number(biases.words[lane]);
    if (before) value += number(earlier.words[lane]);
    value = activated(value, first, second);
    if (after) value += number(later.words[lane]);
    values.words[lane] = word(value);
  }
  out[(unsigned long long)row * out_step + column] = values.whole;
}
"""
