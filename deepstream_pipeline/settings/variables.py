"""${NAME} in addresses, passwords and headers: secrets come from the environment, not from the file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Variables:
    """The environment that texts may name."""

    environ: Mapping[str, str]

    def substituted(self, text: str) -> tuple[str, str]:
        """The text with its variables' values, and what is wrong, which never shows one.

        In an address a value before its @ is percent-encoded, so that a password may hold any sign.
        """
        names = _VARIABLE.findall(text)
        for name in names:
            if not _NAME.fullmatch(name):
                return "", "a variable is written ${NAME}, of letters, digits and _"
            if name not in self.environ:
                return "", f"the environment has no variable {name}; set it, or write the value out"
        host_at = text.rfind("@") if "://" in text else -1

        def value_of(match: re.Match[str]) -> str:
            value = self.environ[match[1]]
            return quote(value, safe="") if match.start() < host_at else value

        return _VARIABLE.sub(value_of, text), ""
