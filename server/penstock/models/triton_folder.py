"""Adds a model folder in Triton's layout: its config is copied, and gets a card if it has none."""

import mmap
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import config_from_proto, read_proto
from penstock.engines.load_policy import check_model
from penstock.models.added_folder import ADDED_BY, ONNX_FILE, TORCH_FILE, Batches, CannotAdd, model_page, proto_text
from penstock.models.inspect.inspection import Inspection
from penstock.models.inspect.proposal import proposed_config
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.request_checks import is_version
from penstock.vision.card import card_from_config

CONFIG_FILE = "config.pbtxt"
MAX_FILES = 1000
_NETWORK_TYPE = "network-type"


def is_model_folder(path: Path) -> bool:
    """Whether the folder is a model: it has a config.pbtxt or a numbered version."""
    return path.is_dir() and ((path / CONFIG_FILE).is_file() or bool(_versions(path)))


def model_file_of(folder: Path) -> Path:
    """The model's file of the newest version. Raises CannotAdd."""
    versions = _versions(folder)
    if not versions:
        raise CannotAdd(f"{folder} has no version: put its file into {folder / '1' / 'model.onnx'}")
    proto = _proto(folder)
    usual = (TORCH_FILE if proto.backend == "torch" else ONNX_FILE).name
    path = versions[-1] / (proto.default_model_filename or usual)
    if not path.is_file():
        raise CannotAdd(f"{path} does not exist; only ONNX models and programs of torch.export can be added")
    return path


def has_card(folder: Path) -> bool:
    """Whether the folder's config has picture parameters."""
    return folder.is_dir() and _NETWORK_TYPE in _proto(folder).parameters


def check_files(folder: Path, *, allows_code: bool) -> None:
    """Raises CannotAdd for a config or a file that could run code, or for files outside of the folder."""
    config = _proto(folder)
    with ExitStack() as opened:
        files: dict[str, bytes | mmap.mmap] = {}
        for path in _files(folder):
            name = path.relative_to(folder).as_posix()
            if len(files) >= MAX_FILES:
                raise CannotAdd(f"{folder} has more than {MAX_FILES} files")
            if path.stat().st_size and path.suffix == ".onnx":
                file = opened.enter_context(path.open("rb"))
                files[name] = opened.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            elif path.name not in _TEXT_FILES:
                files[name] = b""
        try:
            check_model(config, files, allows_code=allows_code)
        except InvalidRequest as error:
            raise CannotAdd(error.message.replace(" in the request", "")) from error


def fill_from_folder(staged: Path, source: Path, name: str, inspection: Inspection, *, origin: str) -> Batches:
    """Copies the folder and completes its config; batching is not changed. Raises CannotAdd."""
    for path in _files(source):
        target = staged / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    proto = _proto(source)
    proto.name = name
    if not proto.backend and not proto.platform:
        proto.backend = "onnxruntime"
    proto.parameters[ADDED_BY].string_value = "penstock models add"
    try:
        if _NETWORK_TYPE not in proto.parameters or not proto.input or not proto.output:
            _complete(
                proto,
                proposed_config(inspection.facts, inspection.recognition, name, max_batch_size=proto.max_batch_size),
            )
        if card_from_config(config_from_proto(proto)) is None:
            raise CannotAdd(f"{source} has no card: choose one with --layout")
    except InvalidRequest as error:
        raise CannotAdd(error.message) from error
    (staged / CONFIG_FILE).write_text(proto_text(proto), encoding="utf-8")
    batches = Batches(proto.max_batch_size, f"as in its {CONFIG_FILE}")
    (staged / "MODEL.md").write_text(model_page(name, inspection, batches, origin), encoding="utf-8")
    return batches


def _complete(proto: model_config_pb2.ModelConfig, proposed: ModelConfig) -> None:
    """Adds the card, the inputs and the outputs of `proposed` that proto does not have."""
    if _NETWORK_TYPE not in proto.parameters:
        for key, value in proposed.parameters.items():
            if key not in proto.parameters:
                proto.parameters[key].string_value = value
    tensors = model_config_pb2.ModelConfig()
    text_format.Parse(proto_text(proposed), tensors)
    for own, found in ((proto.input, tensors.input), (proto.output, tensors.output)):
        if not own:
            own.extend(found)


_TEXT_FILES = (CONFIG_FILE, "MODEL.md", "labels.txt", "golden.json", "golden.jpg")


def _proto(folder: Path) -> model_config_pb2.ModelConfig:
    path = folder / CONFIG_FILE
    if not path.is_file():
        return model_config_pb2.ModelConfig()
    try:
        return read_proto(path)
    except InvalidRequest as error:
        raise CannotAdd(error.message) from error


def _versions(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if is_version(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name))


def _files(folder: Path) -> Iterator[Path]:
    """Regular files of the folder. Raises CannotAdd for links, which could lead outside."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise CannotAdd(f"{path} is a link: copy the file into the folder")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path
