"""Who answers here, and which of Triton's extensions it has."""

NAME = "penstock-embedded"
VERSION = "0.1.0"  # pyproject's; a test holds them together
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
