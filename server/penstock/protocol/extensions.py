"""Loads users' classes and functions named `module:Name` in an operator's file. Never pass it a client's text."""

import re
from difflib import get_close_matches
from importlib import import_module
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
    module_name, _, attribute = name.partition(":")
    module = None
    try:
        module = import_module(module_name)
        return getattr(module, attribute)
    except (Exception, SystemExit) as error:  # an import runs any code of the user's module
        if module is not None and isinstance(error, AttributeError):
            near = get_close_matches(attribute, dir(module), n=1)
            hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
            raise ExtensionError(f"the module {module_name} has no {attribute}{hint}") from error
        reason = f"{type(error).__name__}: {error}"
        raise ExtensionError(f"it cannot be loaded ({reason}){_hint(module_name, error)}") from error


def _hint(module_name: str, error: BaseException) -> str:
    """Advice if the module itself was not found. An error inside the module needs no advice."""
    is_not_found = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
    return "; is its folder in PYTHONPATH?" if is_not_found else ""
