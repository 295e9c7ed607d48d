"""Compares the results of models on the GPU with those on the CPU: classes and boxes of frames, photos and crops.

Each model is opened as the embedded engine opens it: on the CPU in FP32 for reference, on the card in FP32, TF32 and
FP16. Both get the same preprocessed pictures, and the gateway's parser reads both outputs. A classifier with random
weights is added: its last layer is scaled so that the classes of different pictures differ.

--write-reference FILE runs the CPU alone and writes its results; --reference FILE uses them if pictures, models and
configurations are the same (by SHA-256), and runs the CPU for the others. The figures' file says where they were made.

--no-gpu compares with the CPU, whose weights are rounded to FP16: a trial of the bench.
"""

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, numpy_helper

from loadtest.bench.gpu.figures import PointLedger
from loadtest.bench.gpu.random_classifier import NAME, STATISTICS_FILE, random_classifier
from loadtest.bench.gpu.reference import (
    Answers,
    ModelReference,
    Reference,
    model_digest,
    read_reference,
    write_reference,
)
from loadtest.bench.gpu.scenes import Scenes, read_scenes
from loadtest.bench.report import conditions
from loadtest.bench.wire import BadAnswer
from penstock.engines.ort_serving.placement import Precision
from penstock.engines.ort_serving.session import SEVERITY_FATAL
from penstock.gpu.nvml import read_cards
from penstock.logs import LogFormat, configure_logs
from penstock.models.add import AddOptions, add_model, name_from
from penstock.models.added_folder import CannotAdd
from penstock.models.check.answers import BORDER, LEAST_IOU, TIE, AnswerAgreement, compare_answers
from penstock.models.inspect.inspection import Hints
from penstock.models.inspect.trial_session import TrialFailed
from penstock.models.placement.choice import ON_CPU, PRECISIONS, Device, ModelPlacement
from penstock.models.placement.placed_model import PlacedModel, open_placed

CHUNK = 256  # pictures that are prepared at once
_FP16 = np.finfo(np.float16)
_OPTIONS = AddOptions(Hints())


@dataclass(frozen=True, slots=True)
class Run:
    """What all models share. rows: pictures a call on the GPU."""

    scenes: Scenes
    ledger: PointLedger
    pool: ThreadPoolExecutor
    rows: int


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compared with the reference. name: in the report."""

    name: str
    folder: Path
    placement: ModelPlacement


def answers_of(models: Sequence[PlacedModel], scenes: Scenes, pool: ThreadPoolExecutor, *, rows: int) -> list[Answers]:
    """Each model's results of all scenes, which are prepared once. rows: pictures a call on the GPU."""
    color, found = models[0].card.prepare_spec.color, [Answers() for _ in models]
    for first in range(0, len(scenes), CHUNK):
        numbers = range(first, min(first + CHUNK, len(scenes)))
        prepared = list(pool.map(lambda number: models[0].prepare(scenes.decoded(number, color)), numbers))
        for model, answers in zip(models, found, strict=True):
            size = rows if model.placement.device is Device.GPU else 1
            calls = [prepared[start : start + size] for start in range(0, len(prepared), size)]
            began_s = time.perf_counter()
            if model.placement.device is Device.GPU:
                answers.results += [result for results in pool.map(model.results, calls) for result in results]
            else:
                for ((result, rivals),) in pool.map(model.results_with_rivals, calls):
                    answers.results.append(result)
                    answers.rivals.append(rivals)
            answers.run_s += time.perf_counter() - began_s
    return found


def figures_of(found: AnswerAgreement) -> dict[str, float]:
    """What the ledger gets: only what the model's kind of result has."""
    figures: dict[str, float] = {"pictures": found.pictures}
    if found.compared or found.ties:
        figures |= {"top1": found.top1, "compared": found.compared, "ties": found.ties}
    if found.boxes or found.overlaps:
        figures |= {
            "boxes": found.boxes,
            "box_share": found.box_share,
            "iou_median": found.overlap(50),
            "iou_p01": found.overlap(1),
            "iou_min": found.overlap(0),
            "unmatched": found.unmatched,
            "borderline": found.borderline,
            "switched": found.switched,
        }
    if found.likeness:
        figures["likeness_min"] = min(found.likeness)
    return figures


