"""Whether an ONNX graph carries the batch to every output, by ONNX Runtime's own inference of shapes.

As a program, `python -m server.backends.ort_serving.batch_axis model.onnx`: prints why not, or nothing. So the gateway
need not load ONNX Runtime, nor read strangers' files in its own process.
"""

import sys
from pathlib import Path

import onnxruntime as ort

from .config import Config
from .errors import LoadError
from .session import SEVERITY_FATAL, new_options, open_for_reading, open_session

_BATCH = 5  # few models have it as a fixed dimension


def lost_batch(path: Path, config: Config) -> str:
    """Why the graph does not say that rows follow the batch; empty where a batch of inputs reaches every output.

    The file is opened for batches of one size: each output must have as many rows then. LoadError where it cannot be
    opened.
    """
    first_dims = {node.name: node.shape[0] if node.shape else 1 for node in open_for_reading(path, config).get_inputs()}
    for name, dim in first_dims.items():
        if not isinstance(dim, str):
            return f"the first dimension of input '{name}' has no name in the ONNX file"
    options = new_options(config)
    options.log_severity_level = SEVERITY_FATAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC  # folds shapes that are computed
    options.add_session_config_entry("session.disable_prepacking", "1")
    for dim in set(first_dims.values()):
        options.add_free_dimension_override_by_name(dim, _BATCH)
    try:
        outputs = open_session(path, options, ["CPUExecutionProvider"]).get_outputs()
    except LoadError as error:
        return f"the ONNX file takes no batch of {_BATCH}: {error}"
    lost = [node.name for node in outputs if not node.shape or node.shape[0] != _BATCH]
    return f"the ONNX file does not say that output '{lost[0]}' has a row for each row of its inputs" if lost else ""


def main() -> None:
    """Prints a sentence, or nothing."""
    try:
        sentence = lost_batch(Path(sys.argv[1]), {})
    except LoadError as error:
        sentence = str(error)
    sys.stdout.write(sentence)


if __name__ == "__main__":
    main()
