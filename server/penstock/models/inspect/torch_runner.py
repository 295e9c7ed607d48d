"""Runs a PyTorch program for the trial, in the environment that has PyTorch. Penstock is not installed there.

A message is four bytes of length, JSON of that length, and the bytes of its tensors.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np

_PR_SET_PDEATHSIG = 1
_MAX_REASON = 2000  # characters


def main(file: str, file_format: str, memory_bytes: int, cpu_s: int) -> None:
    """Loads the program, reports it, then answers one message after the other until its input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    limits = (resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, 0)
    for limit, most in (*limits, (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    # PyTorch wants a folder for temporary files and caches when it is imported; this process cannot write to one.
    tempfile.tempdir, os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.devnull, os.sep
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    try:
        import torch

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        if file_format == "torchscript":
            program = torch.jit.load(file, map_location="cpu").eval()
        else:
            program = torch.export.load(file).module(check_guards=False)
    except Exception as error:  # noqa: BLE001  the process's root: any error of PyTorch, or of the program
        _send(replies, {"error": _reason(error)}, [])
        return
    _send(replies, {"torch": str(torch.__version__)}, [])
    while (feed := _receive(sys.stdin.buffer)) is not None:
        try:
            tensors = torch.utils._pytree.tree_leaves(program(*map(torch.from_numpy, feed)))
            outputs = [_array(torch, tensor) for tensor in tensors]
        except Exception as error:  # noqa: BLE001  as above
            _send(replies, {"error": _reason(error)}, [])
        else:
            described = [{"dtype": one.dtype.str, "shape": one.shape} for one in outputs]
            _send(replies, {"tensors": described}, outputs)


def _array(torch: Any, tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"an output is a {type(tensor).__name__}, not a tensor")
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _receive(file: IO[bytes]) -> list[Any] | None:
    """Writable arrays; None at the end."""
    head = file.read(4)
    if len(head) < 4:
        return None
    described = json.loads(file.read(struct.unpack("<I", head)[0]))["tensors"]
    arrays = [np.empty(one["shape"], one["dtype"]) for one in described]
    for array in arrays:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(file.read(array.nbytes), np.uint8)
    return arrays


def _send(file: IO[bytes], header: dict[str, Any], arrays: list[Any]) -> None:
    text = json.dumps(header).encode()
    file.write(struct.pack("<I", len(text)) + text)
    file.flush()  # a reader that refuses a size ends this process before the copy
    for array in arrays:
        file.write(np.ascontiguousarray(array).data)
    file.flush()


def _reason(error: BaseException) -> str:
    """TorchScript puts a traceback before the reason, other parts of PyTorch put advice after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if "TorchScript interpreter" in lines[0] else 0][:_MAX_REASON]


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
