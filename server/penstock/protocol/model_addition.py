"""The JSON of `penstock models add --json`: the command writes it, the gateway reads it."""

import msgspec


class ModelAdded(msgspec.Struct, kw_only=True):
    """Report on the added model. max_batch_size: 0 for one picture per call. state: READY if it serves, or why not."""

    name: str
    layout: str
    max_batch_size: int
    batches: str
    evidence: tuple[str, ...]
    warnings: tuple[str, ...]
    state: str


class OpenQuestion(msgspec.Struct, frozen=True):
    """A fact that the file does not state. flag: states it. choices: its values, likeliest first; may be empty."""

    flag: str
    choices: tuple[str, ...]
    ambiguous: str


class AddFailure(msgspec.Struct, frozen=True):
    """A model that was not added. is_disk_full: the disk is full; the file may be valid."""

    name: str
    error: str
    questions: tuple[OpenQuestion, ...] = ()
    is_disk_full: bool = False
