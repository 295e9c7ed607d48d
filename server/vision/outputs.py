"""A model's answer, held to what its parser was promised."""

from dataclasses import dataclass

import numpy as np

from server.core.errors import BackendFailed
from server.core.infer import InferResponse
from server.core.result import FloatArray, IntArray
from server.core.tensor import Array, Datatype, Tensor

_FLOATS = {Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.BF16}
_INTEGERS = {datatype for datatype in Datatype if "INT" in datatype}


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of one image. row: its place in the batch, None where the whole answer is its.

    Every accessor raises BackendFailed, naming model, version and output, where the answer breaks the promise.
    """

    response: InferResponse
    row: int | None

    def floats(self, name: str, rank: int) -> FloatArray:
        """One image's part of a float output: `rank` dimensions, float32, finite."""
        tensor = self._tensor(name, _FLOATS)
        array = self._part(tensor, rank)
        if array.dtype != np.float32:
            with np.errstate(over="ignore"):  # a float64 past float32's range becomes inf, which is refused below
                array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise self.broken(name, f"has {int(np.count_nonzero(~np.isfinite(array)))} values that are NaN or infinite")
        return array

    def integers(self, name: str, rank: int) -> IntArray:
        """One image's part of an integer output: `rank` dimensions, int64."""
        return self._part(self._tensor(name, _INTEGERS), rank).astype(np.int64, copy=False)

    def refuse(self, name: str, array: Array, wanted: str) -> BackendFailed:
        """The error for one image's part that has the wrong shape."""
        return self.broken(name, f"has shape {list(array.shape)} for one image; {wanted} was expected")

    def broken(self, name: str, what: str) -> BackendFailed:
        """The error for an output that breaks the promise; what: how, as the rest of a sentence."""
        version = self.response.model_version or "?"
        return BackendFailed(f"model {self.response.model_name!r} version {version}: output {name!r} {what}")

    def _tensor(self, name: str, datatypes: set[Datatype]) -> Tensor:
        tensor = self.response.output(name)
        if tensor is None:
            has = ", ".join(repr(output.name) for output in self.response.outputs) or "none"
            raise self.broken(name, f"is missing (outputs that came: {has})")
        if tensor.datatype not in datatypes:
            raise self.broken(name, f"is of type {tensor.datatype}; one of {', '.join(sorted(datatypes))} was expected")
        size_bytes = tensor.element_count * (tensor.datatype.size_bytes or 0)
        if tensor.data.nbytes != size_bytes:
            raise self.broken(
                name, f"has {tensor.data.nbytes} bytes; its shape {list(tensor.shape)} needs {size_bytes}"
            )
        return tensor

    def _part(self, tensor: Tensor, rank: int) -> Array:
        """Four cases: no batch axis / one of rows / the only row / trailing ones, as (N, classes, 1, 1)."""
        array = tensor.to_numpy()
        has_batch_axis = self.row is not None or array.shape[:1] == (1,)
        while array.ndim > rank + has_batch_axis and array.shape[-1] == 1:
            array = array[..., 0]
        if array.ndim == rank and not self.row:
            return array
        if array.ndim == rank + 1:
            row = self.row or 0
            if row < array.shape[0] and (self.row is not None or array.shape[0] == 1):
                part: Array = array[row]
                return part
        where = "the image" if self.row is None else f"row {self.row} of the batch"
        raise self.broken(tensor.name, f"has shape {list(tensor.shape)}, in which {where} has no {rank}-D part")
