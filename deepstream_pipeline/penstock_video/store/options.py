"""Options of the event store. Light: imported by the settings."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

MIB = 1 << 20


class Snapshots(StrEnum):
    """Whether events get a snapshot. auto: not with GPU decoding, which would copy each frame to host memory."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class EventsOptions:
    """Options of the event store.

    is_enabled: None enables it if the control API runs or there is an output folder. folder: None for OUT/events, else
    PENSTOCK_HOME/video/events. max_bytes: size of the database. max_days: age of events. The oldest rows are removed.
    """

    is_enabled: Annotated[bool | None, Field(alias="enable")] = None
    folder: Path | None = None
    max_bytes: Annotated[int, Field(alias="max-bytes", ge=16 * MIB, le=1 << 50)] = 1024 * MIB
    max_days: Annotated[float, Field(alias="max-days", gt=0, le=36_500)] = 30.0
    snapshots: Snapshots = Snapshots.AUTO
