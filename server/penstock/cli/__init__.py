"""The command line. A program of its own adds its command by an entry point of the group `penstock.commands`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """Where a sub-command's function or typer app is, and its line in --help.

    needs: packages that it imports and that are installed with `extra`.
    """

    module: str
    attribute: str
    help: str
    extra: str = ""
    needs: tuple[str, ...] = ()