def add_models(sources: Sequence[Path], home: Path) -> list[Path]:
    """Folders of the models: a folder as it is, a file as `penstock models add` writes its folder. Raises BadAnswer."""
    folders = []
    for source in sources:
        try:
            added = source if source.is_dir() else add_model(source, name_from(source), _OPTIONS, home=home).folder
        except CannotAdd as error:
            raise BadAnswer(f"{source} was not added: {error}") from error
        folders.append(added)
    return folders


def rounded_copy(folder: Path, target: Path) -> Path:
    """The model with its weights rounded to FP16, in the folder target."""
    shutil.copytree(folder, target)
    file = target / "1" / "model.onnx"
    proto = onnx.load(file)
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            values = np.clip(numpy_helper.to_array(tensor), _FP16.min, _FP16.max)
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16).astype(np.float32), tensor.name))
    onnx.save(proto, file)
    return target


def variants_of(folder: Path, work: Path, *, is_gpu: bool, precisions: Sequence[Precision]) -> list[Variant]:
    """What the model's reference is compared with."""
    if not is_gpu:
        copy = rounded_copy(folder, work / "rounded" / folder.name)
        return [Variant("CPU, weights rounded to FP16", copy, ON_CPU)]
    placements = [ModelPlacement(Device.GPU, precision) for precision in precisions]
    return [Variant(f"CUDA {one.precision.name}", folder, one) for one in placements]


def measure_model(folder: Path, run: Run, variants: Sequence[Variant], known: ModelReference | None = None) -> None:
    """Adds a run for each variant to the ledger; failures are recorded there, and the other variants still run.

    known: results of the CPU that were stored.
    """
    with ExitStack() as stack:
        models: dict[str, PlacedModel] = {}
        try:
            reference = stack.enter_context(PlacedModel(folder, ON_CPU, threads=1))
            for variant in variants:
                try:
                    model = open_placed(variant.folder, variant.placement, threads=1)
                    models[variant.name] = stack.enter_context(model)
                except TrialFailed as error:
                    note_failure(run.ledger, f"{folder.name}, {variant.name}: {error}")
            opened = [*models.values()] if known is not None else [reference, *models.values()]
            found = answers_of(opened, run.scenes, run.pool, rows=run.rows) if opened else []
        except TrialFailed as error:
            note_failure(run.ledger, f"{folder.name}: {error}")
            return
    expected = known.answers if known is not None else found.pop(0)
    threshold = reference.card.layout_options.lowest_threshold()
    for (name, model), answers in zip(models.items(), found, strict=True):
        agreement = compare_answers(expected.results, answers.results, threshold=threshold, rivals=expected.rivals)
        figures = (
            figures_of(agreement)
            | {"served": float(not agreement.disagreement)}
            | {"cpu_s": expected.run_s or math.nan, "variant_s": answers.run_s}
        )
        run.ledger.add("agreement", 1, {"network": folder.name, "by": name}, figures, folder.name)
        run.ledger.facts[f"agreement {folder.name}, {name}"] = facts_of(model, agreement)
        print(f"agreement: {folder.name}, {name}: {agreement}; {agreement.disagreement or 'good'}", flush=True)
    run.ledger.save()


def facts_of(model: PlacedModel, agreement: AnswerAgreement) -> str:
    """What the product decides by these results, and how the engine ran it."""
    facts = model.version.facts
    served = f"not served: {agreement.disagreement}" if agreement.disagreement else "good enough to be served"
    sizes = ";".join(map(str, facts.graph_batch_sizes)) or "none"
    return "; ".join([served, f"graphs of {sizes}", *facts.fallbacks])


def compute_reference(folders: Sequence[Path], scenes: Scenes, pool: ThreadPoolExecutor) -> Reference:
    """The CPU's results of all models. Raises TrialFailed."""
    here = conditions()
    made = {name: here[name] for name in ("machine", "versions", "at")} | {"ONNX Runtime": ort.__version__}
    models = {}
    for folder in folders:
        with PlacedModel(folder, ON_CPU, threads=1) as model:
            (answers,) = answers_of([model], scenes, pool, rows=1)
        extra = dict(np.load(folder / STATISTICS_FILE)) if (folder / STATISTICS_FILE).is_file() else {}
        models[folder.name] = ModelReference(model_digest(folder), answers, extra)
        print(f"agreement: {folder.name} on the CPU: {answers.run_s:.0f} s", flush=True)
    return Reference(scenes.digest(), made, models)


