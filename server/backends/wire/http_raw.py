"""A raw binary request: a body that is nothing but the bytes of the model's one input."""

import struct

from tritonclient.grpc import model_config_pb2

from server.backends.config_pbtxt import config_from_proto
from server.core.errors import InvalidRequest
from server.core.model import TensorSpec
from server.core.tensor import Datatype, Tensor


def raw_tensor(body: memoryview, proto: model_config_pb2.ModelConfig) -> Tensor:
    """The input that the config describes, one row of it where there is a batch dimension.

    Raises InvalidRequest, in Triton's words, where its shape cannot be told from the byte count.
    """
    config = config_from_proto(proto)
    if len(config.inputs) != 1:
        raise InvalidRequest(
            f"[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(config.inputs)} inputs in '{config.name}' model configuration"
        )
    spec = config.inputs[0]
    batch = (1,) if config.max_batch_size else ()
    if spec.datatype is Datatype.BYTES:
        data = memoryview(struct.pack("<I", len(body)) + bytes(body))
        return Tensor(spec.name, spec.datatype, batch + _one_element(spec), data)
    return Tensor(spec.name, spec.datatype, batch + _deduced(spec, len(body)), body)


def _one_element(spec: TensorSpec) -> tuple[int, ...]:
    if any(size != 1 for size in spec.shape):
        raise InvalidRequest(
            f"[request id: <id_unknown>] For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
        )
    return spec.shape


def _deduced(spec: TensorSpec, size_bytes: int) -> tuple[int, ...]:
    if spec.shape.count(-1) > 1:
        raise InvalidRequest(
            f"[request id: <id_unknown>] The shape of the raw input '{spec.name}' can not be deduced because there are "
            "more than one variable-sized dimension"
        )
    known = spec.datatype.size_bytes or 1
    for size in spec.shape:
        known *= max(size, 1)
    return tuple(size_bytes // known if size == -1 else size for size in spec.shape)
