"""The trial run: runs the file on pictures with the proposed card, and checks the recognised layout."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from penstock.models.inspect.alternatives import Comparison, compare
from penstock.models.inspect.facts import ModelFacts, TensorFacts
from penstock.models.inspect.inspection import Hints, Recognition, Trial
from penstock.models.inspect.model_signature import anchor_counts
from penstock.models.inspect.output_checks import check_outputs
from penstock.models.inspect.picture_views import MOST_PARTS, Picture, Views, part_views, whole_views
from penstock.models.inspect.proposal import differs, has_wrong_input_shape, proposed_config
from penstock.models.inspect.recognition import recognise
from penstock.models.inspect.sidecar_files import SidecarFiles
from penstock.models.inspect.torch_session import TorchSession
from penstock.models.inspect.trial_outputs import NOT_DECODED, Correction, OutputCheck, TrialOutputs
from penstock.models.inspect.trial_session import TrialFailed, TrialSession
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import Array, InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Classes, Detections, Embedding, SegmentationMap, TextLines, VisionResult
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.decode import DecodedImage, decode
from penstock.vision.image_tasks import size_array, size_tensors
from penstock.vision.preprocess import Geometry, prepare
from penstock.vision.results import parse

PACKAGED = (("shipped", "people", "golden.jpg"), ("shipped", "street", "golden.jpg"))
_MAX_PICTURES = 8
_MOST_NAMED = 6  # outputs in a sentence
_MAX_PICTURE_BYTES = 64 << 20
_MAX_VALUES = 1 << 28  # of an input: 16 pictures of 2400x2400 pixels
_ROUNDS = 3  # a trial can change the layout, and then that layout's preprocessing is tried
_KNOWN_PREPROCESSING = ("center-heatmap",)  # Penstock's own network
_SLOW_S, _TOO_SLOW_S = 1.0, 4.0  # a run from which pictures are not mirrored, and no alternative is tried
_NEEDED_TO_DECODE = {"--labels", "--parameter", "--input-size", "--mean", "--std"}  # without them, it can fail
_CLOCK_S = 1e-3  # a CPU clock may count in steps of 10 ms, so a short run takes 0
_LOW = 0.05  # threshold of the comparisons
_PARTS_S, _FEWEST_PARTS = 10.0, 12  # time for parts of pictures in both colour orders, and how many it must allow


@dataclass(frozen=True, slots=True)
class Run:
    """One picture through the network. outputs: by name, as they came."""

    outputs: dict[str, Array]
    geometry: Geometry


def read_pictures(paths: Sequence[str]) -> tuple[Picture, ...]:
    """The user's pictures, or the packaged ones. Raises TrialFailed."""
    if not paths:
        folder = files("penstock.models")
        try:
            return tuple(
                Picture(f"the packaged picture {part[1]}", folder.joinpath(*part).read_bytes()) for part in PACKAGED
            )
        except OSError as error:
            raise TrialFailed(f"the packaged pictures are missing ({error.strerror}); use --picture") from None
    found = []
    for path in paths[:_MAX_PICTURES]:
        try:
            if Path(path).stat().st_size > _MAX_PICTURE_BYTES:
                raise TrialFailed(f"picture {path} is over {_MAX_PICTURE_BYTES >> 20} MiB")
            found.append(Picture(path, Path(path).read_bytes()))
        except OSError as error:
            raise TrialFailed(f"picture {path} cannot be read: {error.strerror}") from None
    return tuple(found)


