"""Shared memory that a Triton reads requests from: of the system, or of the GPU's by a process that holds it."""

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

from loadtest.bench.gpu.requests import Face, Region, ask, region_bytes
from loadtest.bench.wire import BadAnswer

SHARED_MEMORY = Path("/dev/shm")
_HOLDER = (sys.executable, "-m", "loadtest.bench.gpu.cuda_region")


class SystemRegions:
    """So many regions of the system's shared memory, alike, filled with noise; removed when it ends."""

    def __init__(self, face: Face, count: int, rows: int) -> None:
        """rows: that each holds."""
        self._mark = f"penstock_bench_{uuid.uuid4().hex[:8]}"
        self._size_bytes = region_bytes(face, rows)
        self._in_bytes = rows * face.input.row_bytes
        self.regions = tuple(Region(f"{self._mark}_{number}", "system") for number in range(count))
        noise = noise_of(face, rows)
        for region in self.regions:
            path = SHARED_MEMORY / region.name
            with path.open("wb") as file:
                file.write(noise)
                file.truncate(self._size_bytes)

    def register(self, port: int) -> None:
        """With the Triton of that HTTP port. Raises BadAnswer."""
        for region in self.regions:
            body = {"key": f"/{region.name}", "offset": 0, "byte_size": self._size_bytes}
            ask(port, f"/v2/systemsharedmemory/region/{region.name}/register", body)

    def output(self, number: int) -> bytes:
        """The region's output rows, as they stand there now."""
        return (SHARED_MEMORY / self.regions[number].name).read_bytes()[self._in_bytes :]

    def clear_output(self, number: int) -> None:
        """Zeros where the region's output rows are."""
        with (SHARED_MEMORY / self.regions[number].name).open("r+b") as file:
            file.seek(self._in_bytes)
            file.write(bytes(self._size_bytes - self._in_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for region in self.regions:
            with suppress(OSError):
                (SHARED_MEMORY / region.name).unlink()


class CudaRegions:
    """So many regions of a GPU's memory, held by a child process: under MPS it is one of the daemon's clients."""

    def __init__(self, face: Face, count: int, rows: int, environ: Mapping[str, str] | None = None) -> None:
        """environ: on top of this process's. Raises BadAnswer where there is no GPU memory to be had."""
        self._size_bytes = region_bytes(face, rows)
        self.regions = tuple(Region(f"penstock_bench_cuda_{uuid.uuid4().hex[:8]}_{n}", "cuda") for n in range(count))
        pipe = subprocess.PIPE
        with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as noise:
            noise.write(noise_of(face, rows))
            noise.flush()
            command = [*_HOLDER, str(self._size_bytes), str(count), noise.name]
            environment = os.environ | (environ or {})
            self._holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
            assert self._holder.stdout is not None
            said = json.loads(self._holder.stdout.readline() or '{"why": "it ended"}')
        if "why" in said:
            self.close()
            raise BadAnswer(f"no CUDA shared memory: {said['why']}")
        self._handles: list[str] = said["handles"]

    def register(self, port: int) -> None:
        """With the Triton of that HTTP port. Raises BadAnswer."""
        for region, handle in zip(self.regions, self._handles, strict=True):
            body = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": self._size_bytes}
            ask(port, f"/v2/cudasharedmemory/region/{region.name}/register", body)

    def close(self) -> None:
        """Gives the memory back."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        try:
            self._holder.wait(5)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        self._holder.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def noise_of(face: Face, rows: int) -> bytes:
    """Input rows: numbers in [0, 1), or bytes."""
    generator, count = np.random.default_rng(1), rows * face.input.row_bytes
    if face.input.datatype == "FP32":
        return generator.random(count // 4, np.float32).tobytes()
    if face.input.datatype == "FP16":
        return generator.random(count // 2, np.float32).astype(np.float16).tobytes()
    if face.input.datatype == "UINT8":
        return generator.integers(0, 255, count, np.uint8).tobytes()
    return bytes(count)
