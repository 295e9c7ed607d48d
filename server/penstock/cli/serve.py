"""`penstock serve`: adds model files and starts the stack with them."""

import inspect
import multiprocessing
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from penstock.cli.add import AddContext, Files, Home, Name, add_one, sources_of
from penstock.cli.gateway_client import settings_or_fail
from penstock.cli.model_flags import ModelFlags, with_model_flags, with_options
from penstock.cli.terminal import fail, print_failure, stoppable
from penstock.cli.up import EPILOG, up
from penstock.gateway.settings import Settings

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["EPILOG", "serve"]

_OWN = ("models", "home")  # of `up`: set here
_UP_OPTIONS = [one for name, one in inspect.signature(up, eval_str=True).parameters.items() if name not in _OWN]


@with_options("up_flags", _UP_OPTIONS)
@with_model_flags
def serve(
    files: Files,
    name: Name = "",
    home: Home = None,
    flags: ModelFlags = ModelFlags(),  # noqa: B008 - replaced by its fields
    up_flags: dict[str, Any] | None = None,
) -> None:
    """Add model files, and start the stack with them: `penstock models add`, then `penstock up`.

    Serves these files and no other models; `penstock up` serves all. `penstock models load NAME` loads one of the
    others.

    A file that was added before is inspected again, and its folder replaced. If several files are given, those that
    cannot be added are reported, and the others are served. With --allow-model-code, files may be PyTorch programs
    or have custom operators, and run here.
    """
    given = up_flags or {}
    sources = sources_of(files, name)
    settings, allows_code = settings_or_fail(home), bool(given.get("allow_model_code"))
    # In a child process: the modules that adding imports would use memory as long as the stack runs.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    adding = context.Process(
        target=_add_all, args=(sources, flags, settings, _url(given), sender), kwargs={"allows_code": allows_code}
    )
    with stoppable("the unfinished model is removed"):
        adding.start()
        sender.close()
        names = []
        with suppress(EOFError):  # the process has ended
            while True:
                names.append(receiver.recv())
        adding.join()
    left = [str(file) for file, model_name in sources if model_name not in names]
    if not names:
        fail("no model was added, so the stack is not started: use the flags or the advice in the lines above", code=1)
    if left:
        served, advice = ", ".join(names), "add it to the running stack with its flags: penstock models add FILE …"
        print_failure(f"{served} will be served, without {', '.join(left)}; {advice}")
    sys.stdout.flush()
    up(**given, models=",".join(names), home=home)


def _url(up_flags: dict[str, Any]) -> str:
    """The address of the gateway that will run; empty for the default, or if it picks a free port."""
    port, has_tls = up_flags.get("http_port"), up_flags.get("tls_cert") is not None
    return f"{'https' if has_tls else 'http'}://127.0.0.1:{port}" if port else ""


def _add_all(
    sources: list[tuple[Path, str]],
    flags: ModelFlags,
    settings: Settings,
    url: str,
    sender: "Connection[str, None]",
    *,
    allows_code: bool,
) -> None:
    """Sends the names of the models that were added."""
    from penstock.models.add import AddOptions

    options = AddOptions(flags.hints(), flags.pictures(), may_replace=True, allows_code=allows_code)
    place = AddContext(settings, options, Console(highlight=False), url, is_serving=True)
    try:
        for source, name in sources:
            if add_one(place, source, name, None, as_json=False):
                sender.send(name)
    except KeyboardInterrupt:
        raise SystemExit(1) from None  # the parent process reports it
    finally:
        sys.stdout.flush()
