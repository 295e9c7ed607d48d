"""The card and the configuration that an inspected file would be served with, and what only its user can say."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.models.inspect import labels
from penstock.models.inspect.facts import ModelFacts, TensorFacts
from penstock.models.inspect.families import FAMILIES, Family, Resize, card_parameters, family_of, with_hints
from penstock.models.inspect.inspection import Hints, Question, Recognition
from penstock.models.inspect.model_signature import LayoutMatch, ModelSignature
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Datatype
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.spec import NetworkType

_STANDARD_DEVIATIONS = ("0.229,0.224,0.225 (ImageNet's)", "1,1,1")
_NORMALISATIONS = (
    "0.485,0.456,0.406 with --std 0.229,0.224,0.225 (ImageNet)",
    "0.5,0.5,0.5 with --std 0.5,0.5,0.5 (-1 to 1)",
    "0,0,0 with --std 1,1,1 (0 to 1; with --scale 1: 0 to 255)",
)
_BODY = (
    "nose;left_eye;right_eye;left_ear;right_ear;left_shoulder;right_shoulder;left_elbow;right_elbow;left_wrist;"
    "right_wrist;left_hip;right_hip;left_knee;right_knee;left_ankle;right_ankle"
)
_BODY_SKELETON = "15-13;13-11;16-14;14-12;11-12;5-11;6-12;5-6;5-7;6-8;7-9;8-10;1-2;0-1;0-2;1-3;2-4;3-5;4-6"
_SCALE = "net-scale-factor"
_PATCH = 14  # least kernel of a vision transformer's patches


def size_question(model: ModelSignature) -> Question:
    """Asks for the network's size."""
    return Question(
        f"input {model.image} takes pictures of any size, and the metadata does not name the trained size",
        "--input-size",
        ("640x640", "416x416", "320x320", "224x224"),
    )


def given_labels(hints: Hints) -> str:
    """How many labels the user gave, and where."""
    count, is_file = len(hints.labels), hints.labels_origin not in ("", "--labels")
    place = f" in {hints.labels_origin}" if is_file else ""
    return f"{count} label{'s are' if count > 1 else ' is'} given{place}"


def count_question(hints: Hints, count: int) -> Question:
    """Asks for as many labels as the model has classes."""
    sentence = f"{given_labels(hints)}, but the model has {count} class{'es' if count > 1 else ''}"
    return Question(sentence, "--labels", (f"a file of {count} names",))


def _lacks_std(hints: Hints) -> bool:
    """Whether a mean of values from 0 to 1 was given alone: networks that have one were trained with both."""
    return any(hints.mean) and max(hints.mean) <= 1.0 and not hints.std and hints.scale is None


def proposed_card(model: ModelSignature, match: LayoutMatch, corrected: Mapping[str, str]) -> Recognition:
    """The card of the matched layout, with evidence, assumptions and open questions. corrected: by the trial."""
    family = _family(model, match)
    network_type = LAYOUTS[match.layout].network_type if match.layout in LAYOUTS else NetworkType.DETECTOR
    labelled = _labels(model, match)
    questions = [*match.questions, *labelled.questions]
    if match.needs_size and model.size is None:
        questions.append(size_question(model))
    if family.ambiguity and model.image.datatype is not Datatype.UINT8:
        questions.append(Question(family.ambiguity, "--mean", _NORMALISATIONS))
    if _lacks_std(model.hints):
        questions.append(Question("a mean is given without a standard deviation", "--std", _STANDARD_DEVIATIONS))
    points, point_questions = _points(model, match)
    card = {
        "network-type": str(network_type.value),
        "layout": match.layout,
        **_input_card(model, match, family),
        **_output_card(model, match),
        **match.card,
        **labelled.card,
        **points,
        **_thresholds(model, match, network_type),
        **corrected,
        **({} if model.hints.resize else model.metadata.hints.parameters),
        **model.hints.parameters,
    }
    return Recognition(
        layout=match.layout,
        network_type=network_type.value,
        family=family.name,
        parameters={key: value for key, value in card.items() if value},
        labels=labelled.names,
        class_count=match.class_count,
        keypoint_names=tuple(filter(None, card.get("keypoint-names", "").split(";"))),
        input_name=model.image.name,
        input_size=None if _follows_picture(model, match) else model.size,
        input_shape=_input_shape(model, match),
        rows_follow_batch=match.rows_follow_batch,
        evidence=(*match.why, *_preprocessing_evidence(model, family), *_labels_evidence(model, labelled.names)),
        assumptions=(*_assumed_normalisation(model, family), *_assumed_labels(model, match, labelled.names)),
        questions=(*questions, *point_questions),
        warnings=(*match.warnings, *labelled.warnings, *_size_warnings(model), *_unused_points(model, match)),
    )


