"""The whole way, from a float model and pictures to a plan's folder and a report."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from server.core.tensor import Array
from server.gpu.nvml import read_cards
from server.optimize.answers import Session
from server.optimize.judge import judge
from server.optimize.progress import Progress
from server.optimize.recipes import quantise
from server.optimize.report import Judgement, Trial
from server.optimize.samples import Split, read_samples, split_pictures
from server.optimize.source import SourceModel, engine_options, open_model
from server.optimize.tensorrt.binding import TensorRt, load_tensorrt
from server.optimize.tensorrt.build import build_plan
from server.optimize.tensorrt.cards import Precision, computes_half, refusal
from server.optimize.tensorrt.closeness import Closeness, closeness
from server.optimize.tensorrt.cuda import Cuda, open_cuda
from server.optimize.tensorrt.engine import Engine
from server.optimize.tensorrt.errors import NoEngineHereError
from server.optimize.tensorrt.folder import write_folder
from server.optimize.tensorrt.half import in_half, sorted_nodes
from server.optimize.tensorrt.layers import read_layers
from server.optimize.tensorrt.plans import Plan, PlanCache, PlanKey
from server.optimize.tensorrt.report import EngineReport, EngineTiming
from server.optimize.tensorrt.shapes import BatchProfile, profile_of, timed_batches
from server.optimize.tensorrt.timing import time_engine
from server.vision.accuracy import Truth

COMPARED_PICTURES = 16  # number by number; the boxes and classes of all are judged

_Pair = tuple[Session, Session]  # the float model's, the engine's


@dataclass(frozen=True, slots=True)
class Workshop:
    """What engines are built with. driver: its version, empty where NVML did not say. plans: those built before."""

    tensorrt: TensorRt
    cuda: Cuda
    driver: str
    precision: Precision
    plans: PlanCache


@dataclass(frozen=True, slots=True)
class Pictures:
    """Files, and the truth about some of them by file name."""

    paths: Sequence[Path]
    truth: Mapping[str, Truth]


@dataclass(frozen=True, slots=True)
class _Network:
    """What TensorRT reads. quantised: how, of INT8."""

    model: onnx.ModelProto
    quantised: Trial | None


def twin_name(name: str, precision: Precision) -> str:
    """What the plan's model is called."""
    return f"{name}-tensorrt-{precision}"


def open_workshop(precision: Precision, plans: Path) -> Workshop:
    """TensorRT, the card, and the two of them fitting. Raises NoEngineHereError."""
    cuda, tensorrt = open_cuda(), load_tensorrt()
    if why := refusal(tensorrt.version, cuda.capability, precision):
        raise NoEngineHereError(why)
    return Workshop(tensorrt, cuda, read_cards().driver or "", precision, PlanCache(plans))


def optimise(
    source: SourceModel, workshop: Workshop, pictures: Pictures, staged: Path, progress: Progress
) -> EngineReport:
    """Fills the empty folder `staged` with the model NAME-tensorrt-PRECISION.

    Raises OptimizeError, and OSError where the disk refuses; what is in staged then is of no use.
    """
    profile = profile_of(source)
    progress.step("reading pictures", len(pictures.paths))
    split = _split(split_pictures(pictures.paths, source, progress.advance), workshop.precision)
    float_session = open_model(source.path, engine_options(source))
    network = _network(source, float_session, split, workshop, progress)
    key = _key(workshop, profile, network)
    plan = _plan(workshop, key, network, profile, progress)
    engine = Engine(workshop.tensorrt, plan.content, workshop.cuda)
    engine.check_types((*source.config.inputs, *source.config.outputs))
    report = EngineReport(
        name=twin_name(source.name, workshop.precision),
        optimized_from=source.name,
        source_sha256=sha256(source.path.read_bytes()).hexdigest(),
        source_bytes=source.path.stat().st_size,
        plan_sha256=plan.sha256,
        plan_bytes=len(plan.content),
        key=key,
        is_cached=plan.is_cached,
        build_s=plan.build_s,
        profile=profile,
        calibrating=len(split.calibrating),
        held_out=len(split.held_out),
        unreadable=split.unreadable,
        quantised=network.quantised,
        judgement=_judgement(source, (float_session, engine), split, pictures.truth, progress),
        closeness=_closeness(source, (float_session, engine), split),
        timings=_timings(source, (engine, workshop.cuda), profile, split, progress),
        layers=read_layers(engine.layers(), _nodes(network.model)),
        noted=tuple(workshop.tensorrt.warnings),
    )
    engine.close()
    write_folder(source, report, plan.content, staged)
    return report


