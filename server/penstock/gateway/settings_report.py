"""Effective settings with their origins. Secrets are hidden."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.gateway.settings import PREFIX, Settings
from penstock.protocol.system_reports import SettingReport

ORIGINS_FILE = "origins.json"  # in a stack's run directory
HIDDEN = "(hidden)"
_USER_IN_URL = re.compile(r"(://)[^/@\s]*@")


def write_origins(run_dir: Path, origins: Mapping[str, str]) -> None:
    """Stores the origins for the stack's processes. Only its user can read the file."""
    with suppress(OSError):  # such as a full disk: origins are then unknown
        file = os.open(run_dir / ORIGINS_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(file, "wb") as opened:
            opened.write(msgspec.json.encode(origins))


def read_origins(run_dir: Path) -> dict[str, str]:
    """The stored origins; empty if there are none."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((run_dir / ORIGINS_FILE).read_bytes(), type=dict[str, str])
    return {}


def setting_rows(settings: Settings, origins: Mapping[str, str]) -> list[SettingReport]:
    """All settings, sorted by name. origins: FILE:LINE, variable or flag, by setting name."""
    values, defaults = settings.model_dump(mode="json"), Settings.model_validate({}).model_dump(mode="json")
    return [_row(name, values[name], defaults[name], origins.get(name, "")) for name in sorted(values)]


def _row(name: str, value: Any, default: Any, source: str) -> SettingReport:
    if Settings.model_fields[name].repr is False and value != default:
        value = HIDDEN
    return SettingReport(name, _without_user(value), default, _origin(source, is_default=value == default), source)


def _origin(source: str, *, is_default: bool) -> str:
    if not source:
        return "default" if is_default else "start"
    if source.startswith("--"):
        return "flag"
    return "variable" if source.startswith(PREFIX) else "file"


def _without_user(value: Any) -> Any:
    """The value, with user names and passwords in URLs hidden."""
    match value:
        case str():
            return _USER_IN_URL.sub(rf"\1{HIDDEN}@", value)
        case list():
            return [_without_user(each) for each in value]
        case dict():
            return {key: _without_user(each) for key, each in value.items()}
    return value
