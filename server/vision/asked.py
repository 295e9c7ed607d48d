"""What is asked of the image endpoint, and what it answers."""

import base64
import zlib
from dataclasses import dataclass

from server.core.batching import Explanation
from server.core.infer import Timings
from server.core.model import ModelConfig
from server.core.result import VisionResult
from server.core.tensor import Datatype
from server.vision.card import VisionCard

TRIAL_PICTURE = zlib.decompress(  # a grey JPEG of 640 x 480 pixels
    base64.b64decode(
        "eNr7f+P/AwYBLzdPNwZGRgYGRiBk+H+bwZlBQ0ZOWU5SQ1lRWVdbw8AmxdHG3NymOiLWM2Viw8xp/Q09XQu2PDu8YNWttV09J/6fvvXu6///"
        "/2cfBBK//j/7+/8HyBBGbV1dG1ObMkfHsh9Le5b+IBn8P8AgyMH4gKmBmVGJgUmQkVmQ8f8RBhGQI1EBSFQAqygjVlFBTNFbDDzMjEBLmAUZ"
        "7BlGwSgYBaNgFIyCkQz+3wQATIJxlg=="
    )
)


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
