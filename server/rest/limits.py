"""What the REST front takes, at most."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestLimits:
    """max_body_bytes: of a body as sent, and decompressed. body_timeout_s: from the head to the body's last byte."""

    max_body_bytes: int = 64 << 20
    body_timeout_s: float = 30.0
    max_json_depth: int = 64
    max_parts: int = 100
