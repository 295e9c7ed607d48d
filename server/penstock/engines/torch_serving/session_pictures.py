"""Encoded pictures for a session of another runtime: decoded and preprocessed on its device, then passed to its run.

On a GPU the session reads the tensor by __cuda_array_interface__, so pixels never cross the CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .instance import Reader
from .parameters import TorchRequestError
from .picture_spec import PictureSpec
from .pictures import PictureReader

Run = Callable[[Sequence[str], Mapping[str, Any]], Sequence[Any]]  # (output names, inputs) → arrays in their order


class SessionPictures:
    """Runs `run` on encoded pictures. One per instance; not thread-safe."""

    def __init__(
        self,
        spec: PictureSpec,
        run: Run,
        *,
        input_name: str,
        max_batch_size: int,
        device: str,  # "cuda:N" or "cpu"
        reader: Reader | None = None,
    ) -> None:
        """Allocates the input. Raises TorchLoadError."""
        self._run = run
        self._input_name = input_name
        self._device = torch.device(device)
        shape = (max_batch_size, spec.channels, spec.height, spec.width)
        self._out = torch.zeros(shape, dtype=torch.float32, device=self._device)
        self._reader = PictureReader(spec, self._device) if reader is None else reader

    def run(self, names: Sequence[str], inputs: Mapping[str, Any]) -> Sequence[Any]:
        """The outputs for the pictures, bytes [rows, 1]. Raises TorchRequestError for a rejected one, and as `run`."""
        encoded = inputs[self._input_name].ravel().tolist()
        if len(encoded) > len(self._out):
            raise TorchRequestError(f"{len(encoded)} pictures are more than max_batch_size {len(self._out)}")
        errors = self._reader.prepare(encoded, self._out)
        for row, error in enumerate(errors, start=1):
            if error is not None:
                raise TorchRequestError(f"row {row} of {len(encoded)}: {error}")
        rows = self._out[: len(encoded)]
        if self._device.type == "cpu":
            return self._run(names, {self._input_name: rows.numpy()})
        torch.cuda.current_stream(self._device).synchronize()  # the session has a stream of its own
        return self._run(names, {self._input_name: rows})
