"""Who answers here, and which of Triton's extensions it has."""

NAME = "penstock-embedded"
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
