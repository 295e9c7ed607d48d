"""Loads users' classes and functions named `module:Name` in an operator's file. Never pass it a client's text."""

import re
from pkgutil import resolve_name
from typing import Any

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class ExtensionError(ValueError):
    """The name cannot be loaded. The message has the reason."""


def is_extension_name(name: str) -> bool:
    """Whether it has the form module:Name."""
    return _NAME.fullmatch(name) is not None


def load_extension(name: str) -> Any:
    """The object `module:Name`. The module must be installed or in PYTHONPATH. Raises ExtensionError."""
    if not is_extension_name(name):
        raise ExtensionError("module:Name is needed, such as my_package.sinks:CsvSink")
    try:
        return resolve_name(name)
    except (Exception, SystemExit) as error:  # an import runs any code of the user's module
        reason = f"{type(error).__name__}: {error}"
        raise ExtensionError(f"it cannot be loaded ({reason}); is its folder in PYTHONPATH?") from error
