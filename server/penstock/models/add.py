"""Adds a model file to the repository in PENSTOCK_HOME, and removes a model from it."""

import mmap
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.engines.config_pbtxt import read_config
from penstock.engines.load_policy import check_model
from penstock.engines.ort_serving.tensorrt_rtx import FOLDER
from penstock.gpu.tensorrt import Accelerator
from penstock.models.added_folder import ADDED_BY, ONNX_FILE, Batches, CannotAdd, fill_folder
from penstock.models.inspect.facts import UnreadableModel
from penstock.models.inspect.inspection import Hints, Inspection, Limits, inspect_file, memory_limit_bytes
from penstock.models.model_folder import disk_sentence, new_model_folder, remove, repository_of
from penstock.models.placement.choice import CannotPlace, PlacementChoice, PlacementWish, demanded
from penstock.models.placement.placing import place, why_no_gpu, why_not_here
from penstock.models.tensorrt_accelerator import CACHE_FOLDER, accelerator_sentence, write_accelerator
from penstock.models.triton_folder import CONFIG_FILE, check_files, fill_from_folder, has_card, model_file_of
from penstock.process_limits import limited_memory
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.request_checks import MAX_MODEL_NAME, check_new_model_name

PICTURE_FILE = "golden.jpg"
MAX_PICTURE_BYTES = 1 << 20
_OTHERS = re.compile(r"[^A-Za-z0-9._-]+")


class NotServable(CannotAdd):
    """The file's card is not known or ambiguous. inspection: the findings."""

    def __init__(self, reason: str, inspection: Inspection) -> None:
        super().__init__(reason)
        self.inspection = inspection


@dataclass(frozen=True, slots=True)
class AddedModel:
    """An added model. folder: in the repository. placement: where it runs; None if only the engine decides that.

    notes: sentences for the user about TensorRT.
    """

    name: str
    folder: Path
    inspection: Inspection
    batches: Batches
    placement: PlacementChoice | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AddOptions:
    """pictures: encoded pictures for the trial; empty for the packaged ones.

    allows_code: custom operators are accepted, and PyTorch programs, which can run any code, are run.

    may_replace: a model of that name that was added earlier is replaced. origin: of the file, for MODEL.md; its path if
    empty. wish: where it must run. accelerator: for Triton of NGC; accelerator_cache: its folder as Triton sees it, the
    model's own if empty.
    """

    hints: Hints
    pictures: tuple[Path, ...] = ()
    may_replace: bool = False
    allows_code: bool = False
    origin: str = ""
    accelerator: Accelerator | None = None
    accelerator_cache: str = ""
    limits: Limits = field(default_factory=Limits)
    wish: PlacementWish = field(default_factory=PlacementWish)


def name_from(source: Path) -> str:
    """The name of the file or folder as a model name; other characters become `-`."""
    stem = source.stem if source.is_file() else source.name
    return _OTHERS.sub("-", stem).strip("-._")[:MAX_MODEL_NAME] or "model"


def check_name(name: str) -> None:
    """Raises CannotAdd for an invalid model name."""
    try:
        check_new_model_name(name)
    except InvalidRequest as error:
        raise CannotAdd(error.message) from error


def add_model(
    source: Path,
    name: str,
    options: AddOptions,
    *,
    home: Path,
    other_repositories: Sequence[Path] = (),
    on_stage: Callable[[str], None] = lambda _: None,
) -> AddedModel:
    """Adds an ONNX file, a program of torch.export, or a model folder in Triton's layout, to home's repository. Blocks.

    Raises CannotAdd; then nothing has changed. home: PENSTOCK_HOME. other_repositories: their models' names cannot be
    used. on_stage: called with the current step, for display.
    """
    check_name(name)
    _check_is_free(name, home, other_repositories, may_replace=options.may_replace)
    on_stage("inspecting")
    file = model_file_of(source) if source.is_dir() else source
    has_config = (source / CONFIG_FILE).is_file()
    if demanded(options.wish) and has_config:
        raise CannotAdd(f"{demanded(options.wish)} is for files: {source / CONFIG_FILE} says where its model runs")
    if why := why_not_here(options.wish, why_no_gpu()):
        raise CannotAdd(why)
    try:
        inspection = inspect_file(
            file, options.hints, options.limits, pictures=options.pictures, allows_code=options.allows_code
        )
    except UnreadableModel as error:
        raise CannotAdd(str(error)) from error
    if source.is_dir():
        check_files(source, allows_code=options.allows_code)
    elif not inspection.facts.file_format.is_torch:  # without the permission it was not run, and is rejected below
        _check_code(source, inspection, allows_code=options.allows_code)
    if not inspection.is_servable and not has_card(source):
        raise NotServable(inspection.reason, inspection)
    try:
        with new_model_folder(home, name, lambda: on_stage(f"waiting for another command that makes {name}")) as staged:
            on_stage("testing batches")
            origin = options.origin or str(source.resolve())
            fill = fill_from_folder if has_config else fill_folder
            with limited_memory(memory_limit_bytes(options.limits, inspection.facts.size_bytes)):
                batches = fill(staged, source if has_config else file, name, inspection, origin=origin)
            placement = None if has_config else _place(staged, inspection, batches, options, on_stage)
            _copy_picture(staged, options.pictures)
            notes = (*_accelerate(staged, repository_of(home) / name, options), *engine_notes(source))
            _check_is_free(name, home, other_repositories, may_replace=options.may_replace)
    except OSError as error:
        needs_bytes = inspection.facts.size_bytes
        raise CannotAdd(disk_sentence(error, home, needs_bytes=needs_bytes)) from error
    return AddedModel(name, repository_of(home) / name, inspection, batches, placement, notes)


