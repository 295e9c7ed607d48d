"""NVIDIA's `tensorrt` module: found, its version, and its log.

docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api (Logger, ILogger). It is nobody's dependency: a user
installs the version of the Triton image that is to serve the plan.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any

from server.optimize.tensorrt.cards import Version
from server.optimize.tensorrt.errors import NoEngineHereError

_OF_SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")


class TensorRt:
    """The module and what it said. module: `tensorrt`; warnings, errors: its log's lines, the oldest first."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.release = str(module.__version__)
        self.warnings: list[str] = []
        self.errors: list[str] = []
        self.logger = _logger_of(module, self._note)

    @property
    def version(self) -> Version:
        """(10, 4) of "10.4.0.26"."""
        numbers = [int(number) for number in re.findall(r"\d+", self.release)[:2]]
        return numbers[0], numbers[1] if len(numbers) > 1 else 0

    @property
    def is_weakly_typed(self) -> bool:
        """Whether a flag lets layers into FP16: up to 10.x; in 11.x the network's own types decide."""
        return hasattr(self.module.BuilderFlag, "FP16")

    def last_error(self) -> str:
        """In its own words, for the end of a sentence."""
        return self.errors[-1] if self.errors else "it gave no reason"

    def _note(self, severity: str, text: str) -> None:
        if severity in ("INTERNAL_ERROR", "ERROR"):
            self.errors.append(text)
        elif severity == "WARNING" and text not in self.warnings:
            self.warnings.append(text)


def load_tensorrt() -> TensorRt:
    """Raises NoEngineHereError where there is no such module, or a placeholder of that name."""
    try:
        module = importlib.import_module("tensorrt")
    except ImportError as error:
        raise NoEngineHereError(
            f"Python's tensorrt cannot be imported ({error}): install the version that Triton's image has, as "
            "`.venv/bin/pip install tensorrt-cu12==10.4.0` for image 24.10"
        ) from error
    if not hasattr(module, "Builder"):
        raise NoEngineHereError(
            "the package tensorrt that is installed has no Builder: it is a placeholder, NVIDIA's own is needed"
        )
    found = TensorRt(module)
    module.init_libnvinfer_plugins(found.logger, "")  # some of ONNX's operators are plugins of TensorRT's own
    return found


def _logger_of(module: Any, note: Callable[[str, str], None]) -> Any:
    """An ILogger of ours: the module's own writes to stderr."""

    class Listener(module.ILogger):  # type: ignore[misc]
        """Called by the library, from any of its threads."""

        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            """One line of its log."""
            name = str(severity).rpartition(".")[2]
            if name in _OF_SEVERITIES:
                note(name, msg.strip())

    return Listener()