def _family(model: ModelSignature, match: LayoutMatch) -> Family:
    family = FAMILIES[match.family] if match.family else family_of(match.layout)
    if match.layout == "rt-detr" and model.facts.stem_kernel >= _PATCH:
        ambiguity = "DEIMv2 with a vision transformer needs ImageNet's mean and std, other models of its family 0 to 1"
        family = replace(family, ambiguity=ambiguity)
    is_gray = (model.image.shape[-1] if model.is_nhwc else model.image.shape[-3]) == 1
    family = family.unconfirmed(is_nhwc=model.is_nhwc, is_gray=is_gray)
    family = with_hints(with_hints(family, model.metadata.hints), model.hints)
    if is_gray:
        family = replace(family, color="gray")
    is_fixed = not model.is_size_free or model.hints.input_size is not None
    if family.resize is Resize.KEEP and is_fixed:
        return replace(family, resize=Resize.CORNER if match.layout == "ctc" else Resize.SQUASH)
    return family


def _preprocessing_evidence(model: ModelSignature, family: Family) -> tuple[str, ...]:
    color = {"rgb": "RGB", "bgr": "BGR", "gray": "grey"}[family.color]
    pixels = "uint8 pixels" if model.image.datatype is Datatype.UINT8 else _range(family)
    given = [name for name in ("color", "mean", "std", "scale", "resize") if getattr(model.hints, name)]
    origin = f"from {', '.join(f'--{name}' for name in given)} and " if given else "from "
    source = model.metadata.hints_origin or f"the defaults of {family.name} models"
    return (f"pictures: {family.resize.value}, {color}, {pixels}, {origin}{source}",)


def _labels_evidence(model: ModelSignature, names: tuple[str, ...]) -> tuple[str, ...]:
    return (f"{len(names)} labels from {model.names_origin}",) if names and names == model.names else ()


def _assumed_normalisation(model: ModelSignature, family: Family) -> tuple[str, ...]:
    """Classifiers are trained with different normalisations; ImageNet's is usual."""
    hints = (model.hints, model.metadata.hints)
    is_given = any(one.mean or one.std or one.scale is not None or _SCALE in one.parameters for one in hints)
    if is_given or family.name != "classify" or model.image.datatype is Datatype.UINT8:
        return ()
    return (f"ImageNet's {_range(family)}, which the file does not state; --mean, --std and --scale change it",)


def _assumed_labels(model: ModelSignature, match: LayoutMatch, names: tuple[str, ...]) -> tuple[str, ...]:
    if not names or names in (match.labels, model.names):
        return ()
    known = "ImageNet's" if len(names) >= 1000 else "COCO's"
    count = f"{match.class_count} classes" if match.class_count else "classes"
    return (f"{known} labels, as the file has no names for its {count}; --labels changes them",)


def _range(family: Family) -> str:
    if not any(family.mean) and family.std == (1.0, 1.0, 1.0):
        return "0 to 1" if family.scale != 1.0 else "0 to 255"
    return f"mean {_three(family.mean)}, std {_three(family.std)}" + (" of 0 to 1" if family.scale != 1.0 else "")


