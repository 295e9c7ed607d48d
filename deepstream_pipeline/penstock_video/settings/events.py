"""The event store's options: section `events`, flags and defaults."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from penstock_video.settings.section import Section
from penstock_video.store.options import EventsOptions


class OnOff(StrEnum):
    """Value of a flag."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class EventFlags:
    """Command-line flags of the event store; None if not given."""

    is_enabled: OnOff | None = None
    folder: Path | None = None
    max_bytes: int | None = None
    max_days: float | None = None

    def over(self, settings: EventsOptions) -> EventsOptions:
        """The settings with the flags that were given."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.is_enabled is not None:
            given["is_enabled"] = self.is_enabled is OnOff.ON
        return replace(settings, **given)


def event_options(
    section: Section, flags: EventFlags, out: Path | None, environ: Mapping[str, str], *, has_api: bool
) -> EventsOptions | None:
    """The options with their folder; is_enabled: whether the store was asked for. None without a store.

    out: the output folder. has_api: the control API runs.
    """
    settings = flags.over(section.read(EventsOptions) or EventsOptions())
    has_use = has_api or out is not None
    if settings.is_enabled is False or (settings.is_enabled is None and not has_use):
        return None
    home = Path(environ.get("PENSTOCK_HOME") or "~/.penstock").expanduser() / "video"
    folder = settings.folder or (out or home) / "events"
    return replace(settings, folder=folder, is_enabled=bool(settings.is_enabled or settings.folder))
