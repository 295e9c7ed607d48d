"""Settings read from a text, as the tests of this room do it."""

from pathlib import Path

import pytest

from penstock_video.settings.document import InvalidSettings
from penstock_video.settings.loader import NO_FLAGS, Flags, Surroundings, read_settings
from penstock_video.settings.models import VideoSettings

ENVIRON = {"CAM_PASSWORD": "p@ss:w/rd", "HOOK": "https://user:hush@hook.example/x?token=hush"}


def read(text: str, folder: Path, flags: Flags = NO_FLAGS, **environ: str) -> VideoSettings:
    """The settings of a file of this text."""
    path = folder / "cameras.yaml"
    path.write_text(text, encoding="utf-8")
    return read_settings(path, flags, surroundings=Surroundings(ENVIRON | environ, "host"))


def from_flags(flags: Flags, **environ: str) -> VideoSettings:
    """The settings of flags alone."""
    return read_settings(None, flags, surroundings=Surroundings(ENVIRON | environ, "host"))


def faults(text: str, folder: Path, flags: Flags = NO_FLAGS) -> list[str]:
    """The complaints, the file's folder left out."""
    with pytest.raises(InvalidSettings) as refused:
        read(text, folder, flags)
    return [str(complaint).replace(f"{folder}/", "") for complaint in refused.value.complaints]
