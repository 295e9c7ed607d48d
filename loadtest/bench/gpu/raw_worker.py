"""The program without a server around it: `python -m loadtest.bench.gpu.raw_worker FOLDER CONFIG`, with torch.

The same file, graphs and precision as served, by the backend's own code; two batches in flight, so that the card does
not wait for Python. A line of JSON in is a run ({"batch", "memory", "begin_s", "settle_s", "seconds"}), a line out its
count. CONFIG is the model's configuration as Triton hands it over: JSON.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from penstock.engines.torch_serving.config import EngineSpec, engine_spec
from penstock.engines.torch_serving.device import pinned_regions
from penstock.engines.torch_serving.dtypes import WIRE_TYPES
from penstock.engines.torch_serving.instance import Runner
from penstock.engines.torch_serving.program import load_program
from penstock.engines.torch_serving.runners import EagerRunner, GraphRunner

SHARED_MEMORY = "/dev/shm"


class RawProgram:
    """One process's copy of the program. Raises what the backend raises."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        is_gpu = torch.cuda.is_available()
        self._device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
        self.spec: EngineSpec = engine_spec(config, is_gpu=is_gpu)
        if is_gpu:
            torch.cuda.set_device(self._device)
        program = load_program(folder / "1" / self.spec.file_name, self.spec, self._device).program
        self._runner: Runner = EagerRunner(program, self.spec, self._device)
        if self.spec.has_cuda_graphs:
            self._runner = GraphRunner(program, self.spec, self._device, pinned=pinned_regions(), slots=2)
        self._inputs: dict[tuple[int, str], Any] = {}  # kept: what is page-locked once must stay mapped

    def run(self, order: dict[str, Any]) -> dict[str, float]:
        """rows that were done in the stretch, and how long it was."""
        batch = int(order["batch"])
        where = (batch, str(order["memory"]))
        if where not in self._inputs:
            self._inputs[where] = self._input(*where)
        columns = [[self._inputs[where]]]
        time.sleep(max(0.0, order["begin_s"] - time.monotonic()))
        self._run(columns, batch, order["begin_s"] + order["settle_s"])
        began_s = time.monotonic()
        rows = self._run(columns, batch, began_s + order["seconds"])
        return {"rows": rows, "seconds": time.monotonic() - began_s}

    def _run(self, columns: list[list[Any]], batch: int, until_s: float) -> int:
        rows, pending = 0, self._runner.begin(columns, batch)
        while time.monotonic() < until_s:
            following = self._runner.begin(columns, batch)
            pending.outputs()
            pending = following
            rows += batch
        pending.outputs()
        return rows + batch

    def _input(self, batch: int, memory: str) -> Any:
        """Noise on the card (cuda), or in shared memory as a client's is (system)."""
        spec = self.spec.inputs[0]
        dtype = WIRE_TYPES[spec.data_type]
        noise = torch.rand((batch, *spec.dims)) if dtype.is_floating_point else torch.zeros((batch, *spec.dims))
        noise = (noise if dtype.is_floating_point else noise + 100).to(dtype)
        if memory == "cuda":
            return noise.to(self._device)
        with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as file:
            size = noise.numel() * noise.element_size()
            file.truncate(size)
            shared = torch.from_file(file.name, shared=True, size=noise.numel(), dtype=dtype).view(noise.shape)
        return shared.copy_(noise)


def main() -> None:
    """Until stdin closes."""
    try:
        program = RawProgram(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except Exception as error:  # noqa: BLE001  the root of a process: its parent tells the user
        _say({"why": f"{type(error).__name__}: {error}"})
        return
    _say({"ready": 1})
    for line in sys.stdin:
        _say(program.run(json.loads(line)))


def _say(said: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
