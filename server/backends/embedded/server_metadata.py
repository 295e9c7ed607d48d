"""Who answers here, and which of Triton's extensions it has."""

from importlib.metadata import PackageNotFoundError, version

NAME = "penstock-embedded"
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


def server_version() -> str:
    """Penstock's version; 0 where it runs without being installed."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "0"
