"""Which ranges, and which nodes stay float: what agrees best with the float model, measured, not guessed by name."""

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort
from onnxruntime.quantization.calibrate import TensorsData

from server.optimize.answers import agreement, answer
from server.optimize.progress import Progress
from server.optimize.quantise import (
    Feed,
    Ranges,
    behind_the_last_weights,
    for_onnxruntime,
    measure_ranges,
    prepare_graph,
)
from server.optimize.report import Trial
from server.optimize.samples import Sample
from server.optimize.source import SourceModel, engine_options, open_model

WORTH_LEAVING_FLOAT = 0.01  # of agreement: what is left float costs speed


@dataclass(frozen=True, slots=True)
class Quantised:
    """The chosen recipe, the quantized model, and all trials; no trials on random weights."""

    chosen: Trial
    trials: tuple[Trial, ...]
    model: onnx.ModelProto


def quantise(
    source: SourceModel, float_session: ort.InferenceSession, samples: Sequence[Sample], progress: Progress
) -> Quantised:
    """The samples calibrate, and they alone are looked at to choose. Raises OptimizeError."""
    with tempfile.TemporaryDirectory(prefix="penstock-optimize.") as folder:
        prepared = Path(folder) / "prepared.onnx"
        prepare_graph(source.path, prepared)
        feeds = [{source.card.input_name: sample.array} for sample in samples]
        if source.has_random_weights:
            chosen, trials = Trial(Ranges.MINMAX, (), None), tuple[Trial]()
            measured = {Ranges.MINMAX: _measured(prepared, feeds, Ranges.MINMAX, progress)}
        else:
            measured = {ranges: _measured(prepared, feeds, ranges, progress) for ranges in Ranges}
            trials = _Trials(source, float_session, samples, prepared, measured).run(progress)
            chosen = choose(trials)
        ranges = measured[chosen.ranges]
        return Quantised(chosen, trials, for_onnxruntime(prepared, ranges, chosen.left_float))


def choose(trials: Sequence[Trial]) -> Trial:
    """The best of those that leave nothing float, unless leaving something gains WORTH_LEAVING_FLOAT."""

    def worth(trial: Trial) -> float:
        return (trial.agreement or 0.0) - (WORTH_LEAVING_FLOAT if trial.left_float else 0.0)

    return max(trials, key=worth)  # of equals the first


def _measured(prepared: Path, feeds: Sequence[Feed], ranges: Ranges, progress: Progress) -> TensorsData:
    progress.step(f"measuring ranges ({ranges})", len(feeds))
    return measure_ranges(prepared, feeds, ranges, progress.advance)


class _Trials:
    """Every kind of ranges with nothing left float; the best of them with the tail, then the last weights float."""

    def __init__(
        self,
        source: SourceModel,
        float_session: ort.InferenceSession,
        samples: Sequence[Sample],
        prepared: Path,
        measured: dict[Ranges, TensorsData],
    ) -> None:
        self._source, self._samples, self._prepared, self._measured = source, samples, prepared, measured
        self._reference = answer(float_session, source, samples)

    def run(self, progress: Progress) -> tuple[Trial, ...]:
        tail, last = behind_the_last_weights(onnx.load(self._prepared).graph)
        progress.step("trying recipes", len(self._measured) + 2)
        trials = []
        for ranges in self._measured:
            trials.append(self._try(ranges, ()))
            progress.advance()
        best = choose(trials).ranges
        for left_float in (tail, tail | last):
            if left_float:
                trials.append(self._try(best, left_float))
            progress.advance()
        return tuple(trials)

    def _try(self, ranges: Ranges, left_float: Collection[str]) -> Trial:
        model = for_onnxruntime(self._prepared, self._measured[ranges], left_float)
        file = self._prepared.with_name("trial.onnx")
        onnx.save(model, file)
        session = open_model(file, engine_options(self._source))
        found = answer(session, self._source, self._samples)
        return Trial(ranges, tuple(sorted(left_float)), agreement(self._reference, found).share)
