"""What is asked of an engine, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.core.batching import Explanation
from server.core.tensor import Tensor

Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds; a stage that did not happen is 0.

    batch_size: rows of the engine call that carried the request, as far as the gateway formed it.
    """

    decode: float = 0.0
    preprocess: float = 0.0
    queue: float = 0.0
    infer: float = 0.0
    postprocess: float = 0.0
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One inference.

    model_version: empty for the engine's choice. outputs: names wanted, empty for all.
    deadline: monotonic seconds, None for none. metadata: told to an engine that speaks gRPC, such as traceparent.
    """

    model_name: str
    inputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    deadline: float | None = None
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class InferResponse:
    """The answer to one inference, in the engine's order of outputs.

    explanation: of the batch that it was part of, where the gateway formed it.
    """

    model_name: str
    model_version: str
    outputs: tuple[Tensor, ...]
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    explanation: Explanation | None = None

    def output(self, name: str) -> Tensor | None:
        """The output of that name, or None."""
        return next((tensor for tensor in self.outputs if tensor.name == name), None)
