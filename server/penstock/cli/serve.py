"""`penstock serve`: adds model files and starts the stack with them."""

import inspect
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.cli.add import AddContext, Files, Home, Name, add_one, sources_of
from penstock.cli.gateway_client import settings_or_fail
from penstock.cli.model_flags import ModelFlags, with_model_flags, with_options
from penstock.cli.terminal import fail, stoppable
from penstock.cli.up import EPILOG, up

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
    """Add ONNX files as models, and start the stack with them: `penstock models add`, then `penstock up`.

    A file that was added before is inspected again, and its folder replaced.
    """
    given = up_flags or {}
    sources = sources_of(files, name)
    allows_code = bool(given.get("allow_model_code"))
    # In a child process: the modules that adding imports would use memory as long as the stack runs.
    adding = multiprocessing.get_context("fork").Process(
        target=_add_all, args=(sources, flags, home, _url(given)), kwargs={"allows_code": allows_code}
    )
    with stoppable("the unfinished model is removed"):
        adding.start()
        adding.join()
    if adding.exitcode:
        more = ", without the others" if len(sources) > 1 else ""
        fail(f"the stack is not started: add what is open with its flags (penstock models add FILE …){more}", code=1)
    names = [model_name for _, model_name in sources]
    sys.stdout.flush()
    up(**given, models=",".join(names), home=home)


def _url(up_flags: dict[str, Any]) -> str:
    """The address of the gateway that will run; empty for the default, or if it picks a free port."""
    port, has_tls = up_flags.get("http_port"), up_flags.get("tls_cert") is not None
    return f"{'https' if has_tls else 'http'}://127.0.0.1:{port}" if port else ""


def _add_all(
    sources: list[tuple[Path, str]], flags: ModelFlags, home: Path | None, url: str, *, allows_code: bool
) -> None:
    from penstock.models.add import AddOptions

    options = AddOptions(flags.hints(), flags.pictures(), may_replace=True, allows_code=allows_code)
    place = AddContext(settings_or_fail(home), options, Console(highlight=False), url, is_serving=True)
    with stoppable("the unfinished model is removed"):
        added = [add_one(place, source, model_name, None, as_json=False) for source, model_name in sources]
    sys.stdout.flush()
    raise SystemExit(0 if all(added) else 1)
