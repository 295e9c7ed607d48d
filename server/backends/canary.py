"""The canary: a real inference, of zeros or a grey picture, that tells whether a living engine can work. Sans-IO."""

import math

from server.backends.row_trial import GREY_JPEG
from server.core.infer import InferRequest
from server.core.model import ModelConfig, TensorSpec
from server.core.tensor import Datatype, Tensor, tensor_from_bytes

CANARY_ID = "penstock-canary"
MAX_CANARY_BYTES = 16 << 20


def canary_request(config: ModelConfig, *, deadline: float) -> InferRequest | None:
    """One row of zeros for the model's inputs, 1 where a dimension varies; BYTES inputs get empty strings.

    A model that decodes pictures gets a grey one.
    None where zeros say nothing: models that keep state or answer more than once, inputs over 16 MiB, and models
    whose parameter `canary` says `off`.
    """
    if config.has_sequence_batching or config.is_decoupled or config.parameters.get("canary") == "off":
        return None
    batch = (1,) if config.max_batch_size > 0 else ()
    if len(config.inputs) == 1 and config.parameters.get("image-decoder", "").lower() in ("1", "engine"):
        spec = config.inputs[0]
        picture = tensor_from_bytes(spec.name, (GREY_JPEG,), (*batch, *spec.shape))
        return InferRequest(config.name, (picture,), id=CANARY_ID, deadline=deadline)
    inputs = tuple(_zeros(spec, batch) for spec in config.inputs)
    if not inputs or sum(tensor.data.nbytes for tensor in inputs) > MAX_CANARY_BYTES:
        return None
    return InferRequest(config.name, inputs, id=CANARY_ID, deadline=deadline)


def _zeros(spec: TensorSpec, batch: tuple[int, ...]) -> Tensor:
    shape = (*batch, *[1 if size < 0 else size for size in spec.shape])
    size_bytes = 4 if spec.datatype is Datatype.BYTES else spec.datatype.size_bytes or 0
    count = math.prod(shape)
    data = bytes(count * size_bytes) if count * size_bytes <= MAX_CANARY_BYTES else bytes(MAX_CANARY_BYTES + 1)
    return Tensor(spec.name, spec.datatype, shape, memoryview(data))
