"""The configuration that an inspected file would be served with."""

from penstock.models.inspect.facts import ModelFacts, TensorFacts
from penstock.models.inspect.inspection import Recognition
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest


def proposed_config(facts: ModelFacts, recognition: Recognition, name: str, *, max_batch_size: int = 0) -> ModelConfig:
    """The model's config with the proposed card. max_batch_size: 0 for dims as in the file, with its batch axis.

    Raises InvalidRequest if a tensor's type cannot be served.
    """
    return ModelConfig(
        name=name,
        backend="torch" if facts.file_format.is_torch else "onnxruntime",
        max_batch_size=max_batch_size,
        inputs=tuple(
            _spec(tensor, recognition.input_shape if tensor.name == recognition.input_name else (), max_batch_size)
            for tensor in facts.inputs
        ),
        outputs=tuple(
            _spec(tensor, recognition.output_shapes.get(tensor.name, ()), max_batch_size) for tensor in facts.outputs
        ),
        parameters=recognition.parameters,
    )


def has_wrong_input_shape(facts: ModelFacts, recognition: Recognition) -> bool:
    """Whether the declared input shape is wrong; trial_session.relabelled corrects it."""
    declared = next((tensor.shape for tensor in facts.inputs if tensor.name == recognition.input_name), ())
    return differs(recognition.input_shape, declared)


def differs(true_shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    """Whether a fixed side of the declared shape is wrong. False if the true shape is ()."""
    if not true_shape or len(true_shape) != len(declared):
        return bool(true_shape)
    return any(own > 0 and own != true for true, own in zip(true_shape, declared, strict=True))


def _spec(tensor: TensorFacts, true_shape: tuple[int, ...], max_batch_size: int) -> TensorSpec:
    if tensor.datatype is None or not tensor.has_shape:
        raise InvalidRequest(f"{tensor.name!r} is not a tensor of known rank")
    shape = true_shape or tensor.shape
    return TensorSpec(tensor.name, tensor.datatype, shape[1:] if max_batch_size else shape)