class ModelTrial:
    """The trial of one file. Sessions are opened once for each declared input shape."""

    def __init__(self, facts: ModelFacts, hints: Hints, sidecar: SidecarFiles) -> None:
        self._facts, self._hints, self._sidecar = facts, hints, sidecar
        self._sessions: dict[tuple[int, ...], TrialSession | TorchSession] = {}

    @property
    def facts(self) -> ModelFacts:
        """With the outputs that a run showed."""
        return self._facts

    def run(self, pictures: Sequence[Picture]) -> tuple[Recognition, Trial]:
        """The recognition after all corrections, and the trial's outcome."""
        recognition = self._measured(recognise(self._facts, self._hints, self._sidecar))
        if not recognition.layout or any(one.flag == "--input-size" for one in recognition.questions):
            return recognition, Trial()
        corrections: list[Correction] = []
        for _ in range(_ROUNDS):
            try:
                card, runs = self._try(recognition, pictures)
            except (TrialFailed, InferenceError) as error:
                return recognition, Trial(tuple(one.name for one in pictures), failure=_sentence(error))
            found = self._checked(recognition, card, runs)
            if found.correction is None or found.correction in corrections:
                break
            corrections.append(found.correction)
            recognition = recognise(self._facts, self._hints, self._sidecar, tuple(corrections))
        return self._finished(recognition, card, runs, found, pictures)

    def _measured(self, recognition: Recognition) -> Recognition:
        """Recognises again with the outputs' shapes of one run, where the file leaves them open."""
        is_open = any(not output.has_shape or -1 in output.shape[1:] for output in self._facts.outputs)
        if recognition.input_size is None or not (is_open or not recognition.layout) or not recognition.input_name:
            return recognition
        image = next(tensor for tensor in self._facts.inputs if tensor.name == recognition.input_name)
        try:
            outputs = self._session(()).run(self._grey(image, recognition.input_size))
        except TrialFailed as error:
            return recognition if self._facts.outputs else replace(recognition, warnings=(str(error),))
        declared = self._facts.outputs or tuple(_undeclared(name, array) for name, array in outputs.items())
        self._facts = replace(
            self._facts, outputs=tuple(replace(one, measured=outputs[one.name].shape) for one in declared)
        )
        return recognise(self._facts, self._hints, self._sidecar)

    def _grey(self, image: TensorFacts, size: tuple[int, int]) -> dict[str, Array]:
        """Inputs for one grey picture of (height, width), with its size for a second input."""
        is_nhwc = image.shape[-1] in (1, 3) and image.shape[-3] not in (1, 3)
        channels = image.shape[-1] if is_nhwc else max(image.shape[-3], 1) if image.shape[-3] > 0 else 3
        shape = (*size, channels) if is_nhwc else (channels, *size)
        batch = (max(image.shape[0], 1),) if len(image.shape) == 4 else ()
        if math.prod((*batch, *shape)) > _MAX_VALUES:
            raise TrialFailed(f"its input {image} takes more than {_MAX_VALUES} values a call")
        dtype = image.datatype.dtype if image.datatype is not None else None
        feed: dict[str, Array] = {image.name: np.full((*batch, *shape), 114, dtype) * np.array(1, dtype)}
        for tensor in self._facts.inputs:
            if tensor.name != image.name and tensor.datatype is not None:
                sizes = [size[::-1]] * math.prod(batch) if len(tensor.shape) > 1 else [size[::-1]]
                feed[tensor.name] = size_array(sizes, tensor.datatype, len(tensor.shape))
        return feed

    def _session(self, shape: tuple[int, ...], name: str = "") -> TrialSession | TorchSession:
        if self._facts.file_format.is_torch:
            shape = ()  # a program's inputs have no declared shapes to change
        if shape not in self._sessions:
            if self._facts.external_data and shape:
                raise TrialFailed("its declared input shape cannot be changed, because its weights are in other files")
            is_torch = self._facts.file_format.is_torch
            opened = TorchSession(self._facts) if is_torch else TrialSession(self._facts, name, shape)
            self._sessions = {shape: opened}
        return self._sessions[shape]

    def _try(self, recognition: Recognition, pictures: Sequence[Picture]) -> tuple[VisionCard, list[Run]]:
        card = card_from_config(proposed_config(self._facts, recognition, "trial"))
        if card is None:
            raise TrialFailed("no card is known for it")
        return card, [self._run_one(recognition, card, picture) for picture in pictures]

    def _run_one(self, recognition: Recognition, card: VisionCard, picture: Picture) -> Run:
        return self.run_decoded(recognition, card, decode(picture.data, card.prepare_spec.color))

    def run_decoded(self, recognition: Recognition, card: VisionCard, decoded: DecodedImage) -> Run:
        """One picture through the network. Raises TrialFailed, InferenceError."""
        array, geometry = prepare(decoded, card.prepare_spec)
        image = next(tensor for tensor in self._facts.inputs if tensor.name == recognition.input_name)
        has_batch = len(image.shape) == 4
        feed: dict[str, Array] = {image.name: array[np.newaxis] if has_batch else array}
        feed |= {size.name: size.to_numpy() for size in size_tensors(card, [geometry], has_batch_axis=has_batch)}
        changed = recognition.input_shape if has_wrong_input_shape(self._facts, recognition) else ()
        outputs = self._session(changed, image.name).run(feed)
        return Run(outputs, geometry)

    def _checked(self, recognition: Recognition, card: VisionCard, runs: list[Run]) -> OutputCheck:
        names = card.layout_options.output_names
        arrays = {name: [_of_one(recognition, run.outputs[name], self._rank(name)) for run in runs] for name in names}
        first = runs[0].geometry
        size = (first.network_height, first.network_width)
        outputs = TrialOutputs(
            arrays=arrays,
            names=names,
            anchor_counts=anchor_counts(size, 1) | anchor_counts(size, 3),
            size=size,
            sources=tuple((run.geometry.source_height, run.geometry.source_width) for run in runs),
            card=recognition.parameters,
            class_count=recognition.class_count,
            has_metadata=bool(self._facts.metadata.get("names")),
        )
        try:
            found = check_outputs(recognition.layout, outputs)
        except (ValueError, IndexError, KeyError, StopIteration):
            shapes = ", ".join(f"{name} {list(parts[0].shape)}" for name, parts in [*arrays.items()][:_MOST_NAMED])
            return OutputCheck(fault=f"its outputs ({shapes}) do not fit the layout {recognition.layout}")
        given, other = self._hints.layout, found.correction
        if not given or other is None or other.layout in ("", given):
            return found
        if other.is_certain:
            return OutputCheck(fault=other.why)
        contrary = f"--layout {given} is used, but the outputs look like {other.layout}: {other.why}"
        return replace(found, correction=None, warnings=(*found.warnings, contrary))

    def _rank(self, name: str) -> int:
        output = self._facts.output(name)
        return len(output.shape) if output is not None and output.has_shape else 0

    def _finished(
        self,
        recognition: Recognition,
        card: VisionCard,
        runs: list[Run],
        found: OutputCheck,
        pictures: Sequence[Picture],
    ) -> tuple[Recognition, Trial]:
        names = tuple(one.name for one in pictures)
        questions, evidence, warnings = list(found.questions), list(found.evidence), list(found.warnings)
        warnings += self._wrong_shapes(runs[0])
        try:
            results = [parse(card, _response(run), None, run.geometry) for run in runs]
        except InferenceError as error:
            fault = found.fault or ("" if recognition.blocking_questions else _sentence(error))
            return recognition, Trial(names, tuple(evidence), tuple(warnings), failure=fault)
        if not found.fault and recognition.layout not in _KNOWN_PREPROCESSING:
            comparison = self._compared(recognition, card, pictures)
            questions += comparison.questions
            evidence += comparison.evidence
            warnings += comparison.warnings
        recognition = replace(
            recognition,
            questions=(*recognition.questions, *questions),
            output_shapes=self._true_shapes(runs[0]) if has_wrong_input_shape(self._facts, recognition) else {},
        )
        seen = tuple(_seen(result, recognition.labels) for result in results)
        return recognition, Trial(
            names, tuple(evidence), tuple(warnings), failure=found.fault, is_decoded=True, results=seen
        )

    def _true_shapes(self, run: Run) -> dict[str, tuple[int, ...]]:
        """Shapes of the outputs of a corrected input: sides that a run did not have are free, but for the batch."""
        found = {}
        for output in self._facts.outputs:
            real = run.outputs[output.name].shape
            if differs(real, output.shape) and len(real) == len(output.shape):
                sides = [own if own == side else -1 for own, side in zip(output.shape, real, strict=True)]
                found[output.name] = (real[0], *sides[1:])
        return found

    def _wrong_shapes(self, run: Run) -> list[str]:
        """Sentences on outputs whose shape differs from the declared one, at most four."""
        found = []
        for output in self._facts.outputs:
            real = run.outputs[output.name].shape
            if output.has_shape and differs(real, output.shape):
                found.append(f"output {output} is declared, and a run gave {list(real)}: the declared shape is wrong")
        return found[:4]

    def _compared(self, recognition: Recognition, card: VisionCard, pictures: Sequence[Picture]) -> Comparison:
        """Each picture is also mirrored, unless the network is slow; parts of pictures are only run if it is fast."""
        color = card.prepare_spec.color

        def results_of(changed: VisionCard, kind: Views) -> list[VisionResult]:
            options = replace(
                changed.layout_options,
                pre_cluster_threshold=_LOW,
                class_thresholds=(),
                needs_masks=False,
                topk=None if recognition.layout == "classification" else changed.layout_options.topk,
            )
            changed = replace(changed, layout_options=options)
            found = []
            for picture in pictures:
                is_whole = kind is Views.WHOLE
                whole = whole_views(picture, color, is_mirrored=run_s <= _SLOW_S)
                for view in whole if is_whole else part_views(picture, color, part_count):
                    if changed.prepare_spec.color is not color:
                        view = replace(view, pixels=np.ascontiguousarray(view.pixels[..., ::-1]))
                    run = self.run_decoded(recognition, changed, view)
                    found.append(parse(changed, _response(run), None, run.geometry))
            return found

        started, cpu_started = time.monotonic(), time.process_time()
        try:
            self._run_one(recognition, card, pictures[0])
            run_s = time.monotonic() - started
            if not self._facts.file_format.is_torch:  # in this process: other programs' work changes no decision
                run_s = min(run_s, max(time.process_time() - cpu_started, _CLOCK_S))
            if run_s > _TOO_SLOW_S:
                return Comparison(warnings=(f"a picture takes {run_s:.1f} s, so colour and scale are not checked",))
            total = min(int(_PARTS_S / 2 / run_s), MOST_PARTS * len(pictures))
            part_count = total // len(pictures) if total >= _FEWEST_PARTS else 0
            return compare(card, results_of, self._hints, has_metadata=bool(self._facts.metadata.get("names")))
        except (TrialFailed, InferenceError):
            return Comparison()


