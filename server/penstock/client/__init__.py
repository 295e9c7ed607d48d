"""Result classes of the Python client. The client itself: `from penstock import Client, AsyncClient`.

The guide is docs/python-client.md.
"""

from penstock.client.drawings import Drawing
from penstock.client.results import (
    ClassificationResult,
    DepthResult,
    DetectionResult,
    EmbeddingResult,
    Result,
    SegmentationResult,
    TextResult,
)

__all__ = [
    "ClassificationResult",
    "DepthResult",
    "DetectionResult",
    "Drawing",
    "EmbeddingResult",
    "Result",
    "SegmentationResult",
    "TextResult",
]
