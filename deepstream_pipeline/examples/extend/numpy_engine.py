"""An engine in NumPy: the model `identity` answers its input. `penstock up --engine numpy_engine:NumpyEngine`"""

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype, InferRequest, InferResponse, tensor_from_numpy


class NumpyEngine:
    """Each input and output tensor has any number of rows of 4 float32 values; a batch has at most 8 rows."""

    def models(self) -> list[ModelConfig]:
        inputs, outputs = TensorSpec("x", Datatype.FP32, (4,)), TensorSpec("y", Datatype.FP32, (4,))
        return [ModelConfig("identity", "numpy", max_batch_size=8, inputs=(inputs,), outputs=(outputs,))]

    async def infer(self, request: InferRequest) -> InferResponse:
        rows = request.inputs[0].to_numpy()  # for long work: await asyncio.to_thread(work, rows)
        return InferResponse(request.model_name, "1", (tensor_from_numpy("y", rows),))

    async def aclose(self) -> None:
        """Frees what the engine holds."""