def try_model(
    facts: ModelFacts, hints: Hints, sidecar: SidecarFiles, paths: Sequence[str]
) -> tuple[ModelFacts, Recognition, Trial]:
    """The recognition after a trial on the pictures of these paths, or on the packaged ones."""
    try:
        pictures = read_pictures(paths)
    except TrialFailed as error:
        return facts, recognise(facts, hints, sidecar), Trial(failure=str(error))
    trial = ModelTrial(facts, hints, sidecar)
    recognition, outcome = trial.run(pictures)
    if hints.layout and recognition.layout:
        recognition, outcome = _without_contradiction(
            recognition, outcome, lambda: ModelTrial(trial.facts, replace(hints, layout=""), sidecar).run(pictures)
        )
    return trial.facts, recognition, outcome


def _without_contradiction(
    recognition: Recognition, trial: Trial, recognised: Callable[[], tuple[Recognition, Trial]]
) -> tuple[Recognition, Trial]:
    """A failure in place of questions for the layout, if the trial contradicts the flag: it names a layout that fits.

    recognised: runs the trial without the flag.
    """
    layout = recognition.layout
    open_flags = {question.flag for question in recognition.blocking_questions}
    layout_questions = [one for one in recognition.blocking_questions if one.flag == "--layout" and not one.choices]
    if open_flags & _NEEDED_TO_DECODE or not (layout_questions or trial.failure):
        return recognition, trial
    why = trial.failure or layout_questions[0].ambiguous.removesuffix(NOT_DECODED)
    other, outcome = recognised()
    if trial.failure and outcome.failure == trial.failure:  # of any layout
        return recognition, trial
    is_open = any(question.flag == "--layout" for question in other.blocking_questions)
    if other.layout and other.layout != layout and not outcome.failure and not is_open:
        advice = f"without the flag, {other.layout} is recognised, and it decodes them"
    else:
        advice = "no other layout is recognised; docs/extend.md shows how to add one"
    failure = f"--layout {layout} does not decode the outputs of the trial pictures: {why}; {advice}"
    questions = tuple(question for question in recognition.questions if not question.is_blocking)
    return replace(recognition, questions=questions), replace(trial, failure=failure)


