"""The image endpoint's answer."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from server.batching.explanation import Explained
from server.rest.image import ClassesResult, DetectionsResult

RESULTS = (ClassesResult, DetectionsResult)
_ONE_OF_RESULTS = {"oneOf": [{"$ref": f"#/components/schemas/{result.__name__}"} for result in RESULTS]}


class ImageAnswer(msgspec.Struct):
    """One result for each image, in their order; corners in the pixels of the image that was sent."""

    model_name: str
    model_version: str
    results: list[Annotated[msgspec.Raw, Meta(extra_json_schema=_ONE_OF_RESULTS)]]
    timings_ms: Annotated[
        dict[str, float],
        Meta(description="Milliseconds by stage: decode, preprocess, queue, infer, postprocess, total."),
    ]
    batch_size: Annotated[int, Meta(ge=1, description="Rows of the engine's call that this request was part of.")]
    id: Annotated[str, Meta(description="The request's x-request-id.")] | UnsetType = UNSET
    explain: (
        Annotated[
            list[Explained],
            Meta(
                description="Of the batch of each image, or of the call with all of them; with x-penstock-explain: 1."
            ),
        ]
        | UnsetType
    ) = UNSET
