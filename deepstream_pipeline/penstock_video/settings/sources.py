"""The `source` sections: URIs, folders and patterns of videos, per-source options and analytics rules."""

import difflib
import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from penstock.protocol.extensions import ExtensionError
from penstock_video.analytics.config import rules_from
from penstock_video.analytics.registry import known_kinds, register_rule
from penstock_video.analytics.rules import NO_RULES, Rules
from penstock_video.decode.uri import FILE_SUFFIXES, UriKind, kind_of, path_of
from penstock_video.errors import RuleRefused, SourceNotAllowed
from penstock_video.interfaces import SECRET
from penstock_video.settings.document import SettingsFault, SettingsFaults, shown
from penstock_video.settings.models import SourceSettings
from penstock_video.settings.section import Plain, Section
from penstock_video.source_ids import ID_FORM, ID_PATTERN, id_of, is_source_id, unique_ids
from penstock_video.types import DecoderKind, DropPolicy, SourceConfig

SCHEMES = ("rtsp", "rtsps", "http", "https", "file")
VIDEO_SUFFIXES = {*FILE_SUFFIXES, ".mjpeg", ".mjpg"}
MAX_FILES = 10_000
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
_ALLOWED = "a video file, a folder of them, rtsp://, rtsps://, http://, https://, file:// or /dev/videoN is needed"


class InvalidSourceUri(Exception):
    """The URI names nothing readable. The text is for display, without user and password."""


def expanded_uris(uri: str, folder: Path) -> tuple[str, ...]:
    """The URI, or the sorted video files of a folder or pattern. Raises InvalidSourceUri."""
    scheme = _SCHEME.match(uri)
    if scheme and (scheme[2] or scheme[1].lower() in SCHEMES):
        return (_address(uri, scheme[1].lower()),)
    try:
        return _files(uri, folder)
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a NUL, an unknown ~user
        reason = getattr(error, "strerror", None) or "no path"
        raise InvalidSourceUri(f"{shown(uri)} cannot be looked up ({reason}); {_ALLOWED}") from None


def _address(uri: str, scheme: str) -> str:
    if scheme not in SCHEMES:
        close = difflib.get_close_matches(scheme, SCHEMES, n=1)
        hint = f"did you mean {close[0]}://?" if close else _ALLOWED
        raise InvalidSourceUri(f"{scheme[:16]}:// is no protocol that is read; {hint}")
    try:
        kind = kind_of(uri)
        path = path_of(uri) if kind is UriKind.FILE else ""
    except SourceNotAllowed as refused:
        raise InvalidSourceUri(refused.message) from None
    if path and not Path(path).exists():
        raise InvalidSourceUri(f"there is no file {shown(path)}")
    return uri


def _files(uri: str, folder: Path) -> tuple[str, ...]:
    own = Path(uri).expanduser()
    path = folder / own
    if path.is_dir():
        return _some(sorted(path.iterdir()), f"the folder {shown(uri)} has no video file")
    if path.exists():
        return (_written(path),)
    if glob.has_magic(uri):
        pattern = Path(glob.escape(str(folder))) / own  # the folder's name is not a pattern
        return _some(map(Path, sorted(glob.glob(str(pattern)))), f"no video file matches {shown(uri)}")
    if re.fullmatch(r"/dev/video\d+", str(path)):
        raise InvalidSourceUri(f"this machine has no {path}; `ls /dev/video*` shows its cameras")
    raise InvalidSourceUri(f"there is no file {shown(uri)}{_close_name(path)}")


def _some(found: Iterable[Path], complaint: str) -> tuple[str, ...]:
    files = tuple(_written(path) for path in found if path.suffix.lower() in VIDEO_SUFFIXES and path.is_file())
    if not files:
        raise InvalidSourceUri(f"{complaint} ({', '.join(sorted(VIDEO_SUFFIXES)[:8])}, …)")
    if len(files) > MAX_FILES:
        raise InvalidSourceUri(f"{len(files)} files are more than {MAX_FILES}; take them in parts")
    return files


def _written(path: Path) -> str:
    """The path as written; absolute if it looks like an address. Raises InvalidSourceUri if no decoder can open it."""
    text = str(path.absolute()) if ":" in str(path) else str(path)
    try:
        kind_of(text)
    except SourceNotAllowed as refused:
        raise InvalidSourceUri(refused.message) from None
    return text


