"""How many images of one request are in memory at once, and how many a model takes. Pure."""

from server.core.errors import InvalidRequest, TooLarge
from server.core.model import ModelConfig
from server.vision.spec import PrepareSpec

WAVE_BYTES = 64 << 20
OWN_SIZE_WAVE = 4  # images at once of a model that takes them at their own size
MAX_TENSOR_BYTES = 256 << 20  # of the tensor that one request's encoded images become


def wave_size(spec: PrepareSpec) -> int:
    """How many images of one request are in memory at once, prepared for this network."""
    row_bytes = spec.row_bytes
    return max(1, WAVE_BYTES // row_bytes) if row_bytes else OWN_SIZE_WAVE


def most_rows(config: ModelConfig) -> int | None:
    """Images in one input: by max_batch_size; without it as many as a variable first dimension takes, else one."""
    shape = config.inputs[0].shape
    return config.max_batch_size or (None if len(shape) == 4 and shape[0] == -1 else 1)


def refuse_too_many(config: ModelConfig, spec: PrepareSpec, count: int) -> None:
    """What can be said before an image is decoded. Raises InvalidRequest, TooLarge."""
    most = most_rows(config)
    if most is not None and count > most:
        raise InvalidRequest(
            f"{count} images for model {config.name!r}, which takes {most} at once; send fewer in one request"
        )
    refuse_too_large(count * spec.row_bytes)


def refuse_too_large(size_bytes: int) -> None:
    """Raises TooLarge for a tensor of so many bytes."""
    if size_bytes > MAX_TENSOR_BYTES:
        raise TooLarge(
            f"the images make a tensor of {size_bytes} bytes (limit {MAX_TENSOR_BYTES}); send fewer or smaller ones"
        )
