"""`penstock models build`: TensorRT-RTX engines of a model, built on this CPU, with their fusion tables."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.gateway_client import settings_or_fail
from penstock.cli.model_flags import check_file_name, image_size
from penstock.cli.model_list import installed_models, unknown_model
from penstock.cli.terminal import fail, print_json, printable, progress_bar, stoppable
from penstock.engines.ort_serving.placement import Precision
from penstock.gpu.tensorrt import ARCHITECTURES, GPU_NAMES, capability_of, capability_text, why_not_built
from penstock.gpu.triton_images import Capability
from penstock.models.catalogue import InstalledModel
from penstock.protocol.errors import InvalidRequest

if TYPE_CHECKING:  # they import onnx, which other commands of the group do not need
    from penstock.models.tensorrt_rtx.build import BuiltEngine

_KNOWN = ", ".join(map(capability_text, ARCHITECTURES))
_MAX_BATCH = 1024
_DEFAULT_BATCH = 8
_PRECISIONS = (Precision.FP32, Precision.TF32, Precision.FP16)


@dataclass(frozen=True, slots=True)
class _Source:
    """The ONNX file. sides: whole shapes of its inputs, as far as they are known.

    max_batch, precision: of config.pbtxt, None for a file without one.
    """

    title: str
    file: Path
    sides: dict[str, tuple[int, ...]]
    max_batch: int | None = None
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class _Options:
    """size: (height, width) in pixels."""

    max_batch: int | None
    size: tuple[int, int] | None
    precision: Precision


def build(
    model: Annotated[str, typer.Argument(metavar="NAME|FILE", help="a model of this machine, or an ONNX file")],
    architectures: Annotated[
        str, typer.Option("--for", metavar="8.9,…", help=f"GPUs, by name (L4) or compute capability: {_KNOWN}")
    ],
    max_batch: Annotated[
        int | None, typer.Option(min=1, max=_MAX_BATCH, help="largest batch [the model's max_batch_size; 8 for a file]")
    ] = None,
    input_size: Annotated[
        str, typer.Option(metavar="W[xH]", help="size in pixels, if the network's is dynamic [config.pbtxt's]")
    ] = "",
    precision: Annotated[
        Precision, typer.Option(help="precision of the kernels; fp16 converts the model first")
    ] = Precision.FP32,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, and nothing else")] = False,
    home: Annotated[Path | None, typer.Option(help="where added models are [~/.penstock]", show_default=False)] = None,
) -> None:
    """Build TensorRT-RTX engines of a model on this CPU; show which ONNX nodes each layer of an engine holds.

    Each GPU architecture gets one file in the folder tensorrt-rtx beside the ONNX file, with a page that lists all of
    its layers. A limited child process builds it.
    """
    wanted = _capabilities(architectures)
    source = _source(model, home)
    if precision not in _PRECISIONS:
        fail(f"--precision {precision.value} is not possible: give fp32 (keeps the file's own types), tf32 or fp16")
    options = _Options(max_batch, image_size(input_size), precision)
    note = use_note(precision, source.precision)
    engines, problems = [], list[str]()
    for capability in wanted:
        with stoppable("no unfinished engine is left"), _problems_to(problems):
            built, file = _build(source, capability, options)
            engines.append((built, file))
        if engines and engines[-1][0].architecture == capability and not as_json:
            print_engine(Console(highlight=False), source.title, built, file)
    if note and engines and not as_json:
        typer.echo(f"  note: {note}")
    if as_json:
        from penstock.models.tensorrt_rtx.page import as_json as engine_json

        rows = [engine_json(built, file) for built, file in engines]
        if rows:
            print_json({"model": source.title, "engines": rows, "note": note, "problems": problems})
    if problems:
        fail("; ".join(problems), code=1)


def _build(source: _Source, capability: Capability, options: _Options) -> "tuple[BuiltEngine, Path]":
    from penstock.models.tensorrt_rtx.build import BuildRequest, build_engine, write_page
    from penstock.models.tensorrt_rtx.page import page

    with progress_bar() as bar:
        task = bar.add_task(f"engine for {capability_text(capability)}", total=None)

        def on_phase(phase: str, done: int, count: int) -> None:
            text = f"engine for {capability_text(capability)}: {phase}"
            bar.update(task, description=text, completed=done, total=count or None)

        rows = options.max_batch or source.max_batch or _DEFAULT_BATCH
        request = BuildRequest(
            str(source.file),
            capability,
            rows,
            source.sides,
            options.size,
            options.precision,
            options.max_batch is not None,
        )
        built, file = build_engine(request, on_phase)
    write_page(file, page(source.title, built))
    return built, file


def print_engine(console: Console, title: str, built: "BuiltEngine", file: Path) -> None:
    """The engine's figures and its fusion table."""
    from penstock.models.tensorrt_rtx.page import OWN_OPERATORS, operators_text, summary_lines

    console.print(printable(f"{title}: {file}"), markup=False, soft_wrap=True)
    for line in summary_lines(built):
        console.print(printable(f"  {line}"), markup=False, soft_wrap=True)
    table = Table("layers", "ONNX operators of each")
    for pattern in built.table.patterns:
        table.add_row(str(pattern.layers), Text(printable(operators_text(pattern))))
    console.print(table)
    if any(not pattern.operators for pattern in built.table.patterns):
        console.print(f"  {OWN_OPERATORS}", markup=False)
    console.print(printable(f"  all layers: {file.with_suffix('.md')}"), markup=False, soft_wrap=True)


