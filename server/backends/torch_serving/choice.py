"""The quickest way to run a convolutional program on a device, among those that answer as the plain one does."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .cache import locked
from .config import EngineSpec
from .dtypes import network_type
from .fusing import WAYS, Fusing, copied, fuse_activations

MOST_DIFFERENCE = 0.02  # FP16 has 11 bits, and a residual network adds up dozens of roundings
_WARM_UP_RUNS, _TIMED_RUNS = 2, 5
_POISON_BYTES = 256 << 20  # more than the activations that a kernel might read before anybody wrote them


@dataclass(frozen=True)
class Choice:
    """A module, how it was fused, and what its user should know of the ways that were not right."""

    module: Any
    name: str = "fold"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """A way that was tried. difference: from the plain answer, as a share of its largest number; NaN never passes."""

    module: Any
    name: str
    seconds: float
    difference: float


def choose(plain: Trial, trials: list[Trial]) -> Choice:
    """The quickest of those that are right."""
    right = [one for one in trials if one.difference <= MOST_DIFFERENCE]
    wrong = [one for one in trials if not one.difference <= MOST_DIFFERENCE]
    best = min([plain, *right], key=lambda trial: trial.seconds)
    notes = tuple(f"fuse {one.name} is not used here: it answers {one.difference:.1%} otherwise" for one in wrong)
    return Choice(best.module, best.name, notes)


def quickest(module: Any, spec: EngineSpec, device: Any, folder: Path | None) -> Choice:
    """Of a module on a GPU: the way that the spec names, or with auto the quickest at its largest bucket.

    folder: where the first instance's finding is kept for the others, which wait for it, and for the next start;
    None where there is no place for it.
    """
    if not all(one.is_fixed for one in spec.inputs) or spec.fuse in ("off", "fold"):
        return Choice(module, spec.fuse if spec.fuse == "off" else "fold")
    if spec.fuse != "auto":
        return _measured(module, spec, device, {spec.fuse: WAYS[spec.fuse]})
    if folder is None:
        return _measured(module, spec, device, WAYS)
    kept = folder / f"fuse-{spec.buckets[-1]}{'-benchmark' * spec.has_cudnn_benchmark}"
    with locked(folder):
        name = kept.read_text() if kept.is_file() else ""
        if name not in (*WAYS, "fold"):
            chosen = _measured(module, spec, device, WAYS)
            kept.write_text(chosen.name)
            return chosen
    return Choice(module) if name == "fold" else _measured(module, spec, device, {name: WAYS[name]})


def _measured(module: Any, spec: EngineSpec, device: Any, ways: Mapping[str, Fusing]) -> Choice:
    """The quickest of the ways and of none; of a single one only whether it is right."""
    candidates = {name: one for name, way in ways.items() if (one := _fused(module, way)) is not None}
    if not candidates:
        return Choice(module)
    trials, notes = [], []
    with torch.inference_mode():
        sample = _sample(spec, device)
        expected = _answers(module, sample)
        plain_s = _seconds(lambda: module(*sample), by_graph=spec.has_cuda_graphs) if len(ways) > 1 else math.inf
        for name, one in candidates.items():
            try:
                trials.append(_tried(name, one, sample, expected, by_graph=spec.has_cuda_graphs))
            except Exception as error:  # noqa: BLE001  no engine of cuDNN's, no compiler: the plain way is there
                notes.append(f"fuse {name} is not used here: {(str(error) or repr(error)).splitlines()[0]}")
    torch.cuda.empty_cache()
    chosen = choose(Trial(module, "fold", plain_s, 0.0), trials)
    return Choice(chosen.module, chosen.name, (*notes, *chosen.notes))


def _fused(module: Any, way: Fusing) -> Any:
    """A copy of the graph over the same weights; None where there is nothing to fuse."""
    fused = copied(module)
    return fused if fuse_activations(fused, way) else None


def _tried(name: str, module: Any, sample: list[Any], expected: list[Any], *, by_graph: bool) -> Trial:
    _poison(sample[0].device)
    pairs = zip(expected, _answers(module, sample), strict=True)
    difference = max(_difference(one, other) for one, other in pairs)
    return Trial(module, name, _seconds(lambda: module(*sample), by_graph=by_graph), difference)


def _answers(module: Any, sample: list[Any]) -> list[Any]:
    answer = module(*sample)
    return [one.float().cpu() for one in (answer if isinstance(answer, (tuple, list)) else (answer,))]


def _difference(one: Any, other: Any) -> float:
    """The largest difference as a share of the largest number; NaN where there is one in the answer."""
    return float((one - other).abs().max()) / max(float(one.abs().max()), 1e-12)


def _poison(device: Any) -> None:
    """Leaves NaN in the memory that the next run is given: a kernel that reads what nobody wrote is found out."""
    size_bytes = min(_POISON_BYTES, torch.cuda.mem_get_info(device)[0] // 8)  # a small card has other instances, too
    poison = torch.full((size_bytes // 2,), math.nan, dtype=torch.float16, device=device)
    del poison


def _seconds(run: Callable[[], Any], *, by_graph: bool) -> float:
    """Of the shortest of some runs, by the device's clock. by_graph: as it is served, without Python's launches."""
    for _ in range(_WARM_UP_RUNS):
        run()
    if by_graph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.stream(torch.cuda.current_stream())  # as before, whatever a capture that fails leaves
        with current, torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        run = graph.replay
        run()
    times = []
    for _ in range(_TIMED_RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(min(times))


def _sample(spec: EngineSpec, device: Any) -> list[Any]:
    """The largest bucket of numbers that any program takes: floats between 0 and 1, or zeros."""
    rows = (spec.buckets[-1],) if spec.max_batch_size else ()
    generator = torch.Generator(device="cpu").manual_seed(0)
    sample = []
    for one in spec.inputs:
        dtype = network_type(one.data_type, spec.precision)
        shape = (*rows, *one.dims)
        values = torch.rand(shape, generator=generator) if dtype.is_floating_point else torch.zeros(shape)
        values = values.to(device, dtype)
        is_image = spec.is_channels_last and values.dim() == 4 and dtype.is_floating_point
        sample.append(values.to(memory_format=torch.channels_last) if is_image else values)
    return sample
