"""What the operator says of models' batches: a table of the settings' file, or words of a flag or a variable."""

from collections.abc import Mapping

from server.batching.declared import OWNER, Said, check_said
from server.core.errors import InvalidRequest

FORM = "MODEL=OWNER[,NAME=VALUE…], such as street=gateway,slo_p99_ms=50"


def read_said(given: object) -> dict[str, dict[str, str]]:
    """By model, what was said of it, as text. given: {model: {name: value}}, or words: MODEL=OWNER,NAME=VALUE.

    Raises InvalidRequest, one sentence, for what has neither form, and for options that are unknown or malformed.
    """
    if isinstance(given, Mapping):
        said = {str(model): _texts(str(model), options) for model, options in given.items()}
    elif isinstance(given, (tuple, list)):
        said = dict(map(_model_and_options, given))
    else:
        raise InvalidRequest(f"batching is {given!r}; write a table a model, [batching.MODEL], or {FORM}")
    for model, options in said.items():
        check_said(model, options)
    return said


def merged(below: Mapping[str, Said], above: Mapping[str, Said]) -> dict[str, dict[str, str]]:
    """Both; where they speak of the same option of the same model, `above` wins."""
    return {model: {**below.get(model, {}), **above.get(model, {})} for model in (*below, *above)}


def _texts(model: str, options: object) -> dict[str, str]:
    if not isinstance(options, Mapping):
        raise InvalidRequest(f"batching of model {model!r} is {options!r}; write a table, [batching.{model}]")
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise InvalidRequest(f"batching of model {model!r}: {name} is {value!r}; it must be a word or a number")
    return {str(name): str(value) for name, value in options.items()}


def _model_and_options(word: object) -> tuple[str, dict[str, str]]:
    model, equals, rest = str(word).partition("=")
    owner, *others = rest.split(",")
    pairs = [other.partition("=") for other in others]
    if not model or not equals or not owner or not all(name and value for name, _, value in pairs):
        raise InvalidRequest(f"batching is {word!r}; write {FORM}")
    return model, {OWNER: owner, **{name: value for name, _, value in pairs}}
