"""What one inference over the wire asks for, whichever protocol it came by."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.core.errors import InvalidRequest
from server.core.infer import Parameter
from server.core.relay import RegionUse
from server.core.tensor import Tensor

RESERVED_PREFIX = "triton_"


@dataclass(frozen=True, slots=True)
class OutputAsk:
    """A wanted output. classes: of the classification extension, 0 for the tensor itself. is_binary: as raw bytes.

    region: where it goes instead of into the answer.
    """

    name: str
    classes: int = 0
    is_binary: bool = False
    region: RegionUse | None = None


@dataclass(frozen=True, slots=True)
class InferAsk:
    """outputs: empty for all of the model's. is_binary: how outputs come that nobody named (REST).

    shared: where the inputs of these names stand; they have no bytes until those are brought.
    raw: the body of a raw binary request, whose one input the model's config describes; inputs is empty then.
    parameters: of the request.
    """

    id: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[OutputAsk, ...]
    is_binary: bool = False
    raw: memoryview | None = None
    shared: Mapping[str, RegionUse] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def output(self, name: str) -> OutputAsk:
        """What is asked of that output."""
        return next((ask for ask in self.outputs if ask.name == name), OutputAsk(name, is_binary=self.is_binary))


def unreadable(name: str, reason: str) -> InvalidRequest:
    """The error for a member of the wrong kind, in Triton's words."""
    return InvalidRequest(f"Unable to parse '{name}': {reason}")
