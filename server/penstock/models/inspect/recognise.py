"""From a file's facts and the user's hints to the card that it needs. Pure: the trial run checks it afterwards."""

from penstock.models.inspect.facts import ModelFacts, TensorFacts
from penstock.models.inspect.inspection import Hints, Recognition
from penstock.models.inspect.metadata import ultralytics_of
from penstock.vision.spec import NetworkType

_LETTERBOX = {
    "maintain-aspect-ratio": "1",
    "symmetric-padding": "1",
    "padding-value": "114",
    "net-scale-factor": "0.00392156862745098",
}
_CORNER = {"model-color-format": "1", "maintain-aspect-ratio": "1", "padding-value": "114", "net-scale-factor": "1"}


def recognise(facts: ModelFacts, hints: Hints) -> Recognition:
    """The proposed card, its evidence, and the open questions."""
    image, output = facts.inputs[0], facts.outputs[0]
    if len(image.shape) != 4:
        return Recognition(warnings=("the first input is no picture",))
    size = (image.shape[2], image.shape[3])
    metadata = ultralytics_of(facts.metadata)
    if metadata is not None and metadata.imgsz and -1 in size:
        size = metadata.imgsz
    if metadata is not None and len(output.shape) == 3:
        labels = metadata.names
        why = f"its metadata is Ultralytics': task {metadata.task or 'detect'}, {len(labels)} names"
        return _detector(image, size, {"layout": "yolov8", **_LETTERBOX}, labels, why)
    if output.shape[1:] == (_anchors(size), 85):
        return _detector(image, size, {"layout": "yolox", **_CORNER}, (), "one row a grid cell of strides 8, 16, 32")
    return Recognition(warnings=("no layout is known for these outputs",))


def _anchors(size: tuple[int, int]) -> int:
    return sum((size[0] // stride) * (size[1] // stride) for stride in (8, 16, 32))


def _detector(
    image: TensorFacts, size: tuple[int, int], card: dict[str, str], labels: tuple[str, ...], why: str
) -> Recognition:
    parameters = {"network-type": str(NetworkType.DETECTOR.value), **card}
    if labels:
        parameters["labels"] = ";".join(labels)
    return Recognition(
        layout=card["layout"],
        network_type=NetworkType.DETECTOR.value,
        parameters=parameters,
        labels=labels,
        input_name=image.name,
        input_size=size,
        evidence=(why,),
    )
