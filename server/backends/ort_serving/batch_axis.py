"""Whether every output of an ONNX graph has the batch dimension of the inputs, by ONNX Runtime's shape inference.

`python -m server.backends.ort_serving.batch_axis model.onnx` prints why not, or nothing. The gateway runs it as
a separate process, so that it need not load ONNX Runtime or open untrusted files itself.
"""

import sys
from pathlib import Path

import onnxruntime as ort

from .config import Config
from .errors import LoadError
from .session import SEVERITY_FATAL, new_options, open_for_reading, open_session

_BATCH = 5  # a size that few models have as a fixed dimension


def lost_batch(path: Path, config: Config) -> str:
    """Why the graph does not show that rows follow the batch; empty if it does.

    The file is opened with the batch dimension fixed to one size: each output must then have as many rows. Raises
    LoadError if it cannot be opened.
    """
    first_dims = {node.name: node.shape[0] if node.shape else 1 for node in open_for_reading(path, config).get_inputs()}
    for name, dim in first_dims.items():
        if not isinstance(dim, str):
            return f"the first dimension of input '{name}' has no name in the ONNX file"
    options = new_options(config)
    options.log_severity_level = SEVERITY_FATAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC  # folds computed shapes
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
