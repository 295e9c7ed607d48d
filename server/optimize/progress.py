"""How the work tells somebody that it goes on."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """step(what, count): a step with so many parts begins. advance(): one of its parts is done."""

    step: Callable[[str, int], None]
    advance: Callable[[], None]
