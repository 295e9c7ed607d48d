"""Where in the output folder the files of a source lie."""

import re
from pathlib import Path

from deepstream_pipeline.errors import SinkFailed

_SOURCE_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,64}")


def made_folder(folder: Path) -> Path:
    """The folder, made where it was not, and proved to take files. Raises SinkFailed naming it."""
    probe = folder / ".penstock-writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        message = f"{folder}: cannot be written to ({why}); name a folder that this user may write to"
        raise SinkFailed(message) from error
    return folder


class SourceFolders:
    """One source's files lie in the folder itself, those of several each in a folder named after its source.

    is_single: the program was started with one source; those that are added later get folders of their own.
    """

    def __init__(self, folder: Path, *, is_single: bool) -> None:
        self.folder = folder
        self._has_room_for_one = is_single
        self._single = ""

    def of(self, source_id: str) -> Path:
        """That source's folder, which may not be there yet. Raises SinkFailed where the id is no name of a folder."""
        if not _SOURCE_ID.fullmatch(source_id):
            raise SinkFailed(
                f"source id {source_id!r} cannot be a folder's name: letters, digits, . _ - and no dots alone"
            )
        if self._has_room_for_one:
            self._has_room_for_one, self._single = False, source_id
        return self.folder if source_id == self._single else self.folder / source_id
