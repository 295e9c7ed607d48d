"""How commands speak to a person: errors are one sentence on standard error."""

import sys
from typing import NoReturn

import typer


def fail(message: str, *, code: int = 2) -> NoReturn:
    """Say what is wrong and end with the code."""
    sys.stderr.write(f"penstock: {' '.join(message.split())}\n")
    raise typer.Exit(code)