def note_failure(ledger: PointLedger, why: str) -> None:
    """Writes it to the file and the screen at once, because the GPU may be available only for minutes."""
    ledger.failures.append(f"agreement: {why}")
    print(f"agreement: {why}", file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu.agreement", description=__doc__)
    add = parser.add_argument
    add("models", type=Path, nargs="*", metavar="FILE", help="ONNX files, and folders of models that were added")
    add("--media", type=Path, required=True, metavar="DIR", help="folder with .avi and .jpg")
    add("--json", type=Path, default=Path("agreement.json"), metavar="FILE", help="the figures [agreement.json]")
    add("--pictures", type=int, default=0, metavar="N", help="number of scenes, evenly spread [all]")
    add("--rows", type=int, default=8, metavar="N", help="pictures for each call on the GPU [8]")
    add("--precision", type=Precision, nargs="+", default=PRECISIONS, metavar="P", help="fp32 tf32 fp16 [all]")
    add("--reference", type=Path, metavar="FILE", help="file with the CPU's results [compute them]")
    add("--write-reference", type=Path, metavar="FILE", help="only compute and store the CPU's results")
    add("--no-classifier", dest="has_classifier", action="store_false", help="without the random ResNet-50")
    add("--no-gpu", dest="is_gpu", action="store_false", help="use the CPU with rounded weights instead of the GPU")
    return parser.parse_args(arguments)


def card_facts(*, is_gpu: bool) -> dict[str, str]:
    """The conditions that the GPU bench's files have, for models in ONNX Runtime."""
    reading = read_cards()
    driver = f"driver {reading.driver}" if reading.cards and is_gpu else "no driver"
    return {"gpu versions": f"{driver}, ONNX Runtime {ort.__version__}", "slo_p99_ms": "0"}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every model was compared, else 1. The file has all results that were measured."""
    options = parse_arguments(arguments)
    configure_logs(LogFormat.TEXT, "error")
    ort.set_default_logger_severity(SEVERITY_FATAL)
    with tempfile.TemporaryDirectory(prefix="penstock-agreement-") as folder, ThreadPoolExecutor(_cores()) as pool:
        work, home = Path(folder), Path(folder) / "home"
        try:
            scenes = read_scenes(options.media, limit=options.pictures)
            stored = usable_reference(options.reference, scenes)
            folders = add_models(options.models, home)
            if options.has_classifier:
                known = stored.models.get(NAME) if stored else None
                folders.insert(0, random_classifier(home, scenes, pool, rows=options.rows, known=known))
            if options.write_reference:
                write_reference(options.write_reference, compute_reference(folders, scenes, pool))
                return 0
        except (BadAnswer, TrialFailed) as error:
            print(f"agreement: {error}", file=sys.stderr)
            return 1
        ledger = PointLedger(options.json, conditions() | card_facts(is_gpu=options.is_gpu), "")
        print(f"agreement: {len(scenes)} pictures, {len(folders)} models", flush=True)
        ledger.facts |= {"agreement pictures": len(scenes), "agreement tie": TIE, "agreement border": BORDER}
        ledger.facts |= {"agreement least IoU": LEAST_IOU}
        run = Run(scenes, ledger, pool, options.rows)
        for model_folder in folders:
            found = stored.find(model_folder) if stored else None
            where = f"stored: {stored.origin}" if stored and found else "computed in this run"
            ledger.facts[f"agreement {model_folder.name}, the CPU's results"] = where
            variants = variants_of(model_folder, work, is_gpu=options.is_gpu, precisions=options.precision)
            measure_model(model_folder, run, variants, found)
        ledger.save()
    return 1 if ledger.failures else 0


def usable_reference(file: Path | None, scenes: Scenes) -> Reference | None:
    """The stored results, if they are of these pictures. Raises BadAnswer for another file."""
    if file is None:
        return None
    stored = read_reference(file)
    if stored.pictures == scenes.digest():
        return stored
    print(f"agreement: {file} is of other pictures: the CPU's results are computed here", file=sys.stderr, flush=True)
    return None


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    raise SystemExit(main())
