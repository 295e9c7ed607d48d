"""Who answers here, which of Triton's extensions it has, and what is said of those that it has not."""

NAME = "penstock-embedded"
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
NO_TRACE_SETTINGS = "the embedded engine writes no traces, so it has no trace settings; start with --engine triton"
NO_LOG_SETTINGS = "the embedded engine logs with the gateway, whose --log-level holds; start with --engine triton"
