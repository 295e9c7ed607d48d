"""A model's string parameters as values, each refused with key, value and what is allowed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from server.core.errors import InvalidRequest

_Choice = TypeVar("_Choice", bound=IntEnum)
_FLAGS = {"0": False, "1": True, "false": False, "true": True, "off": False, "on": True}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Every reader gives the default where the key is absent; InvalidRequest where the value is not allowed."""

    model_name: str
    values: Mapping[str, str]

    def refusal(self, key: str, what: str) -> InvalidRequest:
        """The error for a key; what: the rest of the sentence."""
        said = f" = {self.values[key]!r}" if key in self.values else ""
        return InvalidRequest(f"model {self.model_name!r}: parameter {key!r}{said} {what}")

    def choice(self, key: str, kind: type[_Choice], default: _Choice) -> _Choice:
        """A member by its number or its name, in any case."""
        said = self._said(key)
        if said is None:
            return default
        for member in kind:
            if said.lower() in (str(member.value), member.name.lower()):
                return member
        allowed = ", ".join(f"{member.value} or {member.name.lower()}" for member in kind)
        raise self.refusal(key, f"is not one of: {allowed}")

    def one_of(self, key: str, names: tuple[str, ...], default: str) -> str:
        said = self._said(key)
        if said is None:
            return default
        if said not in names:
            raise self.refusal(key, f"is not one of: {', '.join(names)}")
        return said

    def flag(self, key: str) -> bool:
        """False where absent."""
        said = self._said(key)
        if said is None:
            return False
        if said.lower() not in _FLAGS:
            raise self.refusal(key, f"is not one of: {', '.join(_FLAGS)}")
        return _FLAGS[said.lower()]

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        said = self._said(key)
        return default if said is None else self._finite(key, said)

    def share(self, key: str, default: float) -> float:
        """A number from 0 to 1."""
        number = self.number(key, default)
        if not 0.0 <= number <= 1.0:
            raise self.refusal(key, "is not between 0 and 1")
        return number

    def count(self, key: str, default: int, *, least: int = 1) -> int:
        """A whole number, `least` or more, but not 0."""
        said = self._said(key)
        if said is None:
            return default
        try:
            number = int(said)
        except ValueError:
            raise self.refusal(key, "is not a whole number") from None
        if number < least or number == 0:
            raise self.refusal(key, "must be 1 or more" + (", or -1 for no limit" if least == -1 else ""))
        return number

    def numbers(self, key: str, *, count: int, default: float) -> tuple[float, ...]:
        """Exactly `count` numbers, separated by semicolons."""
        said = self._said(key)
        if said is None:
            return (default,) * count
        parts = [part for part in said.split(";") if part.strip()]
        if len(parts) != count:
            raise self.refusal(key, f"has {len(parts)} numbers; {count} are needed, separated by ';'")
        return tuple(self._finite(key, part) for part in parts)

    def words(self, key: str) -> tuple[str, ...]:
        """Separated by semicolons; one at the end is allowed."""
        said = self._said(key)
        return () if said is None else tuple(word.strip() for word in said.removesuffix(";").split(";"))

    def _said(self, key: str) -> str | None:
        said = self.values.get(key)
        return None if said is None else said.strip()

    def _finite(self, key: str, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self.refusal(key, "is not a number" if ";" not in self.values[key] else "holds what is not a number")
        return number
