"""The memory arena that the models of the embedded engine share."""

import subprocess
import sys
from pathlib import Path

import onnx

from tests.engines import onnx_models

LIMITED = """
import sys
import numpy as np, onnxruntime as ort
from penstock.engines.embedded.arena import SharedArena
from penstock.engines.ort_serving.memory import is_out_of_memory, mapped_bytes
from penstock.engines.ort_serving.session import new_options

MIB = 1 << 20
arena = SharedArena(512 * MIB)
options = new_options({})
arena.use(options)
one, other = (ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"]) for _ in range(2))
run = lambda session, count: session.run(None, {"count": np.array([count], np.int64)})
before = mapped_bytes()[0]
for count in (5_000_000, 1 << 40):
    try:
        run(one, count)
    except Exception as error:
        print("error", is_out_of_memory(error))
print("full", mapped_bytes()[0] > before + 256 * MIB)
arena.release_memory()
print("empty", mapped_bytes()[0] < before + 64 * MIB)
print("runs", float(run(other, 1000)[0][0]) > 0)
"""


def test_model_that_fills_the_arena_fails_and_leaves_it_to_others(tmp_path: Path) -> None:
    """64 tensors of 20 MB in 512 MiB, and 4 TB at once: two errors, the memory is free again, another model runs."""
    path = tmp_path / "greedy.onnx"
    onnx.save(onnx_models.greedy(64), path)
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["error True", "error True", "full True", "empty True", "runs True"], done.stderr
