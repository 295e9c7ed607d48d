"""One ONNX Runtime session for the trial: the file as it is, or with other declared dimensions of an input."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, TimeoutError, wait
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
import onnxruntime as ort

from penstock.engines.ort_serving.session import ORT_ERRORS, ort_error_text
from penstock.models.inspect.facts import ModelFacts
from penstock.protocol.inference import Array

MAX_OUTPUT_BYTES = 1 << 30
_THREADS = 2
_FATAL = 4  # what fails is reported as a sentence
_Result = TypeVar("_Result")


class TrialFailed(Exception):
    """The model cannot be opened or run. str() is its reason."""


class TrialSession:
    """Runs one picture at a time on the CPU. input_shape: declared in place of the file's, () for none."""

    def __init__(self, facts: ModelFacts, input_name: str = "", input_shape: tuple[int, ...] = ()) -> None:
        """Raises TrialFailed."""
        options = ort.SessionOptions()
        options.log_severity_level = _FATAL
        options.intra_op_num_threads, options.inter_op_num_threads = _THREADS, 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        model = relabelled(Path(facts.path), input_name, input_shape) if input_shape else facts.path
        try:
            self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except ORT_ERRORS as error:
            raise TrialFailed(f"ONNX Runtime {ort.__version__} cannot open it: {ort_error_text(error)[:400]}") from None
        self._names = [output.name for output in self._session.get_outputs()]

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, as they are. Raises TrialFailed, also for an output that is not a tensor or is too large."""
        options = ort.RunOptions()
        options.log_severity_level = _FATAL
        try:
            arrays = self._session.run(None, dict(feed), options)
        except ORT_ERRORS as error:
            raise TrialFailed(f"ONNX Runtime {ort.__version__} cannot run it: {ort_error_text(error)[:400]}") from None
        for name, array in zip(self._names, arrays, strict=True):
            if not isinstance(array, np.ndarray) or array.dtype == np.object_:
                raise TrialFailed(f"its output {name!r} is not a tensor of numbers")
            if array.nbytes > MAX_OUTPUT_BYTES:
                raise TrialFailed(
                    f"its output {name!r} has {array.nbytes} bytes for one picture (limit {MAX_OUTPUT_BYTES})"
                )
        return dict(zip(self._names, arrays, strict=True))


def relabelled(path: Path, input_name: str, shape: tuple[int, ...]) -> bytes:
    """The model with another declared shape of an input, -1 for free axes; outputs' shapes are left open."""
    model = onnx.load(path, load_external_data=False)
    for value in model.graph.input:
        if value.name == input_name:
            sides = value.type.tensor_type.shape
            del sides.dim[:]
            for number, side in enumerate(shape):
                dim = sides.dim.add()
                if side > 0:
                    dim.dim_value = side
                else:
                    dim.dim_param = f"axis{number}"
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    del model.graph.value_info[:]
    data: bytes = model.SerializeToString()
    return data


def run_within(limit_s: float, work: Callable[[ort.RunOptions], _Result]) -> _Result:
    """What `work` returns, in another thread. A run with its options ends at the next node after limit_s or Ctrl-C.

    A loop in a model may never end, and a signal does not interrupt it. Raises TrialFailed if it took longer.
    """
    options = ort.RunOptions()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work, options)
        try:
            return future.result(limit_s)
        except TimeoutError:
            options.terminate = True
            wait([future])
            raise TrialFailed(f"it did not end within {limit_s:g} s") from None
        except KeyboardInterrupt:
            options.terminate = True
            raise
