"""One memory arena of ONNX Runtime for all models of this process, with a limit below the process's own.

A model that fills it gets an error, and the rest of the gateway still has memory. That matters because some libraries,
such as gRPC, end the process if an allocation fails.
"""

import contextlib
import functools
import resource
import threading

import onnxruntime as ort

from penstock.engines.ort_serving.memory import RESERVE, machine_bytes, mapped_bytes
from penstock.engines.ort_serving.session import CPU_ONLY, ORT_ERRORS, new_options, release_arena

_SHARE = 0.85  # of the memory that the process can still use
_DEFAULT = -1  # ONNX Runtime's
_IDENTITY = (  # an ONNX model of one node
    b'\x08\x08:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)
_lock = threading.Lock()


class SharedArena:
    """The arena of this process. It exists until the process ends."""

    def __init__(self, limit_bytes: int) -> None:
        """Raises ORT_ERRORS if the process has such an arena already."""
        memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        sizes = dict.fromkeys(
            ("arena_extend_strategy", "initial_chunk_size_bytes", "max_dead_bytes_per_chunk"), _DEFAULT
        )
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_mem": limit_bytes, **sizes}))
        options = new_options({})
        self.use(options)
        self._session = ort.InferenceSession(_IDENTITY, options, providers=CPU_ONLY)

    def use(self, options: ort.SessionOptions) -> None:
        """Makes sessions with these options allocate in the arena."""
        options.add_session_config_entry("session.use_env_allocators", "1")

    def release_memory(self) -> None:
        """Returns its unused memory to the system."""
        release_arena(self._session)


def shared_arena() -> SharedArena | None:
    """The process's arena, created at the first call. None if the memory of this machine is not known."""
    with _lock:
        return _shared_arena()


@functools.cache
def _shared_arena() -> SharedArena | None:
    machine, mapped = machine_bytes(), mapped_bytes()
    if machine is None or mapped is None:
        return None
    total, available = machine
    room = max(available - int(total * RESERVE), total // 2)  # the limit of the arena cannot change later
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        room = min(room, max(hard - mapped[0], 0))
    with contextlib.suppress(*ORT_ERRORS):
        return SharedArena(int(room * _SHARE))
    return None
