"""What both transports keep of the wire contract: what is blocked, and the bounds that keep the engine alive."""

from server.core.errors import NotSupported

# Where no memory is shared: refused with 501 / UNIMPLEMENTED, and not advertised.
BLOCKED_EXTENSIONS = frozenset(("system_shared_memory", "cuda_shared_memory"))
# Triton 2.51 multiplies a shape without looking for overflow; FP32 [1, 2^62] without a byte ends the model's process.
MAX_ELEMENTS = 1 << 40
# Of inputs, and of outputs, in one request.
MAX_TENSORS = 1000
# A longer name of a file in a model load ends Triton 2.51.
MAX_FILE_NAME_BYTES = 255
# A head says the same from request to request: what was made of so many, of so many bytes at most, is remembered.
KEPT_HEADS, KEPT_HEAD_BYTES = 512, 1 << 10
_FILE_SETTINGS = {"trace_file": "trace", "log_file": "log"}


def refuse_file_setting(name: str) -> None:
    """Raises NotSupported for a trace or log setting that says where the engine writes.

    In the words of Triton 2.51, which refuses it too; older ones write wherever a client says.
    """
    if name in _FILE_SETTINGS:
        raise NotSupported(f"{_FILE_SETTINGS[name]} file location can not be updated through network protocol")
