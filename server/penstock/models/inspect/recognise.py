"""From a file's facts and the user's hints to the card that it needs. Pure: the trial run checks it afterwards."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.models.inspect import detector_rules, labels, other_rules, yolo_rules
from penstock.models.inspect.beside import Beside
from penstock.models.inspect.facts import ModelFacts
from penstock.models.inspect.families import FAMILIES, Family, Resize, card_parameters, family_of, hinted
from penstock.models.inspect.inspection import Hints, Question, Recognition
from penstock.models.inspect.judge import Settled
from penstock.models.inspect.metadata import metadata_of
from penstock.models.inspect.subject import Guess, NoSubject, Subject, read_subject
from penstock.protocol.inference import Datatype
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.spec import NetworkType

_Rule = Callable[[Subject], Guess | None]
RULES: tuple[_Rule, ...] = (
    yolo_rules.ultralytics,
    detector_rules.tensorflow,
    detector_rules.efficient_nms,
    detector_rules.two_inputs,
    detector_rules.detr,
    detector_rules.boxes_and_labels,
    detector_rules.ultraface,
    detector_rules.yunet,
    detector_rules.centerface,
    detector_rules.nanodet,
    detector_rules.torchvision,
    detector_rules.single_shot,
    detector_rules.own_layouts,
    yolo_rules.rows_of_all_pictures,
    yolo_rules.without_grid,
    other_rules.text,
    yolo_rules.final_rows,
    yolo_rules.anchor_rows,
    other_rules.vector,
    other_rules.maps,
)
_SUPPRESSED = ("yolov8", "yolov5", "yolox", "deepstream-yolo", "ssd", "nanodet", "picodet", "fastestdet")
_TYPES = {
    **dict.fromkeys(("yolov8-seg", "yolov5-seg", "yolo-end2end-seg", "rf-detr-seg"), NetworkType.INSTANCE_SEGMENTATION),
    **dict.fromkeys(("embedding", "depth", "ctc", "db"), NetworkType.OTHER),
    "semantic": NetworkType.SEGMENTATION,
    "classification": NetworkType.CLASSIFIER,
}
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
_PATCH = 14  # least kernel of a vision transformer's patches


def recognise(
    facts: ModelFacts, hints: Hints, beside: Beside | None = None, settled: Sequence[Settled] = ()
) -> Recognition:
    """The proposed card, its evidence, and the open questions.

    beside: what files beside the model say. settled: what the values of a trial run settled.
    """
    beside = beside or Beside()
    metadata = metadata_of(facts.metadata)
    if metadata.said == Hints():
        metadata = replace(metadata, said=beside.said, said_origin=beside.said_origin)
    try:
        subject = read_subject(facts, hints, metadata, beside)
    except NoSubject as reason:
        return Recognition(warnings=(str(reason),))
    refusal = _refusal(facts)
    if refusal:
        return Recognition(warnings=(refusal,), input_name=subject.image.name)
    if hints.layout and hints.layout not in known_layouts() and ":" not in hints.layout:
        near = tuple(difflib.get_close_matches(hints.layout, known_layouts(), n=3, cutoff=0.4)) or known_layouts()
        unknown = Question(f"there is no layout {hints.layout!r}", "--layout", near)
        return Recognition(input_name=subject.image.name, questions=(unknown,))
    guess = _guess(subject)
    if guess is None:
        return _unknown(subject)
    for one in settled:
        guess = replace(
            guess,
            layout=one.layout or guess.layout,
            family=one.family or guess.family,
            why=(*guess.why, one.why),
            class_count=guess.class_count if one.class_count is None else one.class_count,
        )
    return _proposed(subject, guess, {key: value for one in settled for key, value in one.card.items()})


def known_layouts() -> tuple[str, ...]:
    """Names of the layouts that can be served."""
    return tuple(LAYOUTS)


def _refusal(facts: ModelFacts) -> str:
    """Why no CPU or GPU runtime of ours can run the graph; empty if one can."""
    if "EfficientNMS_TRT" in facts.operators or any(name.endswith("_TRT") for name in facts.operators):
        names = ", ".join(sorted(name for name in facts.operators if name.endswith("_TRT")))
        return f"operator {names} runs only in TensorRT; export the model without it, and Penstock does the suppression"
    if facts.custom_domains:
        listed = ", ".join(repr(domain) for domain in facts.custom_domains)
        return f"its operators of the domain {listed} are custom ones, which ONNX Runtime does not have"
    return ""


def _guess(subject: Subject) -> Guess | None:
    layout = subject.hints.layout
    found = [guess for rule in RULES if (guess := rule(subject)) is not None]
    if not layout:
        return found[0] if found else None
    same = next((guess for guess in found if guess.layout == layout), None)
    if same is not None:
        return same
    outputs = tuple(tensor.name for tensor in subject.facts.outputs)
    return Guess(layout, (f"--layout says {layout}",), outputs=outputs, rows_follow_batch=bool(outputs))


def _unknown(subject: Subject) -> Recognition:
    outputs = ", ".join(str(tensor) for tensor in subject.facts.outputs[:6])
    more = f" and {len(subject.facts.outputs) - 6} more" if len(subject.facts.outputs) > 6 else ""
    if subject.size is None:
        return Recognition(input_name=subject.image.name, questions=(_size_question(subject),))
    if len(subject.names) and not subject.metadata.names:
        counts = f"; the {len(subject.names)} names of {subject.names_origin} may be of another model"
    else:
        counts = ""
    question = Question(
        f"no layout is known for the outputs {outputs}{more} of {subject.size[1]}x{subject.size[0]} pixels{counts}",
        "--layout",
        known_layouts(),
    )
    return Recognition(input_name=subject.image.name, input_size=subject.size, questions=(question,))


def _size_question(subject: Subject) -> Question:
    return Question(
        f"input {subject.image} takes pictures of any size, and no metadata says which one the network was made for",
        "--input-size",
        ("640x640", "416x416", "320x320", "224x224"),
    )


def _proposed(subject: Subject, guess: Guess, settled: Mapping[str, str]) -> Recognition:
    family = _family(subject, guess)
    network_type = _TYPES.get(guess.layout, NetworkType.DETECTOR)
    if guess.layout in LAYOUTS:
        network_type = LAYOUTS[guess.layout].network_type
    names, class_card, label_questions, label_warnings = _labels(subject, guess)
    questions = [*guess.questions, *label_questions]
    if guess.needs_size and subject.size is None:
        questions.append(_size_question(subject))
    if family.unsettled:
        questions.append(Question(family.unsettled, "--mean", _NORMALISATIONS))
    points, point_questions = _points(subject, guess)
    card = {
        "network-type": str(network_type.value),
        "layout": guess.layout,
        **_input_card(subject, guess, family),
        **_output_card(subject, guess),
        **guess.card,
        **class_card,
        **points,
        **_thresholds(subject, guess, network_type),
        **settled,
        **subject.metadata.said.parameters,
        **subject.hints.parameters,
    }
    return Recognition(
        layout=guess.layout,
        network_type=network_type.value,
        family=family.name,
        parameters={key: value for key, value in card.items() if value},
        labels=names,
        class_count=guess.class_count,
        keypoint_names=tuple(filter(None, card.get("keypoint-names", "").split(";"))),
        input_name=subject.image.name,
        input_size=None if _follows_picture(subject, guess) else subject.size,
        input_shape=_input_shape(subject, guess),
        rows_follow_batch=guess.rows_follow_batch,
        evidence=(*guess.why, *_said(subject, family), *_said_of_labels(subject, guess, names)),
        questions=(*questions, *point_questions),
        warnings=(*guess.warnings, *label_warnings, *_size_warnings(subject)),
    )


def _family(subject: Subject, guess: Guess) -> Family:
    family = FAMILIES[guess.family] if guess.family else family_of(guess.layout)
    if guess.layout == "rt-detr" and subject.facts.stem_kernel >= _PATCH:
        unsettled = "DEIMv2 with a vision transformer is fed ImageNet's mean and deviation, others of its family 0 to 1"
        family = replace(family, unsettled=unsettled)
    settled = hinted(hinted(family, subject.metadata.said), subject.hints)
    channels = subject.image.shape[-1] if subject.is_nhwc else subject.image.shape[-3]
    if channels == 1:
        settled = replace(settled, color="gray")
    is_fixed = not subject.is_size_free or subject.hints.input_size is not None
    if settled.resize is Resize.KEEP and is_fixed:
        return replace(settled, resize=Resize.CORNER if guess.layout == "ctc" else Resize.SQUASH)
    return settled


def _said(subject: Subject, family: Family) -> tuple[str, ...]:
    color = {"rgb": "RGB", "bgr": "BGR", "gray": "grey"}[family.color]
    pixels = "pixels as they are" if subject.image.datatype is Datatype.UINT8 else _range(family)
    given = [name for name in ("color", "mean", "std", "scale", "resize") if getattr(subject.hints, name)]
    origin = f"by {', '.join(f'--{name}' for name in given)} and " if given else "by "
    source = subject.metadata.said_origin or f"the table of families ({family.name})"
    return (f"pictures: {family.resize.value}, {color}, {pixels}, {origin}{source}",)


def _said_of_labels(subject: Subject, guess: Guess, names: tuple[str, ...]) -> tuple[str, ...]:
    if not names or names == guess.labels:
        return ()
    if names == subject.names:
        return (f"{len(names)} labels, by {subject.names_origin}",)
    known = "ImageNet's" if len(names) >= 1000 else "COCO's"
    return (f"labels: {guess.class_count or 'the'} classes without names are taken for {known}",)


def _range(family: Family) -> str:
    if not any(family.mean) and family.std == (1.0, 1.0, 1.0):
        return "0 to 1" if family.scale != 1.0 else "0 to 255"
    return f"mean {_three(family.mean)}, std {_three(family.std)}" + (" of 0 to 1" if family.scale != 1.0 else "")


def _three(values: tuple[float, float, float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _follows_picture(subject: Subject, guess: Guess) -> bool:
    """Whether the input has the picture's own size."""
    is_free = subject.is_size_free and not guess.needs_size and subject.hints.input_size is None
    return is_free or -1 in guess.input_shape[1:]