def _close_name(path: Path) -> str:
    try:
        names = [item.name for item in path.parent.iterdir()]
    except OSError:
        return f"; {_ALLOWED}"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; {_ALLOWED}"


_UNKNOWN_KEY = re.compile(r"there is no key '([^']*)'")


def with_user_rules(section: Plain | None, complaints: SettingsFaults) -> Plain | None:
    """The section with module:Class lists under that class's kind, which is registered. Only for the operator's files:
    it imports what the file names."""
    if section is None or not isinstance(section.content, dict):
        return section
    for name in [key for key in section.content if ":" in key]:
        at = f"{section.path}.{name}"
        try:
            kind = register_rule(name)
        except ExtensionError as error:
            complaints.add(section.place(at), f"{at}: {error}")
            kind = ""
        content = {kind if key == name else key: value for key, value in section.content.items() if kind or key != name}
        where = {key.replace(at, f"{section.path}.{kind}", 1): value for key, value in section.where.items()}
        section = replace(section, content=content, where=where)
    return section


def check_section(section: Plain | None, complaints: SettingsFaults, *, has_tracker: bool = True) -> None:
    """Reports every invalid rule. Class labels are checked later, with the model's."""
    if section is None:
        return
    for fault in _faults(section, _without_labels(section.content), (), has_tracker=has_tracker):
        complaints.add(*_at_key(section, fault))


def check_classes(sections: Iterable[Plain], labels: Sequence[str]) -> None:
    """Raises InvalidSettings with every rule whose classes the model lacks. labels: of the model."""
    complaints = SettingsFaults()
    for section in sections:
        for fault in _faults(section, section.content, labels):
            complaints.add(*_at_key(section, fault))
    complaints.raise_any()


def rules_of(section: Plain | None, labels: Sequence[str]) -> Rules:
    """The section's rules, with the model's labels. Raises RuleRefused with the position in the file."""
    if section is None:
        return NO_RULES
    try:
        return rules_from(section.content, labels, where=section.path)
    except RuleRefused as refused:
        raise RuleRefused(str(SettingsFault(*_at_key(section, refused.message)))) from None


def names_classes(section: Plain | None) -> bool:
    """Whether a rule names a class by its label."""
    return section is not None and _without_labels(section.content) != section.content


def _faults(section: Plain, content: object, labels: Sequence[str], *, has_tracker: bool = True) -> Iterator[str]:
    """content: the section's values to validate."""
    fault_of = partial(_fault, where=section.path, labels=labels, has_tracker=has_tracker)
    if not isinstance(content, Mapping):
        yield from fault_of(content)
        return
    frame = {key: value for key, value in content.items() if key not in known_kinds()}
    found = list(fault_of(frame))
    frame = {} if found else frame
    for kind in known_kinds():
        rules = content.get(kind)
        if not isinstance(rules, list):
            found += fault_of({kind: rules})
            continue
        for number, rule in enumerate(rules):
            at = f"{section.path}.{kind}"
            for text in fault_of({**frame, kind: [rule]}):
                if text.startswith(f"{at}[0]"):
                    found.append(text.replace(f"{at}[0]", f"{at}[{number}]", 1))
    yield from found or fault_of(content)  # faults across entries, such as duplicate names


def _fault(content: object, *, where: str, labels: Sequence[str], has_tracker: bool) -> Iterator[str]:
    try:
        rules_from(content, labels, where=where, has_tracker=has_tracker)
    except RuleRefused as refused:
        yield refused.message


def _without_labels(content: object) -> object:
    """The section without classes by label."""
    if isinstance(content, list):
        return [_without_labels(item) for item in content]
    if isinstance(content, Mapping):
        return {key: _without_labels(value) for key, value in content.items() if key != "class-id" or _is_number(value)}
    return content


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_key(section: Plain, text: str) -> tuple[str, str]:
    """The fault's position and text."""
    path = text.partition(": ")[0]
    if unknown := _UNKNOWN_KEY.search(text):
        path = f"{path}.{unknown[1]}"
    return section.place(path) or "analytics", text


_DEFAULT = SourceConfig("", "")


@dataclass(frozen=True, slots=True)
class Draft:
    """A source before its unique name is known. config.source_id: empty if not given. where: for error messages."""

    settings: SourceSettings
    where: str

    @property
    def configured_id(self) -> str:
        return self.settings.config.source_id


def read_sources(sections: Iterable[Section], *, has_tracker: bool = True) -> tuple[Draft, ...]:
    """Sources of the file's sections; a folder gives several."""
    return tuple(draft for section in sections for draft in _read_source(section, has_tracker=has_tracker))


