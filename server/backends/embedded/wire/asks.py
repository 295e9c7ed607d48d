"""What one inference over the wire asks for, whichever protocol it came by."""

from collections.abc import Mapping
from dataclasses import dataclass

from server.core.errors import InvalidRequest, ModelNotFound
from server.core.infer import Parameter
from server.core.tensor import Tensor

RESERVED_PREFIX = "triton_"


class RegionNotFound(ModelNotFound):
    """A tensor that lies in shared memory: nobody can register a region here. As Triton: 404, NOT_FOUND."""

    def __init__(self, region: Parameter) -> None:
        super().__init__(f"Unable to find shared memory region: '{region}'")


@dataclass(frozen=True, slots=True)
class OutputAsk:
    """A wanted output. classes: of the classification extension, 0 for the tensor itself. is_binary: as raw bytes."""

    name: str
    classes: int = 0
    is_binary: bool = False


@dataclass(frozen=True, slots=True)
class InferAsk:
    """outputs: empty for all of the model's. is_binary: how outputs come that nobody named (REST).

    raw: the body of a raw binary request, whose one input the model's config describes; inputs is empty then.
    """

    id: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[OutputAsk, ...]
    is_binary: bool = False
    raw: memoryview | None = None

    def output(self, name: str) -> OutputAsk:
        """What is asked of that output."""
        return next((ask for ask in self.outputs if ask.name == name), OutputAsk(name, is_binary=self.is_binary))


def refuse_shared_memory(parameters: Mapping[str, Parameter]) -> None:
    """Raises RegionNotFound for a tensor whose parameters name a region."""
    region = parameters.get("shared_memory_region")
    if region is not None:
        raise RegionNotFound(region)


def unreadable(name: str, reason: str) -> InvalidRequest:
    """The error for a member of the wrong kind, in Triton's words."""
    return InvalidRequest(f"Unable to parse '{name}': {reason}")
