"""The Python client of a gateway: `from penstock import Client, AsyncClient`. Guide: docs/python-client.md."""

from penstock.client.aio import AsyncClient
from penstock.client.client import Client
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
    "AsyncClient",
    "ClassificationResult",
    "Client",
    "DepthResult",
    "DetectionResult",
    "Drawing",
    "EmbeddingResult",
    "Result",
    "SegmentationResult",
    "TextResult",
]