def _place(
    staged: Path, inspection: Inspection, batches: Batches, options: AddOptions, on_stage: Callable[[str], None]
) -> PlacementChoice | None:
    if inspection.facts.file_format.is_torch:
        if flags := demanded(options.wish):
            raise CannotAdd(f"{flags} is for ONNX files: set the parameter precision of a PyTorch program's config")
        return None
    no_gpu = why_no_gpu()
    if not no_gpu:
        on_stage("trying the GPU")
    try:
        return place(staged, options.wish, pictures=options.pictures, rows=batches.best_rows, no_gpu=no_gpu)
    except CannotPlace as error:
        raise CannotAdd(str(error)) from error


def remove_model(name: str, *, home: Path) -> Path:
    """Removes a model that was added or pulled from home's repository; returns its folder. Raises CannotAdd."""
    check_name(name)
    folder = repository_of(home) / name
    if not folder.is_dir():
        raise CannotAdd(f"there is no model {name!r} in {repository_of(home)}")
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            aside = folder.with_name(f".{name}.removed")  # hidden: no engine sees a part of it
            remove(aside)
            folder.rename(aside)
            shutil.rmtree(aside)
    except OSError as error:
        raise CannotAdd(disk_sentence(error, home)) from error
    return folder


def was_added(folder: Path) -> bool:
    """Whether `models add` wrote the folder."""
    try:
        return ADDED_BY in read_config(folder / "config.pbtxt").parameters
    except (InvalidRequest, OSError):
        return False


def _check_is_free(name: str, home: Path, others: Sequence[Path], *, may_replace: bool) -> None:
    for repository in others:
        if (repository / name).is_dir() and repository != repository_of(home):
            raise CannotAdd(f"{name!r} is the name of a model in {repository}: choose another with --name")
    folder = repository_of(home) / name
    if not folder.exists() or (may_replace and was_added(folder)):
        return
    replaced = f"--replace replaces it, and `penstock models load {name}` loads it as it is"
    advice = replaced if was_added(folder) else "`models add` did not write it, so it is not replaced"
    raise CannotAdd(f"there is a model {name!r} in {repository_of(home)}: choose another name with --name; {advice}")


def _check_code(source: Path, inspection: Inspection, *, allows_code: bool) -> None:
    """The rules of load requests: no custom operators, no external data outside of the folder."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        files: dict[str, bytes | mmap.mmap] = {ONNX_FILE.as_posix(): content}
        files |= {f"1/{location}": b"" for location in inspection.facts.external_data}
        try:
            check_model(None, files, allows_code=allows_code)
        except InvalidRequest as error:
            raise CannotAdd(error.message.replace("in the request ", "")) from error


def engine_notes(source: Path) -> tuple[str, ...]:
    """That TensorRT-RTX engines beside the file are not copied; none if there are no engines."""
    folder = source.parent / FOLDER
    if not any(file.name.startswith(f"{source.stem}-sm") for file in folder.glob("*")):
        return ()
    return (f"the engines in {folder} are not copied: run `penstock models build NAME` with the model's name",)


def _accelerate(staged: Path, folder: Path, options: AddOptions) -> tuple[str, ...]:
    """Writes the accelerator of the options, and a sentence about it into MODEL.md. folder: where the model will lie.

    Returns the sentence; none without an accelerator.
    """
    if options.accelerator is None:
        return ()
    cache = options.accelerator_cache or str(folder.resolve() / CACHE_FOLDER)
    try:
        write_accelerator(staged, options.accelerator.precision, cache)
    except InvalidRequest as error:
        raise CannotAdd(error.message) from error
    sentence = accelerator_sentence(options.accelerator, cache)
    with (staged / "MODEL.md").open("a", encoding="utf-8") as page:
        page.write(f"\n## TensorRT\n\n{sentence}.\n")
    return (sentence,)


def _copy_picture(staged: Path, pictures: Sequence[Path]) -> None:
    """Copies the first JPEG to golden.jpg."""
    for picture in pictures:
        if picture.suffix.lower() in (".jpg", ".jpeg") and picture.stat().st_size <= MAX_PICTURE_BYTES:
            shutil.copyfile(picture, staged / PICTURE_FILE)
            return
