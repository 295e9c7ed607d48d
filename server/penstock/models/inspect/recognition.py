"""Recognises the output layout of a file. Runs no model; the trial run checks the result."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.models.inspect import detector_rules, other_rules, yolo_rules
from penstock.models.inspect.facts import ModelFacts
from penstock.models.inspect.inspection import Hints, Question, Recognition
from penstock.models.inspect.metadata import metadata_of
from penstock.models.inspect.model_signature import LayoutMatch, ModelSignature, NoImageInput, read_signature
from penstock.models.inspect.proposal import count_question, given_labels, proposed_card, size_question
from penstock.models.inspect.sidecar_files import SidecarFiles
from penstock.models.inspect.trial_outputs import Correction
from penstock.vision.layouts.registry import LAYOUTS

_Rule = Callable[[ModelSignature], LayoutMatch | None]
RULES: tuple[_Rule, ...] = (
    yolo_rules.ultralytics,
    detector_rules.tensorflow,
    detector_rules.efficient_nms,
    detector_rules.two_inputs,
    detector_rules.detr,
    detector_rules.poses,
    detector_rules.boxes_and_labels,
    detector_rules.deepstream,
    detector_rules.boxes_and_scores,
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


def recognise(
    facts: ModelFacts, hints: Hints, sidecar: SidecarFiles | None = None, corrections: Sequence[Correction] = ()
) -> Recognition:
    """The proposed card, its evidence, and the open questions.

    sidecar: files beside the model. corrections: from the output values of a trial run.
    """
    sidecar = sidecar or SidecarFiles()
    metadata = metadata_of(facts.metadata)
    if metadata.hints == Hints():
        metadata = replace(metadata, hints=sidecar.hints, hints_origin=sidecar.hints_origin)
    try:
        model = read_signature(facts, hints, metadata, sidecar)
    except NoImageInput as reason:
        return Recognition(warnings=(str(reason),))
    refusal = _refusal(facts)
    if refusal:
        return Recognition(warnings=(refusal,), input_name=model.image.name)
    if hints.layout and hints.layout not in LAYOUTS and ":" not in hints.layout:
        near = tuple(difflib.get_close_matches(hints.layout, LAYOUTS, n=3, cutoff=0.4)) or (*LAYOUTS,)
        unknown = Question(f"there is no layout {hints.layout!r}", "--layout", near)
        return Recognition(input_name=model.image.name, questions=(unknown,))
    if not facts.outputs:  # of TorchScript before its first run
        questions = () if model.size is not None else (size_question(model),)
        return Recognition(input_name=model.image.name, input_size=model.size, questions=questions)
    match = _match(model)
    if model.hints.labels and (match is None or not match.class_count) and (recognised := _of_other_labels(model)):
        return recognised
    if match is None:
        return _unknown(model)
    for one in corrections:
        match = replace(
            match,
            layout=one.layout or match.layout,
            family=one.family or match.family,
            why=(*match.why, one.why),
            class_count=match.class_count if one.class_count is None else one.class_count,
        )
    return proposed_card(model, match, {key: value for one in corrections for key, value in one.card.items()})


def _refusal(facts: ModelFacts) -> str:
    """Why no engine of Penstock can run the graph; empty if one can."""
    names = ", ".join(sorted(name for name in facts.operators if name.endswith("_TRT")))
    if names:
        return f"operator {names} runs only in TensorRT; export the model without it; Penstock runs the NMS"
    if facts.custom_domains:
        listed = ", ".join(repr(domain) for domain in facts.custom_domains)
        return f"it has custom operators of the domain {listed}, which ONNX Runtime does not have"
    return ""


def _match(model: ModelSignature) -> LayoutMatch | None:
    layout = model.hints.layout
    matches = (match for rule in RULES if (match := rule(model)) is not None)
    if not layout:
        return next(matches, None)
    same = next((match for match in matches if match.layout == layout), None)
    if same is not None:
        return same
    outputs = tuple(tensor.name for tensor in model.facts.outputs)
    follows = all(model.follows_batch(tensor) for tensor in model.facts.outputs)
    return LayoutMatch(layout, (f"--layout is {layout}",), outputs=outputs, rows_follow_batch=follows)


def _of_other_labels(model: ModelSignature) -> Recognition | None:
    """The question if only the number of the given labels prevents a match of a layout, else None."""
    match = _match(replace(model, names=(), names_origin="", hints=replace(model.hints, labels=())))
    if match is None or match.class_count in (0, len(model.hints.labels)):
        return None
    question = count_question(model.hints, match.class_count)
    if match.questions:  # the number of classes is not certain
        question = replace(match.questions[0], ambiguous=f"{given_labels(model.hints)}; {match.questions[0].ambiguous}")
    return Recognition(input_name=model.image.name, input_size=model.size, questions=(question,))


def _unknown(model: ModelSignature) -> Recognition:
    outputs = ", ".join(str(tensor) for tensor in model.facts.outputs[:6])
    more = f" and {len(model.facts.outputs) - 6} more" if len(model.facts.outputs) > 6 else ""
    if model.size is None:
        return Recognition(input_name=model.image.name, questions=(size_question(model),))
    counts = ""
    if model.names and not model.metadata.names:
        counts = f"; the {len(model.names)} names of {model.names_origin} may be of another model"
    question = Question(
        f"no layout is known for the outputs {outputs}{more} of {model.size[1]}x{model.size[0]} pixels{counts}",
        "--layout",
        (*LAYOUTS,),
    )
    return Recognition(input_name=model.image.name, input_size=model.size, questions=(question,))
