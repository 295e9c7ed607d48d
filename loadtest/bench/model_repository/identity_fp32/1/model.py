# mypy: ignore-errors
"""Answers what it is given."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One input x, one output y."""

    def execute(self, requests):
        """One response a request, in their order."""
        return [pb_utils.InferenceResponse([_answer(request)]) for request in requests]


def _answer(request):
    return pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())
