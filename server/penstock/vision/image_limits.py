"""Limits of one image request, and the predicted time to prepare its images. Without I/O."""

from collections import Counter

from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import InvalidRequest, TooLarge
from penstock.vision.spec import PrepareSpec

MAX_IMAGE_BYTES_IN_MEMORY = 64 << 20
MAX_VARIABLE_SIZE_IMAGES = 4  # in memory at once, for models with a variable input size
MAX_TENSOR_BYTES = 256 << 20  # of the tensor of one request's encoded images


def max_images_in_memory(spec: PrepareSpec) -> int:
    """Maximum images of one request in memory at once, prepared for this network."""
    row_bytes = spec.row_bytes
    return max(1, MAX_IMAGE_BYTES_IN_MEMORY // row_bytes) if row_bytes else MAX_VARIABLE_SIZE_IMAGES


def max_rows(config: ModelConfig) -> int | None:
    """Maximum images in one input: max_batch_size, or the first dimension without it. None for no limit."""
    shape = config.inputs[0].shape
    return config.max_batch_size or (None if len(shape) == 4 and shape[0] == -1 else 1)


def check_image_count(config: ModelConfig, spec: PrepareSpec, count: int) -> None:
    """Checks count and size before decoding. Raises InvalidRequest, TooLarge."""
    most = max_rows(config)
    if most is not None and count > most:
        raise InvalidRequest(
            f"{count} images for model {config.name!r}, which takes {most} at once; send fewer in one request"
        )
    check_tensor_size(count * spec.row_bytes)


def check_tensor_size(size_bytes: int) -> None:
    """Raises TooLarge above MAX_TENSOR_BYTES."""
    if size_bytes > MAX_TENSOR_BYTES:
        raise TooLarge(
            f"the images make a tensor of {size_bytes} bytes (limit {MAX_TENSOR_BYTES}); send fewer or smaller ones"
        )


SMOOTHING_WEIGHT = 0.1  # of one image in the average


class PreparationEstimator:
    """Tracks images in preparation, by model and client, before they reach the gateway's queues."""

    def __init__(self) -> None:
        self._images: Counter[str] = Counter()
        self._clients: Counter[tuple[str, str]] = Counter()
        self._clients_of: Counter[str] = Counter()
        self._usual_s: dict[tuple[str, str], float] = {}

    def rows_with(self, model_name: str, client: str, images: int) -> int:
        """Maximum rows that are ready once these images are. Decoders take turns, so only part of the others counts."""
        own = self._clients[model_name, client]
        clients = self._clients_of[model_name] + (not own)
        return min(self._images[model_name] + images, (own + images) * clients)

    def takes_s(self, model_name: str, client: str) -> float:
        """Average seconds for one of the client's pictures, with the wait for a decoder; 0 if none is in progress."""
        return self._usual_s.get((model_name, client), 0.0)

    def began(self, model_name: str, client: str) -> None:
        """Counts one more image in preparation."""
        self._images[model_name] += 1
        if not self._clients[model_name, client]:
            self._clients_of[model_name] += 1
        self._clients[model_name, client] += 1

    def ended(self, model_name: str, client: str, seconds: float) -> None:
        """Counts one image less, whether it succeeded or failed."""
        self._images[model_name] -= 1
        key = model_name, client
        self._clients[key] -= 1
        if not self._clients[key]:
            del self._clients[key]
            self._clients_of[model_name] -= 1
            self._usual_s.pop(key, None)
            return
        usual_s = self._usual_s.get(key, 0.0)
        self._usual_s[key] = usual_s + (seconds - usual_s) * SMOOTHING_WEIGHT
