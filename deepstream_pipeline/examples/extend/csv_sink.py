"""A sink: the number of tracked objects of each frame, as CSV. `sink: [{type: csv_sink:CsvSink, folder: out}]`"""

from pathlib import Path

from pydantic import BaseModel

from penstock_video.types import FrameResult


class CsvSink:
    class Options(BaseModel):
        folder: Path
        separator: str = ","

    def __init__(self, options: Options) -> None:
        self._separator = options.separator
        options.folder.mkdir(parents=True, exist_ok=True)
        self._file = (options.folder / "objects.csv").open("w")

    def write(self, result: FrameResult) -> None:
        row = result.frame.source_id, result.frame.frame_num, len(result.tracks)
        print(*row, sep=self._separator, file=self._file)

    def end_source(self, source_id: str) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