def _three(values: tuple[float, float, float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _follows_picture(model: ModelSignature, match: LayoutMatch) -> bool:
    """Whether the input has the picture's own size."""
    is_free = model.is_size_free and not match.needs_size and model.hints.input_size is None
    return is_free or -1 in match.input_shape[1:]


def _input_card(model: ModelSignature, match: LayoutMatch, family: Family) -> dict[str, str]:
    is_uint8 = model.image.datatype is Datatype.UINT8
    is_variable = _follows_picture(model, match)
    side = max(model.size or (0,))
    found = card_parameters(family, is_uint8=is_uint8, side=side, is_variable=is_variable)
    if match.layout == "centerface" and is_variable:
        found |= {"size-multiple": "32", "max-side": "1280"}
    if model.is_nhwc:
        found["network-input-order"] = "1"
    if model.is_size_free and not is_variable and model.size is not None:
        channels = 1 if family.color == "gray" else 3
        found["infer-dims"] = f"{channels};{model.size[0]};{model.size[1]}"
    return found


def _input_shape(model: ModelSignature, match: LayoutMatch) -> tuple[int, ...]:
    """The true shape of the input where the file's differs: a batch of more than 1, or a rule's."""
    if match.input_shape:
        return match.input_shape
    shape = model.image.shape
    if model.has_batch_axis and shape[0] > 1:
        return (1, *shape[1:])
    return ()


def _size_warnings(model: ModelSignature) -> tuple[str, ...]:
    found = []
    wanted = model.hints.input_size
    if wanted is not None and model.size is not None and model.size != wanted:
        fixed = f"{model.size[1]}x{model.size[0]}"
        found.append(f"--input-size {wanted[1]}x{wanted[0]} is not used: the graph's input is fixed to {fixed}")
    if model.has_batch_axis and model.image.shape[0] > 1:
        found.append(f"its batch is fixed to {model.image.shape[0]}; one picture a call is tried")
    return tuple(found)


def _output_card(model: ModelSignature, match: LayoutMatch) -> dict[str, str]:
    """output-blob-names where the layout reads several outputs, or not the first."""
    names = tuple(tensor.name for tensor in model.facts.outputs)
    if match.outputs and match.outputs != names and not any(";" in name for name in match.outputs):
        return {"output-blob-names": ";".join(match.outputs)}
    return {}


def _thresholds(model: ModelSignature, match: LayoutMatch, network_type: NetworkType) -> dict[str, str]:
    conf, iou = model.hints.conf, model.hints.iou
    conf = model.metadata.hints.conf if conf is None else conf
    iou = model.metadata.hints.iou if iou is None and _suppresses(match.layout) else iou
    found = {}
    if network_type is NetworkType.CLASSIFIER:
        tail = model.facts.tail.get(match.outputs[0] if match.outputs else model.facts.outputs[0].name, ())
        has_shares = tail[:1] in (("Softmax",), ("Sigmoid",))
        if not has_shares and "apply-sigmoid" not in model.hints.parameters:
            found["apply-sigmoid" if model.metadata.is_multilabel else "apply-softmax"] = "1"
        return found if conf is None else {**found, "classifier-threshold": f"{conf:g}"}
    has_boxes = network_type in (NetworkType.DETECTOR, NetworkType.INSTANCE_SEGMENTATION)
    if conf is not None:
        found["pre-cluster-threshold"] = f"{conf:g}"
    elif has_boxes and "pre-cluster-threshold" not in match.card:
        found["pre-cluster-threshold"] = "0.25"
    if iou is not None:
        found["nms-iou-threshold"] = f"{iou:g}"
    elif has_boxes and _suppresses(match.layout) and "nms-iou-threshold" not in match.card:
        found["nms-iou-threshold"] = "0.45"
    return found


def _suppresses(layout: str) -> bool:
    return layout in LAYOUTS and "iou" in LAYOUTS[layout].usable_options


@dataclass(frozen=True, slots=True)
class _Labels:
    """names: by class id. card: parameters."""

    names: tuple[str, ...] = ()
    card: Mapping[str, str] = field(default_factory=dict)
    questions: tuple[Question, ...] = ()
    warnings: tuple[str, ...] = ()


def _labels(model: ModelSignature, match: LayoutMatch) -> _Labels:
    count, names, origin = match.class_count, model.names, model.names_origin
    if match.layout in ("ctc", "db", "depth", "embedding"):
        return _Labels()
    if match.labels and not model.hints.labels:
        return _Labels(match.labels, {"labels": ";".join(match.labels)})
    if names and (not count or len(names) == count or (match.layout.startswith("rf-detr") and len(names) == count - 1)):
        return _Labels(names, {"labels": ";".join(names)})
    if names and model.hints.labels:
        return _Labels(questions=(count_question(model.hints, count),))
    unused = f"{origin} is not used: it has {len(names)} names, but the network has {count} classes"
    warnings = (unused,) if names else ()
    known = labels.of_count(count, has_background=match.layout in ("torchvision", "tf-detection"))
    if known:
        class_ids = {"class-ids": ";".join(map(str, range(1, 91)))} if count == 90 else {}
        return _Labels(known, {"labels": ";".join(known), **class_ids}, warnings=warnings)
    perhaps = "; perhaps VOC's" if count in (20, 21) else ""
    counted = f"the names of its {count} classes are" if count else "the names of its classes are"
    counted = "the name of its class is" if count == 1 else counted
    sentence = f"{counted} not in the file{perhaps}: results have class ids only"
    return _Labels(questions=(Question(sentence, "--labels", is_blocking=False),), warnings=warnings)


def _keypoint_shape(model: ModelSignature, match: LayoutMatch) -> str:
    """The card parameter, empty for a network without keypoints."""
    return model.hints.parameters.get("keypoint-shape", "") or match.card.get("keypoint-shape", "")


def _unused_points(model: ModelSignature, match: LayoutMatch) -> tuple[str, ...]:
    """A warning if names or a skeleton were given for keypoints that the network does not have."""
    if _keypoint_shape(model, match) or not (model.hints.skeleton or model.hints.keypoint_names):
        return ()
    return ("the network has no keypoints, so their names and --skeleton are not used",)


def _points(model: ModelSignature, match: LayoutMatch) -> tuple[dict[str, str], tuple[Question, ...]]:
    """Names and skeleton of the keypoints of a pose network."""
    shape = _keypoint_shape(model, match)
    if not shape:
        return {}, ()
    count = int(shape.partition(";")[0])
    found = {}
    if count == 17:
        found = {"keypoint-names": _BODY, "skeleton": _BODY_SKELETON}
    if model.hints.keypoint_names:
        found["keypoint-names"] = ";".join(model.hints.keypoint_names)
    if model.hints.skeleton:
        found["skeleton"] = ";".join(f"{one}-{other}" for one, other in model.hints.skeleton)
    if found or "keypoint-names" in match.card:
        return found, ()
    question = Question(
        f"the file does not say which of its {count} keypoints are joined in drawings", "--skeleton", (), False
    )
    return found, (question,)


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
