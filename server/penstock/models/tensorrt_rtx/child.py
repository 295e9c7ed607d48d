"""The process that builds one engine: limits itself, reads a request, writes progress and the result."""

import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from penstock.models.inspect.facts import UnreadableModel
from penstock.models.inspect.inspection import Limits, checked_size
from penstock.models.tensorrt_rtx.build import BuildMessage, BuildRequest, BuiltEngine, CannotBuild, OnPhase
from penstock.process_limits import end_with_parent, limit_process

_MAX_REASON = 300  # characters of an unforeseen error
_NICE = 10  # inference comes first
_INSTALL = "run make tensorrt in a checkout, else pip install 'penstock[tensorrt]' (Linux on x86-64 only)"


def main(arguments: list[str]) -> None:
    """Answers one request of standard input on standard output, one JSON message a line.

    arguments: the parent's process id, and the open descriptor of the file to write.
    """
    end_with_parent(int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit fails with EFBIG instead
    with os.fdopen(os.dup(1), "wb") as reply:
        os.dup2(2, 1)  # output of libraries must not mix with the messages
        request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=BuildRequest)

        def send(message: BuildMessage) -> None:
            reply.write(msgspec.json.encode(message) + b"\n")
            reply.flush()

        part = Path(f"/proc/self/fd/{int(arguments[1])}")
        send(_answer(request, part, lambda *phase: send(BuildMessage(*phase))))


def _answer(request: BuildRequest, part: Path, on_phase: OnPhase) -> BuildMessage:
    path, limits = request.model, request.limits
    try:
        size_bytes = checked_size(Path(path), Limits())
        limit_process(limits.memory_bytes + 8 * size_bytes, cpu_s=limits.cpu_s, file_bytes=limits.engine_bytes)
        os.nice(_NICE)
        return BuildMessage(engine=_build(request, part, on_phase))
    except (CannotBuild, UnreadableModel) as error:
        return BuildMessage(problem=str(error))
    except (MemoryError, RecursionError):
        return BuildMessage(problem=f"{path} needs more memory than the limit for building an engine")
    except OSError as error:
        return BuildMessage(problem=f"{path}: no engine was built: {error.filename or ''} {error.strerror or error}")
    except Exception as error:  # noqa: BLE001 - the process's root
        traceback.print_exc()
        what = " ".join(str(error).split())[:_MAX_REASON]
        return BuildMessage(problem=f"{path}: no engine was built: {type(error).__name__}: {what}")


def _build(request: BuildRequest, part: Path, on_phase: OnPhase) -> BuiltEngine:
    from penstock.models.inspect.onnx_file import read_facts  # after the limits, as onnx itself is large

    facts = read_facts(Path(request.model))
    if facts.file_format.is_torch:
        raise CannotBuild(f"{request.model} is a PyTorch program: export the model to ONNX")
    if facts.external_data:
        raise CannotBuild(f"{request.model} has its weights in other files: export it as one file")
    try:
        from penstock.models.tensorrt_rtx.builder import build
    except ImportError as error:
        raise CannotBuild(f"TensorRT-RTX is not installed here ({error}): {_INSTALL}") from error
    return build(request, facts, part, on_phase)


if __name__ == "__main__":
    main(sys.argv[1:])