def _split(split: Split, precision: Precision) -> Split:
    """Of FP16 every picture judges: there is nothing to calibrate."""
    if precision is Precision.INT8:
        return split
    return Split((), tuple(sorted((*split.calibrating, *split.held_out))), split.unreadable)


def _network(
    source: SourceModel, float_session: ort.InferenceSession, split: Split, workshop: Workshop, progress: Progress
) -> _Network:
    """The float file, or its QDQ form by the recipe of --int8; in half precision for a TensorRT without flags."""
    model, quantised = onnx.load(source.path), None
    if workshop.precision is Precision.INT8:
        samples = list(read_samples(split.calibrating, source))
        result = quantise(source, float_session, samples, progress)
        model, quantised = result.for_tensorrt, result.chosen
    if not workshop.tensorrt.is_weakly_typed and computes_half(workshop.cuda.capability):
        model = in_half(model)
    return _Network(sorted_nodes(model), quantised)


def _nodes(model: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(node.op_type, node.name) for node in model.graph.node if node.op_type != "Constant"]


def _key(workshop: Workshop, profile: BatchProfile, network: _Network) -> PlanKey:
    major, minor = workshop.cuda.capability
    return PlanKey(
        capability=f"{major}.{minor}",
        card=workshop.cuda.name,
        tensorrt=workshop.tensorrt.release,
        driver=workshop.driver or "unknown",
        precision=str(workshop.precision),
        profile=str(profile),
        network_sha256=sha256(network.model.SerializeToString(deterministic=True)).hexdigest(),
    )


def _plan(workshop: Workshop, key: PlanKey, network: _Network, profile: BatchProfile, progress: Progress) -> Plan:
    if (found := workshop.plans.find(key)) is not None:
        return found
    progress.step("building the engine (minutes)", 0)
    began = time.monotonic()
    content = build_plan(
        workshop.tensorrt,
        network.model.SerializeToString(deterministic=True),
        profile,
        workshop.precision,
        allows_half=computes_half(workshop.cuda.capability),
    )
    plan = Plan(content, time.monotonic() - began, is_cached=False)
    workshop.plans.keep(key, plan)
    return plan


def _judgement(
    source: SourceModel, sessions: _Pair, split: Split, truth: Mapping[str, Truth], progress: Progress
) -> Judgement | None:
    """Never on random weights."""
    if source.has_random_weights:
        return None
    (found,) = judge(source, sessions, split.held_out, truth, progress)
    return found


def _closeness(source: SourceModel, sessions: _Pair, split: Split) -> tuple[Closeness, ...]:
    names = [output.name for output in source.config.outputs]
    chosen = split.held_out[:COMPARED_PICTURES]
    rows: tuple[list[list[Array]], list[list[Array]]] = ([], [])
    for sample in read_samples(chosen, source):
        for session, row in zip(sessions, rows, strict=True):
            row.append(list(session.run(names, {source.card.input_name: sample.array})))
    return tuple(closeness(names, *rows))


def _timings(
    source: SourceModel, running: tuple[Engine, Cuda], profile: BatchProfile, split: Split, progress: Progress
) -> tuple[EngineTiming, ...]:
    """Of batches of the same picture: an engine's time does not depend on what it sees."""
    engine, cuda = running
    (sample,) = read_samples(split.held_out[:1], source)
    batches = timed_batches(profile)
    progress.step("measuring speed", len(batches))
    found = []
    for batch_size in batches:
        array = np.repeat(sample.array, batch_size, axis=0) if sample.has_batch_axis else sample.array
        engine.load({source.card.input_name: array})
        found.append(time_engine(engine, cuda, batch_size))
        progress.advance()
    return tuple(found)