def _input_card(subject: Subject, guess: Guess, family: Family) -> dict[str, str]:
    is_uint8 = subject.image.datatype is Datatype.UINT8
    is_variable = _follows_picture(subject, guess)
    side = max(subject.size or (0,))
    found = card_parameters(family, is_uint8=is_uint8, side=side, is_variable=is_variable)
    if guess.layout == "centerface" and is_variable:
        found |= {"size-multiple": "32", "max-side": "1280"}
    if subject.is_nhwc:
        found["network-input-order"] = "1"
    if subject.is_size_free and not is_variable and subject.size is not None:
        channels = 1 if family.color == "gray" else 3
        found["infer-dims"] = f"{channels};{subject.size[0]};{subject.size[1]}"
    return found


def _input_shape(subject: Subject, guess: Guess) -> tuple[int, ...]:
    """The true shape of the input where the file's differs: a batch of more than 1, or a rule's."""
    if guess.input_shape:
        return guess.input_shape
    shape = subject.image.shape
    if subject.has_batch_axis and shape[0] > 1:
        return (1, *shape[1:])
    return ()


def _size_warnings(subject: Subject) -> tuple[str, ...]:
    found = []
    wanted = subject.hints.input_size
    if wanted is not None and subject.size is not None and subject.size != wanted:
        fixed = f"{subject.size[1]}x{subject.size[0]}"
        found.append(f"--input-size {wanted[1]}x{wanted[0]} is not used: the graph's input is fixed to {fixed}")
    if subject.has_batch_axis and subject.image.shape[0] > 1:
        found.append(f"its batch is fixed to {subject.image.shape[0]}; one picture a call is tried")
    return tuple(found)