def use_note(built: Precision, configured: str | None) -> str:
    """What the user must do before the engines are used; empty if nothing.

    built: of the engines. configured: the parameter `precision` of the model's config.pbtxt; None for a file.
    """
    if configured is None:
        return (
            "`penstock models add` does not copy these engines: after it, run `penstock models build NAME` with the "
            "model's name"
        )
    if configured == built.value:
        return ""
    parameter = f'parameters {{ key: "precision" value {{ string_value: "{built.value}" }} }}'
    return (
        f"the model runs in {configured}, so these engines in {built.value} are not used: write {parameter} into its "
        f"config.pbtxt, or build with --precision {configured}"
    )


def _capabilities(text: str) -> tuple[Capability, ...]:
    found = dict.fromkeys(_capability(part.strip()) for part in text.split(","))
    for capability in found:
        if why := why_not_built(capability):
            fail(f"--for: {why}")
    return tuple(found)


def _capability(text: str) -> Capability:
    found = capability_of(text)
    return found or fail(f"--for {text!r} should be a GPU's compute capability or name: {GPU_NAMES}")


def _source(model: str, home: Path | None) -> _Source:
    """The model of that name, else the file of that name."""
    here = installed_models(settings_or_fail(home))
    found = next((one for one in here if one.name == model), None)
    if found is not None:
        return _installed(found)
    path = Path(model)
    check_file_name(path)
    if path.is_file():
        return _Source(path.stem, path, {})
    if path.suffix or path.name != model:
        fail(f"there is no file {model}")
    return fail(unknown_model(model, (one.name for one in here), "on this machine"), code=1)


def _installed(model: InstalledModel) -> _Source:
    from penstock.engines.config_pbtxt import config_from_proto, read_proto
    from penstock.engines.ort_serving.config import OrtLoadError
    from penstock.engines.ort_serving.session import model_path

    folder = model.repository / model.name
    try:
        proto = read_proto(folder / "config.pbtxt")
        config = config_from_proto(proto)
        if config.backend != "onnxruntime":
            backend = config.backend or "unknown"
            fail(f"model {model.name!r} is of backend {backend!r}: engines are built of ONNX models", code=1)
        newest = max(map(int, model.versions), default=0)
        file = model_path(folder / str(newest), {"default_model_filename": proto.default_model_filename})
    except (InvalidRequest, OrtLoadError) as error:
        fail(f"model {model.name!r}: {error}", code=1)
    batch = (-1,) if config.max_batch_size else ()
    sides = {spec.name: (*batch, *spec.shape) for spec in config.inputs}
    return _Source(model.name, file, sides, config.max_batch_size or None, _precision(config.parameters))


def _precision(parameters: Mapping[str, str]) -> str:
    return parameters.get("precision", "").strip().lower() or Precision.FP32.value


@contextmanager
def _problems_to(problems: list[str]) -> Iterator[None]:
    """Appends why no engine was built: the other architectures are built all the same."""
    from penstock.models.tensorrt_rtx.build import CannotBuild

    try:
        yield
    except CannotBuild as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{error.filename} cannot be written: {error.strerror}")
