"""A model configuration's parameters, and the errors of the backend. Does not import torch."""

import math
from typing import Any

Config = dict[str, Any]  # Triton's configuration as parsed JSON
_FLAGS = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


class TorchLoadError(Exception):
    """The model cannot be loaded; the text is the reason in Triton's response."""


def without_torch(error: ImportError) -> TorchLoadError:
    """What to do where PyTorch cannot be imported."""
    return TorchLoadError(
        f"PyTorch is not in the environment of Triton's models ({error}): run make gpu in a checkout, "
        "else `penstock setup triton --gpu`"
    )


class TorchRequestError(Exception):
    """An invalid request (400); others of the same batch do not fail."""


class Parameters:
    """A configuration's parameters by type. Every method raises TorchLoadError for another value."""

    def __init__(self, config: Config) -> None:
        self._values = config.get("parameters") or {}

    def text(self, key: str) -> str:
        """The stripped value; empty if missing."""
        return str((self._values.get(key) or {}).get("string_value", "")).strip()

    def one_of(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        """One of the allowed words, in small letters; the default if missing."""
        value = self.text(key).lower() or default
        if value not in allowed:
            raise TorchLoadError(f"parameter {key} is '{value}': say one of {', '.join(allowed)}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """0 or 1, or false, true, off, on."""
        value = self.text(key).lower()
        if value and value not in _FLAGS:
            raise TorchLoadError(f"parameter {key} is '{value}': say 1 or 0")
        return _FLAGS[value] if value else default

    def numbers(self, key: str, count: int, default: float, *, may_be_0: bool = True) -> tuple[float, ...]:
        """That many numbers with ';' between; each is the default if missing."""
        value = self.text(key)
        if not value:
            return (default,) * count
        try:
            numbers = tuple(float(word) for word in value.split(";") if word.strip())
        except ValueError:
            numbers = ()
        if len(numbers) != count or not all(math.isfinite(number) for number in numbers):
            raise TorchLoadError(f"parameter {key} is '{value}': say {count} numbers with ';' between")
        if not may_be_0 and 0.0 in numbers:
            raise TorchLoadError(f"parameter {key} is '{value}': 0 leaves nothing of a picture")
        return numbers


def whole_number(text: str, most: int) -> int:
    """The number, from 1 to most; 0 for any other text, such as thousands of digits, which int() refuses."""
    is_short = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    return int(text) if is_short and int(text) <= most else 0
