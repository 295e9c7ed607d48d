"""The command `penstock`. A sub-command is imported when it is called."""

import errno
import importlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from penstock import VERSION


@dataclass(frozen=True, slots=True)
class Command:
    """Where a sub-command's function or typer app is, and its line in --help."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "up": Command("penstock.cli.up", "up", "Start the engine and the gateway; Ctrl-C drains and stops them."),
    "infer": Command("penstock.cli.infer", "infer", "Send pictures to a model of the running gateway."),
    "models": Command("penstock.cli.models", "app", "List, pull, load, unload, check and optimise models."),
    "video": Command("penstock_video.cli.commands", "app", "Watch cameras and files: detect, track, count, record."),
    "keys": Command("penstock.cli.keys", "app", "Make API keys for a gateway that asks for them."),
    "load": Command("penstock_load.cli.commands", "app", "Run load tests with a verdict against documented targets."),
    "mps": Command("penstock.cli.mps", "app", "Share a GPU between processes: CUDA's MPS daemon."),
    "plan": Command("penstock.cli.plan", "plan", "Say what an engine can serve inside an SLO, replayed."),
    "doctor": Command("penstock.cli.doctor", "doctor", "Say what this machine has, what is missing, what to do."),
}


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The typer app for a command line: the sub-command it names is imported, the others are only listed."""
    app = typer.Typer(
        name="penstock",
        help="Inference serving: Triton behind a batching gateway, from a laptop's CPU to a shared GPU.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # [8000] in a help text is a default, not markup
    )
    app.callback()(_root)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, row in COMMANDS.items():
        if name != chosen:
            app.command(name, help=row.help)(_placeholder)
            continue
        module = importlib.import_module(row.module)
        part = getattr(module, row.attribute)
        if isinstance(part, typer.Typer):
            app.add_typer(part, name=name, help=row.help)
        else:
            app.command(name, epilog=getattr(module, "EPILOG", None))(part)
    return app


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"penstock {VERSION}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="which Penstock this is")
    ] = False,
) -> None:
    """Keeps the sub-commands' names in the command line even where there is one only."""


def _placeholder() -> None:
    """Stands in --help for a sub-command that this command line does not name."""


def main() -> int:
    """The exit code: 0 done, 1 something failed, 2 wrong usage."""
    app = build_app(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # until here the script that calls this had it end us
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app(prog_name="penstock")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stderr.write("penstock: the output could not be written: the disk that it goes to is full\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
