"""The folder that a run leaves: records.jsonl, a request a line, and run.json, the run itself."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from penstock_load.results import Record, Run

RUN_FILE, RECORDS_FILE = "run.json", "records.jsonl"
FORMAT = 1


class RunFolderError(Exception):
    """A run cannot be read: missing, not a run, of a newer version, or damaged. One sentence that says where."""


class RecordsFile:
    """Writes records.jsonl batch by batch. Errors of the disk are the caller's to tell: OSError passes."""

    def __init__(self, path: Path) -> None:
        """Begins the file anew; its folder is there."""
        self._file = path.open("wb")
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes it."""
        self.close()

    def append(self, records: Sequence[Record]) -> None:
        """Adds the records; they are with the operating system when this returns."""
        self._file.write(self._encoder.encode_lines(records))
        self._file.flush()

    def close(self) -> None:
        """Closes the file; once more does nothing."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run as read. records_path is None if only run.json exists."""

    name: str
    run: Run
    records_path: Path | None

    def records(self) -> Iterator[Record]:
        """The records in the order of the file; none without a file. RunFolderError names a damaged line."""
        return iter(()) if self.records_path is None else read_records(self.records_path)


def write_run(folder: Path, run: Run) -> Path:
    """Writes run.json whole or not at all, making the folder where there is none; the path that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_FILE
    unfinished = folder / f"{RUN_FILE}.part"
    fields = {name: _with_named_infinity(value) for name, value in msgspec.to_builtins(run).items()}
    unfinished.write_bytes(msgspec.json.encode({"format": FORMAT, **fields}) + b"\n")
    os.replace(unfinished, path)
    return path


def read_run_folder(path: Path) -> RunFolder:
    """The run in a folder, or that of a run.json by whatever name. RunFolderError where there is none to read."""
    run_path = path / RUN_FILE if path.is_dir() else path
    records_path = run_path.with_name(RECORDS_FILE)
    is_with_records = run_path.name == RUN_FILE and records_path.is_file()
    return RunFolder(
        name=path.name if path.is_dir() else path.stem,
        run=_read_run(run_path),
        records_path=records_path if is_with_records else None,
    )


def read_records(path: Path) -> Iterator[Record]:
    """The records of a records.jsonl, one by one. RunFolderError names the damaged line."""
    decoder = msgspec.json.Decoder(Record)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield _decode_line(decoder, line, path, number)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror}); name the folder of a run") from error


def _decode_line(decoder: msgspec.json.Decoder[Record], line: bytes, path: Path, number: int) -> Record:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunFolderError(
            f"{path}, line {number} is damaged ({error}); run the scenario again, or remove the line and what follows"
        ) from error


def _read_run(path: Path) -> Run:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be read ({error.strerror}); name the folder that `penstock load run` wrote"
        ) from error
    try:
        written = msgspec.json.decode(content, type=_Written).format
        if written > FORMAT:
            raise RunFolderError(
                f"{path} is of format {written}, and this version reads up to {FORMAT}; read it with a newer penstock"
            )
        return msgspec.json.decode(content, type=Run, strict=False)  # not strict: infinity travels by name
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path} is not a run, or is damaged ({error}); run the scenario again") from error


class _Written(msgspec.Struct):
    format: int


def _with_named_infinity(value: object) -> object:
    """JSON has no infinity (the bound above a histogram's last bucket): it is written as "inf"."""
    if isinstance(value, dict):
        return {key: _with_named_infinity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_named_infinity(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
