"""What is asked of the image endpoint, and what it answers."""

from dataclasses import dataclass

from server.core.batching import Explanation
from server.core.infer import Timings
from server.core.model import ModelConfig
from server.core.result import VisionResult
from server.core.tensor import Datatype
from server.vision.card import VisionCard


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """Encoded images for one model. deadline: monotonic seconds, None for the model's own.

    client: whom the queue of a model that the gateway owns is fair to.
    """

    model_name: str
    model_version: str
    images: tuple[bytes, ...]
    deadline: float | None
    id: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True)
class ImageResponse:
    """One result an image, in the order asked. labels: by class_id; may be shorter than the ids that occur.

    explanations: one an image, where the gateway formed the batches.
    """

    model_name: str
    model_version: str
    results: tuple[VisionResult, ...]
    labels: tuple[str, ...]
    timings: Timings
    total_s: float
    explanations: tuple[Explanation, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A model that says how it sees images."""

    config: ModelConfig
    card: VisionCard


def may_take_images(config: ModelConfig) -> bool:
    """What is quickly said, so that requests of BYTES to other models lose no time."""
    if "network-type" not in config.parameters:
        return False
    takes_words = any(spec.datatype is Datatype.BYTES for spec in config.inputs)
    return not takes_words or "image-decoder" in config.parameters