def _undeclared(name: str, array: Array) -> TensorFacts:
    """An output of TorchScript, by a run of one picture: a first axis of 1 is the batch."""
    has_batch = array.shape[:1] == (1,)
    shape = (-1, *array.shape[1:]) if has_batch else array.shape
    axes = ("batch" if has_batch else "", *[""] * (array.ndim - 1))[: array.ndim]
    return TensorFacts(name, tensor_from_numpy(name, array).datatype, shape, axes)


def _sentence(error: Exception) -> str:
    if not isinstance(error, InferenceError):
        return str(error)
    return error.message.removeprefix("model 'trial': ").removeprefix("model 'trial' version 1: ")


def _of_one(recognition: Recognition, array: Array, rank: int) -> Array:
    """The output without batch axis, which has one picture."""
    has_axis = recognition.rows_follow_batch and array.ndim and array.shape[0] == 1 and (array.ndim == rank or not rank)
    return array[0] if has_axis else array


def _response(run: Run) -> InferResponse:
    return InferResponse("trial", "1", tuple(tensor_from_numpy(name, array) for name, array in run.outputs.items()))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _seen(result: VisionResult, labels: tuple[str, ...]) -> str:
    """The result in a few words."""
    if isinstance(result, Detections | Classes):
        best = [
            f"{labels[number] if number < len(labels) else number} {score:.2f}"
            for number, score in zip(result.class_id[:3].tolist(), result.score[:3].tolist(), strict=True)
        ]
        return _count(len(result.score), "result") + (f": {', '.join(best)}" if best else "")
    if isinstance(result, TextLines):
        texts = [repr(line.text[:40]) for line in result.lines[:3] if line.text]
        return _count(len(result.lines), "line") + (f": {', '.join(texts)}" if texts else "")
    if isinstance(result, Embedding):
        return f"{len(result.vector)} numbers of length {float(np.linalg.norm(result.vector)):.3g}"
    if isinstance(result, SegmentationMap):
        names = [labels[number] if number < len(labels) else str(number) for number in result.class_id[:5].tolist()]
        return f"{len(result.class_id)} {'class' if len(result.class_id) == 1 else 'classes'}: {', '.join(names)}"
    return f"depth from {float(result.values.min()):.3g} to {float(result.values.max()):.3g}"
