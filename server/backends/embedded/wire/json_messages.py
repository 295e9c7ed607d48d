"""Protobuf messages as Triton's REST side writes them: every field by its own name, whole numbers as numbers."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json]"


def json_of_message(message: Message) -> dict[str, Json]:
    """The message's fields in their declared order, defaults too; what can be absent, and is, is left out.

    Protobuf's own JSON writes 64-bit numbers as strings, which no client of Triton expects.
    """
    fields: Sequence[FieldDescriptor] = message.DESCRIPTOR.fields  # type: ignore[assignment]  # upb's, of the same kind
    return {
        field.name: _value(field, getattr(message, field.name))
        for field in fields
        if not field.has_presence or message.HasField(field.name)
    }


def _value(field: FieldDescriptor, value: object) -> Json:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {str(key): _one(inner, item) for key, item in sorted(value.items())}  # type: ignore[attr-defined]
    if field.is_repeated:
        return [_one(field, item) for item in value]  # type: ignore[attr-defined]
    return _one(field, value)


def _one(field: FieldDescriptor, value: object) -> Json:
    if isinstance(value, Message):
        return json_of_message(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name  # type: ignore[index]
    if isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{field.full_name} holds a {type(value).__name__}, which JSON has no form for")
