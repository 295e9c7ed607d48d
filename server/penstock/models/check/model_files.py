"""A model's folder for the check: config, vision card, the served version's file with its hash, and golden.json."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from penstock.engines.config_pbtxt import config_from_proto
from penstock.engines.embedded.repository import (
    BACKEND,
    ModelFolder,
    chosen_versions,
    json_of,
    read_config,
    why_not_servable,
    with_name_and_backend,
)
from penstock.engines.ort_serving.config import Config
from penstock.models.catalogue import InstalledModel
from penstock.models.check.golden import PICTURE_FILE, Golden, GoldenError, read_golden
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import InvalidRequest
from penstock.vision.card import VisionCard, card_from_config

_ADVICE_RECORD_AGAIN = "bring it back, or remove golden.json and record it anew with --record"
_FILE_OF_BACKEND = {BACKEND: "model.onnx", "python": "model.py"}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A complete model folder."""

    folder: Path
    config: ModelConfig
    config_json: Config  # in ort_serving's form
    why_not_servable: str  # why the embedded engine cannot serve it; else empty
    card: VisionCard | None
    version: str  # the highest version that the version policy serves
    file: Path  # of that version; a folder for some backends
    sha256: str  # of the file; empty for a folder
    golden: Golden | None

    @property
    def is_onnx(self) -> bool:
        return self.config.backend == BACKEND

    @property
    def is_reduced(self) -> bool:
        """Whether a GPU computes the ONNX model in FP16 or TF32."""
        return self.is_onnx and self.config.parameters.get("precision", "").lower() in ("fp16", "tf32")

    @property
    def file_name(self) -> str:
        """Relative to the folder, as in golden.json."""
        return self.file.relative_to(self.folder).as_posix()

    def misfits(self, catalogue_sha256: str | None) -> list[str]:
        """Mismatches of the file's hash with golden.json's and the catalogue's. None: not in the catalogue."""
        problems = []
        if catalogue_sha256 is not None and self.sha256 != catalogue_sha256:
            problems.append(
                f"{self.file_name} has SHA-256 {self.sha256[:12]}…, the catalogue says {catalogue_sha256[:12]}…: it is "
                f"damaged or another file; fetch it again with `penstock models pull {self.folder.name}`"
            )
        recorded = self.golden.sha256 if self.golden is not None and self.file.suffix != ".py" else self.sha256
        if recorded != self.sha256 and not problems:
            problems.append(
                f"{self.file_name} has SHA-256 {self.sha256[:12]}…, golden.json was recorded with {recorded[:12]}…: "
                "the file is damaged, or newer than golden.json (then remove that, and record it anew with --record)"
            )
        return problems

    def picture(self) -> bytes | None:
        """golden.jpg, or None. Raises GoldenError if it is not golden.json's picture."""
        path = self.folder / PICTURE_FILE
        record = self.golden.picture if self.golden is not None else None
        try:
            picture = path.read_bytes()
        except FileNotFoundError:
            if record is None:
                return None
            raise GoldenError(
                f"{path} is not there, but golden.json tells what is seen in it: {_ADVICE_RECORD_AGAIN}"
            ) from None
        except OSError as error:
            raise GoldenError(f"{path}: cannot be read: {error.strerror}") from error
        if record is not None and hashlib.sha256(picture).hexdigest() != record.sha256:
            raise GoldenError(f"{path} is another picture than golden.json was recorded with: {_ADVICE_RECORD_AGAIN}")
        return picture


def read_model_files(model: InstalledModel) -> ModelFiles:
    """The model's files, hashed (about 1 s per GB). Raises GoldenError if something is missing or unreadable."""
    try:
        return _read_model_files(model)
    except OSError as error:
        where = error.filename or model.repository / model.name
        raise GoldenError(f"{where} cannot be read ({error.strerror}): let this user read it") from error


def _read_model_files(model: InstalledModel) -> ModelFiles:
    folder = model.repository / model.name
    here = ModelFolder(model.name, folder, tuple(sorted(map(int, model.versions))))
    try:
        proto = with_name_and_backend(here, read_config(here))
        config = config_from_proto(proto)
        card = card_from_config(config)
    except InvalidRequest as error:
        raise GoldenError(error.message) from error
    versions = chosen_versions(here, proto)
    if not versions:
        raise GoldenError(f"{folder} has no version that its config.pbtxt serves: its files belong into {folder / '1'}")
    version = str(versions[-1])
    name = proto.default_model_filename or _FILE_OF_BACKEND.get(config.backend, "")
    file = folder / version / name
    if not file.exists():
        raise GoldenError(f"{file} is not there: put the model's file in its place")
    return ModelFiles(
        folder, config, json_of(proto), why_not_servable(proto), card, version, file, _sha256(file), read_golden(folder)
    )


def _sha256(path: Path) -> str:
    if path.is_dir():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