def _output_card(subject: Subject, guess: Guess) -> dict[str, str]:
    """output-blob-names where the layout reads several outputs, or not the first."""
    names = tuple(tensor.name for tensor in subject.facts.outputs)
    if guess.outputs and guess.outputs != names and not any(";" in name for name in guess.outputs):
        return {"output-blob-names": ";".join(guess.outputs)}
    return {}


def _thresholds(subject: Subject, guess: Guess, network_type: NetworkType) -> dict[str, str]:
    conf, iou = subject.hints.conf, subject.hints.iou
    conf = subject.metadata.said.conf if conf is None else conf
    found = {}
    if network_type is NetworkType.CLASSIFIER:
        tail = subject.facts.tail.get(guess.outputs[0] if guess.outputs else subject.facts.outputs[0].name, ())
        has_shares = tail[:1] in (("Softmax",), ("Sigmoid",))
        if not has_shares and "apply-sigmoid" not in subject.hints.parameters:
            found["apply-softmax"] = "1"
        return found if conf is None else {**found, "classifier-threshold": f"{conf:g}"}
    has_boxes = network_type in (NetworkType.DETECTOR, NetworkType.INSTANCE_SEGMENTATION)
    if conf is not None:
        found["pre-cluster-threshold"] = f"{conf:g}"
    elif has_boxes and "pre-cluster-threshold" not in guess.card:
        found["pre-cluster-threshold"] = "0.25"
    if iou is not None:
        found["nms-iou-threshold"] = f"{iou:g}"
    elif has_boxes and guess.layout.startswith(_SUPPRESSED) and "nms-iou-threshold" not in guess.card:
        found["nms-iou-threshold"] = "0.45"
    return found


