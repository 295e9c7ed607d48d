"""What is wrong with a request's body, in sentences of ours: the field, what was given, what is needed.

A text that was given is shown only where it can hold no secret: an address may carry a password, wherever it is put.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from pydantic import BaseModel

from deepstream_pipeline.api.bodies import SOURCE_ID, NewStream, Recording, SensorChange
from deepstream_pipeline.source_ids import ID_FORM

_MOST = 5  # faults of a body that are told
_SHOWN_CHARACTERS = 80
_PARTS_OF_REQUEST = ("body", "path", "query")
_SHOWN = ("source_id", "camera_id", "policy", "decoder")
_OBJECT = "a JSON object is needed"
Schema = Mapping[str, object]


def _properties(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    whole = model.model_json_schema()
    definitions = whole.get("$defs", {})
    for part in (whole, *definitions.values()):
        for name, schema in part.get("properties", {}).items():
            yield name, _needed(schema, definitions)


def _needed(schema: Schema, definitions: Mapping[str, Schema]) -> str:
    """What the field takes, of its JSON schema."""
    choices = schema.get("anyOf")
    if isinstance(choices, list):
        return _needed(choices[0], definitions)  # the other one is null
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _needed(definitions[reference.rpartition("/")[2]], definitions)
    words = schema.get("enum")
    if isinstance(words, list):
        return f"one of {', '.join(words)} is needed"
    if schema.get("pattern") == SOURCE_ID:
        return ID_FORM
    kinds = {"boolean": "true or false is needed", "string": _text_needed(schema)}
    numbers = {"number": "a number", "integer": "a whole number"}
    kind = str(schema.get("type"))
    return f"{numbers[kind]}{_range(schema)} is needed" if kind in numbers else kinds.get(kind, _OBJECT)


def _text_needed(schema: Schema) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if most is None:
        return "a text is needed"
    return f"a text of {f'{least} to' if least else 'at most'} {most} characters is needed"


def _range(schema: Schema) -> str:
    words = {"exclusiveMinimum": " above", "minimum": " from", "maximum": " to"}
    if "exclusiveMinimum" in schema:
        words["maximum"] = " and at most"
    return "".join(f"{word} {schema[key]:.10g}" for key, word in words.items() if key in schema)


_NEEDED = dict(pair for model in (NewStream, Recording, SensorChange) for pair in _properties(model))


def named_faults(faults: Sequence[object]) -> str:
    """Field by field: "reconnect_attempts: -5 is not taken; a whole number from -1 to 1000000 is needed"."""
    return "; and ".join(_named(fault) for fault in faults[:_MOST])


def missing(name: str) -> str:
    """Of a field that is not there, "value.camera_id"; empty: of the body."""
    if not name:
        return "the body is missing; send a JSON object, {} where nothing is to be said"
    return f"{name} is missing; {_NEEDED.get(name.rpartition('.')[2], _OBJECT)}"


def _named(fault: object) -> str:
    if not isinstance(fault, dict):
        return "the body cannot be read"
    where = [str(part) for part in fault.get("loc", ()) if part not in _PARTS_OF_REQUEST]
    name, kind = ".".join(where), fault.get("type")
    if kind == "json_invalid":
        context = fault.get("ctx")
        reason = context.get("error", "") if isinstance(context, dict) else ""
        return f"the body is not JSON ({reason}, at character {name or 0})"
    if kind == "missing":
        return missing(name)
    if kind == "extra_forbidden":
        return f"{name}: there is no such field; {_instead(where[-1])}"
    given = _given(fault.get("input"), where)
    return f"{name or 'the body'}: {given} is not taken; {_NEEDED.get(where[-1], _OBJECT) if where else _OBJECT}"


def _instead(name: str) -> str:
    near = [known for known in get_close_matches(name, _NEEDED, 2) if known != name]
    return f"did you mean {near[0]}?" if near else "leave it out; /openapi.json names those that there are"


def _given(value: object, where: Sequence[str]) -> str:
    if isinstance(value, str):
        is_shown = bool(where) and where[-1] in _SHOWN and "@" not in value and len(value) <= _SHOWN_CHARACTERS
        return repr(value) if is_shown else f"a text of {len(value)} characters"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value, default=lambda _: "what was sent")[:_SHOWN_CHARACTERS]