def entry_sources(sections: Sequence[Section]) -> tuple[tuple[SourceConfig, ...], ...]:
    """The sources of each section, with their IDs. Their rules are not checked."""
    found = [_read_source(section, has_tracker=True) for section in sections]
    complaints = sections[0].reading.complaints if sections else SettingsFaults()
    named = iter(named_sources([draft for drafts in found for draft in drafts], complaints))
    return tuple(tuple(next(named).config for _ in drafts) for drafts in found)


def named_sources(drafts: Iterable[Draft], complaints: SettingsFaults) -> tuple[SourceSettings, ...]:
    """Gives each a unique ID; reports duplicates that were configured."""
    drafts = tuple(drafts)
    said: dict[str, str] = {}
    for draft in drafts:
        if draft.configured_id and draft.configured_id in said:
            complaints.add(
                draft.where,
                f"camera_id {draft.configured_id!r} is given to {said[draft.configured_id]} too; rename one",
            )
        said.setdefault(draft.configured_id, draft.where)
    said.pop("", None)
    nameless = (id_of(draft.settings.config.uri) for draft in drafts if not draft.configured_id)
    found = iter(unique_ids((*said, *nameless))[len(said) :])
    return tuple(
        draft.settings
        if draft.configured_id
        else replace(draft.settings, config=replace(draft.settings.config, source_id=next(found)))
        for draft in drafts
    )


class SourceSection(BaseModel):
    """The keys of a source."""

    uri: str = Field(json_schema_extra=SECRET)
    source_id: str = Field(default="", alias="camera_id", pattern=f"^{ID_PATTERN}$", description=ID_FORM)
    camera_name: str = _DEFAULT.camera_name
    is_loop: bool = Field(default=_DEFAULT.is_loop, alias="loop")
    is_realtime: bool = Field(default=_DEFAULT.is_realtime, alias="realtime")
    policy: DropPolicy | None = Field(default=_DEFAULT.policy, alias="drop-policy")
    expected_fps: float | None = Field(default=_DEFAULT.expected_fps, alias="expected-fps", ge=0.1, le=1000)
    reconnect_interval_s: float = Field(
        default=_DEFAULT.reconnect_interval_s, alias="rtsp-reconnect-interval", ge=0.5, le=3600
    )
    reconnect_attempts: int = Field(
        default=_DEFAULT.reconnect_attempts, alias="rtsp-reconnect-attempts", ge=-1, le=1_000_000
    )
    open_timeout_s: float = Field(default=_DEFAULT.open_timeout_s, alias="open-timeout", ge=0.5, le=600)
    frozen_after_s: float = Field(default=_DEFAULT.frozen_after_s, alias="frozen-after", ge=1, le=86_400)
    transport: Literal["tcp", "udp"] = Field(default="tcp", alias="rtsp-transport")
    record_cache_s: float = Field(default=_DEFAULT.record_cache_s, alias="smart-rec-cache", ge=0, le=600)
    decoder: DecoderKind = _DEFAULT.decoder
    is_from_api: bool = Field(default=_DEFAULT.is_from_api, alias="from-api")

    def config(self, uri: str) -> SourceConfig:
        """The source's configuration with one of its URIs."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name not in ("uri", "transport")}
        return SourceConfig(uri, is_udp=self.transport == "udp", **values)


def _read_source(section: Section, *, has_tracker: bool) -> tuple[Draft, ...]:
    source = section.read(SourceSection, beside=("analytics",))
    analytics = with_user_rules(section.plain("analytics"), section.reading.complaints)
    check_section(analytics, section.reading.complaints, has_tracker=has_tracker)
    if source is None:
        return ()
    camera_id = source.source_id
    if camera_id and not is_source_id(camera_id):
        text = f"{camera_id!r} is a file's name beside the sources'"
        section.complain(section["camera_id"], section.at("camera_id"), text)
    try:
        found = expanded_uris(source.uri, section.reading.folder)
    except InvalidSourceUri as refused:
        section.complain(section["uri"], section.at("uri"), str(refused))
        return ()
    if len(found) > 1 and camera_id:
        text = f"{len(found)} files cannot share one; leave it out"
        section.complain(section["camera_id"], section.at("camera_id"), text)
        return ()
    where = section.place("uri")
    return tuple(Draft(SourceSettings(source.config(one), analytics), where) for one in found)