_Labels = tuple[tuple[str, ...], dict[str, str], tuple[Question, ...], tuple[str, ...]]


def _labels(subject: Subject, guess: Guess) -> _Labels:
    """Labels by class id, their parameters, questions and warnings."""
    count, names, origin = guess.class_count, subject.names, subject.names_origin
    if guess.layout in ("ctc", "db", "depth", "embedding"):
        return (), {}, (), ()
    if guess.labels and not subject.hints.labels:
        return guess.labels, {"labels": ";".join(guess.labels)}, (), ()
    if names and (not count or len(names) == count or (guess.layout.startswith("rf-detr") and len(names) == count - 1)):
        return names, {"labels": ";".join(names)}, (), ()
    if names and subject.hints.labels:
        sentence = f"{origin} has {len(names)} names, and the network has {count} classes"
        return (), {}, (Question(sentence, "--labels"),), ()
    warnings = (f"{origin} has {len(names)} names and is not used: the network has {count} classes",) if names else ()
    known = labels.of_count(count, has_background=guess.layout in ("torchvision", "tf-detection"))
    if known is not None:
        class_ids = {"class-ids": ";".join(map(str, range(1, 91)))} if count == 90 else {}
        return known.names, {"labels": ";".join(known.names), **class_ids}, (), warnings
    perhaps = "; perhaps VOC's" if count in (20, 21) else ""
    counted = f"the names of its {count} classes" if count else "the names of its classes"
    sentence = f"{counted} are not in the file{perhaps}: results have numbers"
    return (), {}, (Question(sentence, "--labels", is_blocking=False),), warnings


def _points(subject: Subject, guess: Guess) -> tuple[dict[str, str], tuple[Question, ...]]:
    """Names and skeleton of a pose's points."""
    shape = guess.card.get("keypoint-shape", "")
    if not shape:
        return {}, ()
    count = int(shape.partition(";")[0])
    found = {}
    if count == 17:
        found = {"keypoint-names": _BODY, "skeleton": _BODY_SKELETON}
    if subject.hints.keypoint_names:
        found["keypoint-names"] = ";".join(subject.hints.keypoint_names)
    if subject.hints.skeleton:
        found["skeleton"] = ";".join(f"{one}-{other}" for one, other in subject.hints.skeleton)
    if found or "keypoint-names" in guess.card:
        return found, ()
    question = Question(
        f"which of its {count} points are joined in drawings is not in the file", "--skeleton", (), False
    )
    return found, (question,)
