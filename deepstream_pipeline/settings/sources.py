"""The sections `source`: which videos, and what holds for each."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from deepstream_pipeline.settings.complaints import Complaints
from deepstream_pipeline.settings.places import PlaceRefused, places
from deepstream_pipeline.settings.records import SourceSettings
from deepstream_pipeline.settings.rules import check_section
from deepstream_pipeline.settings.section import Section
from deepstream_pipeline.source_ids import ID_FORM, ID_PATTERN, id_of, is_source_id, unique_ids
from deepstream_pipeline.types import DecoderKind, DropPolicy, SourceConfig

DAY_S = 86_400.0
_POLICIES = tuple(policy.value for policy in DropPolicy)


@dataclass(frozen=True, slots=True)
class Draft:
    """A source before it has a name of its own. config.source_id: empty where none was said. where: for complaints."""

    settings: SourceSettings
    where: str

    @property
    def said_id(self) -> str:
        """The id that was said, or nothing."""
        return self.settings.config.source_id


def read_sources(sections: Iterable[Section], *, has_tracker: bool = True) -> tuple[Draft, ...]:
    """Of the file's sections; a folder is several sources."""
    return tuple(draft for section in sections for draft in _read_source(section, has_tracker=has_tracker))


def named_sources(drafts: Iterable[Draft], complaints: Complaints) -> tuple[SourceSettings, ...]:
    """Each with an id of its own; complains where one was said twice."""
    drafts = tuple(drafts)
    said: dict[str, str] = {}
    for draft in drafts:
        if draft.said_id and draft.said_id in said:
            complaints.add(
                draft.where, f"camera_id {draft.said_id!r} is given to {said[draft.said_id]} too; rename one"
            )
        said.setdefault(draft.said_id, draft.where)
    said.pop("", None)
    nameless = (id_of(draft.settings.config.uri) for draft in drafts if not draft.said_id)
    found = iter(unique_ids((*said, *nameless))[len(said) :])
    return tuple(
        draft.settings
        if draft.said_id
        else replace(draft.settings, config=replace(draft.settings.config, source_id=next(found)))
        for draft in drafts
    )


def _read_source(section: Section, *, has_tracker: bool) -> tuple[Draft, ...]:
    section.require("uri")
    uri = section.text("uri", is_secret=True)
    config = _config(section, uri)
    analytics = section.plain("analytics")
    check_section(analytics, section.reading.complaints, has_tracker=has_tracker)
    section.close()
    if not uri:
        return ()
    try:
        found = places(uri, section.reading.folder)
    except PlaceRefused as refused:
        section.complain(section["uri"], section.at("uri"), str(refused))
        return ()
    if len(found) > 1 and config.source_id:
        section.complain(
            section["camera_id"], section.at("camera_id"), f"{len(found)} files cannot share one; leave it out"
        )
        return ()
    where = section.place("uri")
    return tuple(Draft(SourceSettings(replace(config, uri=one), analytics), where) for one in found)


def _config(section: Section, uri: str) -> SourceConfig:
    default = SourceConfig(uri, "")
    camera_id = section.text("camera_id", pattern=ID_PATTERN, form=ID_FORM)
    if camera_id and not is_source_id(camera_id):
        section.complain(
            section["camera_id"], section.at("camera_id"), f"{camera_id!r} is a file's name beside the sources'"
        )
    policy = section.word("drop-policy", _POLICIES, "")
    return SourceConfig(
        uri=uri,
        source_id=camera_id,
        camera_name=section.text("camera_name"),
        is_loop=section.flag("loop"),
        is_realtime=section.flag("realtime"),
        policy=DropPolicy(policy) if policy else None,
        expected_fps=section.optional_number("expected-fps", 0.1, 1000),
        reconnect_interval_s=section.number("rtsp-reconnect-interval", default.reconnect_interval_s, 0.5, 3600),
        reconnect_attempts=section.whole("rtsp-reconnect-attempts", default.reconnect_attempts, -1, 1_000_000),
        open_timeout_s=section.number("open-timeout", default.open_timeout_s, 0.5, 600),
        frozen_after_s=section.number("frozen-after", default.frozen_after_s, 1, DAY_S),
        is_udp=section.word("rtsp-transport", ("tcp", "udp"), "tcp") == "udp",
        record_cache_s=section.number("smart-rec-cache", default.record_cache_s, 0, 600),
        decoder=section.choice("decoder", DecoderKind, default.decoder),
    )
