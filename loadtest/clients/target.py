"""What a target says of itself, in nouns, and the sentences for what it does not."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from loadtest.clients.tensors import InputSpec

_MOST_NAMES = 12


class ServerIdentity(NamedTuple):
    """By the server's own word; all empty where it has none."""

    name: str = ""
    version: str = ""
    extensions: tuple[str, ...] = ()


class ModelFace(NamedTuple):
    """A model from outside. outputs: their names. is_decoupled: it answers a request any number of times."""

    inputs: tuple[InputSpec, ...]
    outputs: frozenset[str]
    is_decoupled: bool = False


class IndexedModel(msgspec.Struct):
    """A model of a repository index; a server that writes no state has only such as are ready."""

    name: str
    state: str = "READY"


def ready_names(index: Iterable[IndexedModel]) -> tuple[str, ...]:
    """By name, each once."""
    return tuple(sorted({model.name for model in index if model.state in ("READY", "")}))


def no_model(where: str, model: str, served: tuple[str, ...], told: str) -> str:
    """The sentence for a model that cannot be asked. told: what the server said of it."""
    if model in served:
        return f"{where} serves {model}, but cannot be asked for it ({told})"
    if not served:
        return f"{where} does not serve {model} ({told})"
    more = f" and {len(served) - _MOST_NAMES} more" if len(served) > _MOST_NAMES else ""
    return f"{where} does not serve {model}; it serves {', '.join(served[:_MOST_NAMES])}{more}"


def nothing_answers(where: str, why: str) -> str:
    """The sentence for a place that nobody listens at."""
    return f"nothing answers at {where} ({why}); start the server, or give the address of one that runs"
