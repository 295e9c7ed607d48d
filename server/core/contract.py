"""What every transport keeps of the wire contract: what is blocked, and the bounds that keep the engine alive."""

from collections.abc import Sequence

from server.core.errors import InvalidRequest, NotSupported

# Where no memory is shared: refused with 501 / UNIMPLEMENTED, and not advertised.
BLOCKED_EXTENSIONS = frozenset(("system_shared_memory", "cuda_shared_memory"))
# Triton 2.51 multiplies a shape without looking for overflow; FP32 [1, 2^62] without a byte ends the model's process.
MAX_ELEMENTS = 1 << 40
# Of inputs, and of outputs, in one request.
MAX_TENSORS = 1000
# A head says the same from request to request: what was made of so many, of so many bytes at most, is remembered.
KEPT_HEADS, KEPT_HEAD_BYTES = 512, 1 << 10
_FILE_SETTINGS = {"trace_file": "trace", "log_file": "log"}


def refuse_file_setting(name: str) -> None:
    """Raises NotSupported for a trace or log setting that says where the engine writes.

    In the words of Triton 2.51, which refuses it too; older ones write wherever a client says.
    """
    if name in _FILE_SETTINGS:
        raise NotSupported(f"{_FILE_SETTINGS[name]} file location can not be updated through network protocol")


def check_counts(input_count: int, outputs: Sequence[str]) -> None:
    """Raises InvalidRequest for more inputs or outputs than a request may have, and for an output named twice."""
    if input_count < 2 and len(outputs) < 2:
        return
    for count, kind in ((input_count, "inputs"), (len(outputs), "outputs")):
        if count > MAX_TENSORS:
            raise InvalidRequest(f"{count} {kind} (limit {MAX_TENSORS}); send fewer")
    if len(set(outputs)) < len(outputs):
        twice = next(name for name in outputs if outputs.count(name) > 1)
        raise InvalidRequest(f"output {twice[:80]!r} is given twice")


def checked_name(name: str) -> str:
    """The model's name. Raises InvalidRequest for one that no model has."""
    if not name.isprintable():
        raise InvalidRequest(f"the model's name {name[:80]!r} holds control characters")
    return name


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Raises InvalidRequest for an input that no request can hold. A dimension of 0 makes the others no better."""
    elements = 1
    for size in shape:
        if size < 0:
            raise InvalidRequest(f"input {name!r} has shape {_shown(shape)}; no dimension may be negative")
        elements *= size or 1
        if elements > MAX_ELEMENTS:
            raise InvalidRequest(f"input {name!r} has shape {_shown(shape)}; more than 2^40 elements fit no request")


def _shown(shape: Sequence[int]) -> str:
    return str(list(shape)) if len(shape) <= 8 else f"{list(shape[:8])} and {len(shape) - 8} more dimensions"
