"""Reads settings from a TOML file, PENSTOCK_* variables and flags, in increasing order of precedence."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.gateway.auth.api_keys import InvalidApiKey, read_key_list
from penstock.gateway.batching.options import merge_batching_settings, read_batching_settings
from penstock.gateway.settings import PREFIX, Settings
from penstock.protocol.errors import InvalidRequest

OTHER_VARIABLES = {
    *("PENSTOCK_CONFIG", "PENSTOCK_ENGINE_ID", "PENSTOCK_LOG_FOLDER", "PENSTOCK_PROCESS"),
    *("PENSTOCK_LAYOUTS", "PENSTOCK_API_KEY", "PENSTOCK_CLIENT_CERTIFICATE"),  # used by commands
    *("PENSTOCK_SHARD", "PENSTOCK_SHARDS", "PENSTOCK_VIDEO_API_KEY", "PENSTOCK_GATEWAY_URL"),  # the video program's
}
KEYS_VARIABLE = "PENSTOCK_API_KEYS"
LISTS = (
    *("model_repository", "models", "required_models", "batching"),
    *("anonymous", "trusted_proxy", "allowed_host", "cors_origin", "allow_outbound", "load_target"),
)
BATCHING = "batching"
_SEPARATORS = {"model_repository": os.pathsep, BATCHING: ";"}  # separators of lists in variables; otherwise a comma

_FIXES = {
    "int_parsing": "it should be a whole number",
    "int_from_float": "it should be a whole number",
    "float_parsing": "it should be a number",
    "bool_parsing": "it should be true or false",
    "tuple_type": 'it should be a list, such as ["people"]',
}


class SettingsError(Exception):
    """A setting is unknown, malformed or impossible. The message has its name, origin and the fix."""


def read_settings(
    flags: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ, file: Path | None = None
) -> Settings:
    """The settings of this run. Raises SettingsError with file:line or the variable's name, and the fix."""
    values, origins = _gather(flags, environ, file)
    try:
        return Settings(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(dict(item), origins) for item in error.errors())) from error


def settings_origins(
    flags: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ, file: Path | None = None
) -> dict[str, str]:
    """FILE:LINE, variable or flag of each setting that is set explicitly. Raises SettingsError."""
    return _gather(flags, environ, file)[1]


def _gather(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and origins by setting name."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    path = file or (Path(environ["PENSTOCK_CONFIG"]) if environ.get("PENSTOCK_CONFIG") else None)
    if path is not None:
        _merge(values, origins, *_from_file(path))
    _merge(values, origins, *_from_environment(environ))
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    _merge(values, origins, given, {name: "--" + name.replace("_", "-") for name in given})
    return values, origins


def _merge(values: dict[str, Any], origins: dict[str, str], new: Mapping[str, Any], where: Mapping[str, str]) -> None:
    below = values.get(BATCHING, {})
    values.update(new)
    origins.update(where)
    if BATCHING in new:
        try:
            values[BATCHING] = merge_batching_settings(below, read_batching_settings(new[BATCHING]))
        except InvalidRequest as error:
            raise SettingsError(f"{where[BATCHING]}: {error}") from error


def _from_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        text = path.read_text()
        table = tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); give an existing TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error
    lines = {name: f"{path}:{_line_of(text, name)}" for name in table}
    if "api_keys" in table:
        raise SettingsError(f"{lines['api_keys']}: put API keys into a separate file, and set access_file to it")
    for name in table:
        _require_known(name, lines[name])
    return table, lines


def _line_of(text: str, name: str) -> int:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith((f"{name} ", f"{name}=", f"{name}.", f'"{name}"', f"[{name}]", f"[{name}.")):
            return number
    return 1


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        _require_known(name, variable)
        separator = _SEPARATORS.get(name, ",")
        values[name] = tuple(filter(None, text.split(separator))) if name in LISTS else text
        if variable == KEYS_VARIABLE:
            values[name] = _hashed_keys(text)
        origins[name] = variable
    return values, origins


def _hashed_keys(text: str) -> tuple[str, ...]:
    try:
        return read_key_list(text)
    except InvalidApiKey as error:
        raise SettingsError(f"{KEYS_VARIABLE}: {error}") from None


def _require_known(name: str, where: str) -> None:
    if name in Settings.model_fields:
        return
    close = difflib.get_close_matches(name, Settings.model_fields, n=1)
    hint = f"; did you mean {_spelling(close[0], where)}?" if close else "; `penstock up --help` lists all settings"
    raise SettingsError(f"{where}: unknown setting {name!r}{hint}")


def _spelling(name: str, where: str) -> str:
    return f"{PREFIX}{name.upper()}" if where.startswith(PREFIX) else name


def _explain(item: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    location = item["loc"]
    text = str(item["msg"]).removeprefix("Value error, ")
    if not location:
        return text
    name = str(location[0])
    origin = origins.get(name, name)
    subject = f"{origin}: {name}" if ":" in origin else origin  # file:line does not name the setting
    fix = _FIXES.get(str(item["type"]), text.replace("Input should", "it should", 1))
    return f"{subject}: {text}" if text.startswith(f"{name} is ") else f"{subject} is {item.get('input')!r}: {fix}"
