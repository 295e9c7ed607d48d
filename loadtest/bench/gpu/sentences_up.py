"""A stack of the bench's own with OpenNMT's translators in it, where the bench of sentences is given no server."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.models.opennmt import FP16, FP32, ONNX_NAME, TORCH_NAMES
from loadtest.bench.gpu.penstock_up import PenstockUp
from loadtest.bench.gpu.raw import CHECKOUT
from loadtest.bench.wire import BadAnswer

ONNX = "onnx"
NAMES = {ONNX: ONNX_NAME, **TORCH_NAMES}
_LOAD_S = 180.0


@contextmanager
def stack_of(forms: Sequence[str], *, environment: Path, torch_python: str) -> Iterator[int]:
    """The REST port of a gateway with these forms (keys of NAMES). environment: of Triton. Raises BadAnswer."""
    with tempfile.TemporaryDirectory(prefix="penstock-nmt-") as folder:
        home = Path(folder)
        for form in forms:
            _write(form, home, torch_python)
        with PenstockUp(home, [NAMES[form] for form in forms], environment=environment) as up:
            up.wait(time.monotonic() + _LOAD_S)
            yield up.port


def _write(form: str, home: Path, torch_python: str) -> None:
    """By an interpreter of its own: what exports for a GPU is not in ours."""
    is_torch = form in (FP16, FP32)
    python, flags = (torch_python, ("--torch", "--precision", form)) if is_torch else (sys.executable, ())
    command = [python, "-m", "deploy.models.opennmt", "--home", str(home), *flags]
    environ = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, env=environ)
    if done.returncode:
        raise BadAnswer(f"{' '.join(command[1:])} made no model: {done.stderr.strip()[-500:]}")
