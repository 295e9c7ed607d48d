"""The models on this machine's disks, for commands: found, or one sentence on what to do."""

import difflib
from collections.abc import Iterable

from server.batching.declared import DeclaredOptions
from server.catalogue.catalogue import read_catalogue
from server.catalogue.errors import CatalogueError
from server.catalogue.installed import InstalledModel, scan
from server.commands.gateway import Gateway, GatewayError, NothingAnswers
from server.commands.model_rows import in_short
from server.commands.terminal import fail
from server.settings import Settings

NOT_FOUND = ("failed to poll from model repository", "it is not in the engine's model repository")  # the two engines'


def installed_models(settings: Settings) -> list[InstalledModel]:
    """By repository and name; ends the command where a repository cannot be read."""
    try:
        return scan(settings.repositories, DeclaredOptions(settings.batching))
    except CatalogueError as error:
        fail(str(error), code=1)


def unknown_model(name: str, known: Iterable[str], where: str, *, url: str = "") -> str:
    """That there is no such model, with the names that are close, or how to get it, or where to look.

    url: of the gateway that has no such model; empty for the models of this machine.
    """
    close = difflib.get_close_matches(name, set(known), n=3)
    if name in read_catalogue():
        hint = f": fetch it with `penstock models pull {name}`"
    elif close:
        hint = f": did you mean {' or '.join(close)}?"
    else:
        hint = f"; `penstock models list{f' --url {url}' if url else ''}` shows what there is"
    return f"there is no model {name!r} {where}{hint}"


def load_where_one_runs(name: str, gateway: Gateway, settings: Settings) -> str:
    """Into the running gateway, where there is one; what became of it. Raises GatewayError where that failed."""
    try:
        gateway.load(name)
    except NothingAnswers:
        return f"no gateway runs at {gateway.url}: {name} will be loaded at the next `penstock up`"
    except GatewayError as error:
        why = load_failure(name, str(error), settings)
        raise GatewayError(f"{name} is in place, but the gateway at {gateway.url} did not load it: {why}") from error
    return f"{name} is loaded at {gateway.url}: penstock infer {name} photo.jpg"


def load_failure(name: str, refusal: str, settings: Settings) -> str:
    """The refusal, and where the engine found no such model or could not read it, what this machine's folders tell."""
    if not any(words in refusal for words in NOT_FOUND):
        return in_short(refusal)
    models = installed_models(settings)
    found = [model for model in models if model.name == name]
    if not found:
        where = f"in {' or '.join(map(str, settings.repositories))}"
        return f"{refusal}: {unknown_model(name, (model.name for model in models), where)}"
    return ": ".join(filter(None, (refusal, found[0].problem)))
