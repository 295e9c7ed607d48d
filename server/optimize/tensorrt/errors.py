"""What else can go wrong where an engine is built."""

from server.optimize.errors import OptimizeError


class NoEngineHereError(OptimizeError):
    """This machine lacks what builds engines: a GPU, its driver, the tensorrt module, or a pair of them that fits."""
