"""The command `penstock`. A sub-command is imported when it is called."""

import errno
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from penstock import VERSION
from penstock.cli import Command

OWN_COMMANDS = {
    "up": Command("penstock.cli.up", "up", "Start the engine and the gateway; Ctrl-C drains and stops them."),
    "serve": Command("penstock.cli.serve", "serve", "Add model files, and start the stack with only them."),
    "status": Command("penstock.cli.status", "status", "Show the running stack on one screen."),
    "logs": Command("penstock.cli.logs", "logs", "Show the log of the running stack."),
    "infer": Command("penstock.cli.infer", "infer", "Send pictures to a model of the running gateway."),
    "models": Command("penstock.cli.models", "app", "List, add, pull, load, unload, check and optimise models."),
    "console": Command("penstock.cli.console", "console", "Serve the web console for a gateway."),
    "config": Command("penstock.cli.config", "app", "Show the settings: value and origin."),
    "setup": Command("penstock.cli.setup", "app", "Install Triton and the environment of its models."),
    "keys": Command("penstock.cli.keys", "app", "Make API keys for a gateway that asks for them."),
    "mps": Command("penstock.cli.mps", "app", "Share a GPU between processes: CUDA's MPS daemon."),
    "plan": Command("penstock.cli.plan", "plan", "Say what an engine can serve inside an SLO, replayed."),
    "doctor": Command("penstock.cli.doctor", "doctor", "Check this machine and show fixes."),
}

COMPLETION_VARIABLE = "_PENSTOCK_COMPLETE"  # set by the script of --install-completion


def commands() -> dict[str, Command]:
    """Our commands, then those that installed distributions named penstock… add by entry points of the group.

    Read without importlib.metadata, which takes 45 ms of CPU: a third of `penstock --help`.
    """
    found = dict(OWN_COMMANDS)
    for folder in sys.path:
        for file in Path(folder).glob("penstock*.dist-info/entry_points.txt"):
            group = file.read_text("utf-8").partition("[penstock.commands]\n")[2].partition("[")[0]
            for name, _, target in (line.partition("=") for line in filter(str.strip, group.splitlines())):
                module, _, attribute = target.strip().partition(":")
                with suppress(ModuleNotFoundError):  # an image of the gateway has no other program
                    found.setdefault(name.strip(), getattr(importlib.import_module(module), attribute))
    return found


def _missing(row: Command) -> list[str]:
    """Packages of the command's extra that are not installed."""
    return [package for package in row.needs if find_spec(package) is None]


def _import_part(name: str, row: Command) -> tuple[Any, ModuleType]:
    """The command's function or typer app, and its module. Ends the program where the command's extra is missing."""
    if missing := _missing(row):
        raise SystemExit(
            f"penstock: `penstock {name}` needs packages that are not installed here ({', '.join(missing)}); install "
            f"them with: pip install 'penstock[{row.extra}]'"
        )
    module = importlib.import_module(row.module)
    return getattr(module, row.attribute), module


def build_app(words: Sequence[str]) -> typer.Typer:
    """The typer app for a command line: the sub-command it names is imported, the others are only listed."""
    app = typer.Typer(
        name="penstock",
        help="Inference serving: Triton behind a batching gateway, from a laptop's CPU to a shared GPU.",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # [8000] in a help text is a default, not markup
    )
    app.callback(invoke_without_command=True)(_root)
    chosen = next((word for word in words if not word.startswith("-")), None)
    is_completing = COMPLETION_VARIABLE in os.environ
    for name, row in commands().items():
        if name != chosen or (is_completing and _missing(row)):
            app.command(name, help=row.help)(_placeholder)
            continue
        part, module = _import_part(name, row)
        if isinstance(part, typer.Typer):
            app.add_typer(part, name=name, help=row.help)
        else:
            app.command(name, epilog=getattr(module, "EPILOG", None))(part)
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"penstock {VERSION}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="which Penstock this is")
    ] = False,
) -> None:
    """Without a command, shows where to begin."""
    if context.invoked_subcommand is None:
        from penstock.cli.start_page import print_start_page  # other commands need none of it

        print_start_page()


def _placeholder() -> None:
    """Stands in --help for a sub-command that this command line does not name."""


def _words() -> Sequence[str]:
    """The words of the command line; for a shell's completion, those before the word that is completed."""
    if COMPLETION_VARIABLE not in os.environ:
        return sys.argv[1:]
    os.environ["COLUMNS"] = "10000"  # typer would break descriptions into lines, which shells show as several
    if line := os.environ.get("_TYPER_COMPLETE_ARGS"):  # zsh and fish
        return line.split()[1:] if line.endswith(" ") else line.split()[1:-1]
    index = os.environ.get("COMP_CWORD", "")  # bash, whose script puts each word on a line
    return os.environ.get("COMP_WORDS", "").split()[1 : int(index) if index.isdecimal() else None]


def main() -> int:
    """The exit code: 0 done, 1 something failed, 2 wrong usage, 130 stopped by Ctrl-C."""
    gc.disable()  # imports create objects that stay: collections find nothing to free, but cost CPU
    app = build_app(_words())
    gc.freeze()
    gc.enable()
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
