"""A sink: the number of tracked objects of each frame, as CSV. `sink: [{type: csv_sink:CsvSink, folder: out}]`"""

from pathlib import Path

from pydantic import BaseModel

from penstock_video.types import FrameResult


class CsvSink:
    """Writes a line for each frame: source, frame number, number of objects."""

    class Options(BaseModel):
        folder: Path
        separator: str = ","

    def __init__(self, options: Options) -> None:
        self._separator = options.separator
        options.folder.mkdir(parents=True, exist_ok=True)
        self._file = (options.folder / "objects.csv").open("w")

    def write(self, result: FrameResult) -> None:
        row = (result.frame.source_id, str(result.frame.frame_num), str(len(result.tracks)))
        self._file.write(self._separator.join(row) + "\n")

    def end_source(self, source_id: str) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
