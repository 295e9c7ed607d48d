"""`penstock models optimize`: makes an INT8 model of a float one, and prints what it gained and lost."""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bar
from rich.table import Table

from penstock.cli.gateway_client import ApiKey, GatewayClient, Url, gateway_of, settings_or_fail
from penstock.cli.model_list import installed_models, load_where_one_runs, unknown_model
from penstock.cli.pictures import NoPictures, pictures_of
from penstock.cli.terminal import fail, print_json, printable, progress_bar, stoppable
from penstock.gateway.settings import Settings
from penstock.gpu.tensorrt import Accelerator
from penstock.models.catalogue import InstalledModel
from penstock.models.model_folder import disk_sentence, new_model_folder, repository_of
from penstock.protocol.errors import InferenceError

if TYPE_CHECKING:
    from penstock.models.optimize.profile import Fusion, SpeedComparison
    from penstock.models.optimize.report import OptimizationReport


_MOST_ROWS = 16


def print_report(report: "OptimizationReport", folder: Path) -> None:
    """Fusions, accuracy, speed, then warnings."""
    console = Console(highlight=False)
    smaller = f"{_kilobytes(report.source_bytes)} → {_kilobytes(report.int8_bytes)}"
    console.print(f"{report.name} is in {escape(printable(str(folder)))} ({smaller})", soft_wrap=True)
    _print_unreadable(console, report)
    console.print(f"\n[bold]What ONNX Runtime fused here[/bold] (the engine runs level {report.fusion.engine_level!r})")
    console.print(_fusion_table(report.fusion))
    for line in _fusion_lines(report.fusion):
        console.print(printable(line), markup=False, soft_wrap=True)
    console.print("\n[bold]Accuracy[/bold]")
    for line in _accuracy_lines(report):
        console.print(printable(line), markup=False)
    console.print(f"\n[bold]Speed[/bold], 8-bit instructions of this CPU: {_instructions(report)}")
    console.print(_speed_table(report.comparisons))
    console.print(
        f"the network alone, threads: {report.threads}, {len(report.comparisons[0].ratios)} rounds in turns",
        style="dim",
    )
    for warning in report.warnings:
        console.print(printable(f"warning: {warning}"), style="yellow", markup=False)


def _fusion_table(fusion: "Fusion") -> Table:
    """A row an operator, the frequent ones first; of the INT8 model the file and what the engine runs."""
    table = Table("operator")
    columns = [("float", item) for item in fusion.float_levels]
    columns += [("INT8", item) for item in (fusion.int8_levels[0], fusion.int8_levels[-1])]
    for kind, item in columns:
        table.add_column(f"{kind}\n{item.level}", justify="right")
    counts = [item.counts for _, item in columns]
    names = sorted({name for found in counts for name in found}, key=lambda name: (-max(_of(name, counts)), name))
    for name in names[:_MOST_ROWS]:
        table.add_row(escape(printable(name)), *(str(number or "") for number in _of(name, counts)))
    if rest := names[_MOST_ROWS:]:
        others = [str(sum(found.get(name, 0) for name in rest) or "") for found in counts]
        table.add_row(f"{len(rest)} others", *others)
    table.add_section()
    table.add_row("all nodes", *(str(item.total) for _, item in columns))
    return table


def _of(name: str, counts: list[dict[str, int]]) -> list[int]:
    return [found.get(name, 0) for found in counts]


def _fusion_lines(fusion: "Fusion") -> list[str]:
    last = fusion.float_levels[-1]
    lines = [f"float: {last.has_relu} convolutions hold their ReLU, {last.has_sum} the addition of a shortcut too"]
    if fusion.example is not None:
        lines += [
            f"example: {' + '.join(fusion.example.before)}",
            f"  float: {fusion.example.float_after}",
            f"  INT8:  {fusion.example.int8_after}",
        ]
    return lines


def _accuracy_lines(report: "OptimizationReport") -> list[str]:
    from penstock.models.optimize.report import NOT_JUDGED, evaluation_lines

    pictures = f"{report.calibrating} pictures calibrated, {report.held_out} judged"
    if report.judgement is None:
        return [NOT_JUDGED]
    note = f", {len(report.chosen.left_float)} nodes left float" if report.chosen.left_float else ""
    return [*evaluation_lines(report.judgement), f"{pictures}; ranges by {report.chosen.ranges}{note}"]


def _speed_table(comparisons: "tuple[SpeedComparison, ...]") -> Table:
    table = Table("batch", "float ms", "INT8 ms", "times as fast", "by round")
    for item in comparisons:
        table.add_row(
            str(item.batch_size),
            f"{statistics.median(item.float_ms):.2f}",
            f"{statistics.median(item.int8_ms):.2f}",
            f"{item.ratio:.2f}",
            " ".join(f"{ratio:.2f}" for ratio in item.ratios),
        )
    return table


def _instructions(report: "OptimizationReport") -> str:
    from penstock.models.optimize.report import instructions_text

    return instructions_text(report)


def _print_unreadable(console: Console, report: "OptimizationReport") -> None:
    if report.unreadable:
        first = f"{len(report.unreadable)} pictures could not be read and were left out; the first: "
        console.print(printable(first + report.unreadable[0]), style="yellow", markup=False, soft_wrap=True)


def _kilobytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} kB"


if TYPE_CHECKING:
    from penstock.models.onnx_to_torch.twin import ConvertedModel
    from penstock.models.optimize.report import OptimizationReport
    from penstock.models.optimize.source import Progress
    from penstock.models.optimize.tensorrt_int8 import Calibration

    Fill = Callable[[Path, Progress], "_Result"]

_Result = TypeVar("_Result")


def _refuse_tensorrt(is_given: bool) -> None:
    if is_given:
        fail("--tensorrt was removed: for Triton of NGC use --int8 --accelerator tensorrt, else penstock models build")


def optimize(
    name: Annotated[str, typer.Argument(help="a float model of this machine, of backend onnxruntime")],
    calibrate: Annotated[
        Path | None, typer.Option(help="for --int8: a folder of pictures like those that it will get", metavar="DIR")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="write NAME-int8 for the CPU, with 8-bit weights and activations")
    ] = False,
    torch: Annotated[
        bool, typer.Option("--torch", help="write NAME-torch for backend torch on a GPU; needs PyTorch (make gpu)")
    ] = False,
    accelerator: Annotated[
        Accelerator | None,
        typer.Option(help="with --int8: write NAME-tensorrt-int8 for Triton of NGC; never run there"),
    ] = None,
    accelerator_cache: Annotated[
        str, typer.Option(metavar="DIR", help="folder for TensorRT engines, as Triton sees it [in the model's folder]")
    ] = "",
    tensorrt: Annotated[bool, typer.Option(hidden=True, is_eager=True, callback=_refuse_tensorrt)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, and nothing else")] = False,
    url: Url = None,
    api_key: ApiKey = "",
    home: Annotated[
        Path | None, typer.Option(help="the result is written to its models/ [~/.penstock]", show_default=False)
    ] = None,
) -> None:
    """Make a faster copy of a model beside it; show what was fused, what it costs in accuracy, how fast it is.

    --int8: NAME-int8 for the CPU. Half of the pictures calibrate (64 at most), the others evaluate: by mAP where DIR
    has an annotations.json in COCO's format, else against the float model: boxes (also of masks and poses) by mAP and
    agreement, classes by the first, vectors by cosine, maps by IoU. With --accelerator tensorrt: NAME-tensorrt-int8,
    the float file with a calibration table for the TensorRT of NGC's Triton, whose accuracy cannot be measured here.

    --torch: NAME-torch, the same network as a PyTorch program, compared with ONNX Runtime in FP32 before it is written.
    """
    if why := _refusal(int8=int8, torch=torch, accelerator=accelerator):
        fail(why)
    settings = settings_or_fail(home)
    model = _find_model(name, settings)
    gateway = gateway_of(url, api_key)
    if torch:
        with stoppable("nothing was written", runs_models=True), _errors_as_messages(settings.home_path):
            twin = _convert(model, settings.home_path)
        _print_converted(twin, settings, gateway, as_json=as_json)
        return
    if calibrate is None:
        fail("--int8 needs pictures: --calibrate DIR")
    pictures = _pictures(calibrate)
    if accelerator is not None:
        with stoppable("nothing was written", runs_models=True), _errors_as_messages(settings.home_path):
            found = _calibrate(model, pictures, settings.home_path, accelerator_cache)
        _print_calibration(found, settings, gateway, as_json=as_json)
    else:
        with stoppable("nothing was written", runs_models=True), _errors_as_messages(settings.home_path):
            result_name, fill = _work(model, pictures, calibrate)
            report = _make_model_folder(result_name, fill, settings.home_path)
        _print_result(report, settings, gateway, as_json=as_json)


def _refusal(*, int8: bool, torch: bool, accelerator: Accelerator | None) -> str:
    """Why the flags do not go together; empty if they do."""
    if accelerator is not None and torch:
        return f"--accelerator {accelerator} is not for --torch, which makes a PyTorch program: leave one of them out"
    if accelerator is not None and not int8:
        return (
            f"--accelerator {accelerator} is for --int8 here; for the float model use `penstock models add FILE "
            f"--accelerator {accelerator}`"
        )
    if int8 == torch:
        return "give either --int8 or --torch"
    if accelerator not in (None, Accelerator.TENSORRT):
        return f"--accelerator {accelerator} is not for --int8: give --accelerator tensorrt"
    return ""


def _print_result(report: "OptimizationReport", settings: Settings, gateway: GatewayClient, *, as_json: bool) -> None:
    folder = repository_of(settings.home_path) / report.name
    loaded, is_failure = _load(report.name, gateway, settings)
    if as_json:
        from penstock.models.optimize.report import as_json as report_json

        row = report_json(report) | {"folder": str(folder), "gateway": loaded}
        print_json(row)
    else:
        print_report(report, folder)
    if is_failure:
        fail(loaded, code=1)
    if not as_json:
        typer.echo(loaded)


def _find_model(name: str, settings: Settings) -> InstalledModel:
    here = installed_models(settings)
    found = next((model for model in here if model.name == name), None)
    if found is None:
        fail(unknown_model(name, (model.name for model in here), "on this machine"), code=1)
    return found


def _pictures(folder: Path) -> list[Path]:
    try:
        found = pictures_of(folder)
    except NoPictures as error:
        fail(str(error), code=1)
    if found == [folder]:
        fail(f"--calibrate wants a folder of pictures; {folder} is a file")
    return found


@contextmanager
def _errors_as_messages(home: Path) -> Iterator[None]:
    """Ends the command with one message and exit code 1 for an error."""
    from penstock.models.optimize.source import OptimizeError

    try:
        yield
    except (OptimizeError, ValueError) as error:
        fail(str(error), code=1)
    except OSError as error:
        fail(disk_sentence(error, home), code=1)


def _work(model: InstalledModel, pictures: Sequence[Path], calibrate: Path) -> "tuple[str, Fill[OptimizationReport]]":
    """The INT8 model's name, and the function that fills its folder. Imports heavy modules."""
    from penstock.models.optimize.optimize import optimize
    from penstock.models.optimize.source import read_source
    from penstock.vision.accuracy import ANNOTATIONS, read_annotations

    _silence_onnxruntime()
    source = read_source(model.repository / model.name)
    truth = read_annotations(calibrate) if (calibrate / ANNOTATIONS).is_file() else {}
    return f"{model.name}-int8", lambda staged, progress: optimize(source, pictures, truth, staged, progress)


def _silence_onnxruntime() -> None:
    """No warnings about unused initializers between the lines."""
    import onnxruntime as ort

    from penstock.engines.ort_serving.session import SEVERITY_FATAL

    ort.set_default_logger_severity(SEVERITY_FATAL)


def _calibrate(model: InstalledModel, pictures: Sequence[Path], home: Path, cache: str) -> "Calibration":
    from penstock.models.optimize.source import read_source
    from penstock.models.optimize.tensorrt_int8 import calibrate

    _silence_onnxruntime()
    source, name = read_source(model.repository / model.name), f"{model.name}-tensorrt-int8"
    folder = repository_of(home) / name
    return _make_model_folder(
        name,
        lambda staged, progress: calibrate(source, pictures, staged, folder=folder, cache=cache, progress=progress),
        home,
    )


def _print_calibration(found: "Calibration", settings: Settings, gateway: GatewayClient, *, as_json: bool) -> None:
    from penstock.models.optimize.tensorrt_int8 import NOT_JUDGED, copy_sentence, few_sentence

    folder = repository_of(settings.home_path) / found.name
    loaded, is_failure = _load(found.name, gateway, settings)
    if as_json:
        print_json(asdict(found) | {"folder": str(folder), "gateway": loaded})
    else:
        typer.echo(f"{found.name} is in {folder}: {found.tensors} ranges by {found.calibrating} pictures; {NOT_JUDGED}")
        if few := few_sentence(found):
            typer.echo(f"warning: {few}")
        if copied := copy_sentence(found, folder):
            typer.echo(f"before Triton loads it, {copied}")
    if is_failure:
        fail(loaded, code=1)
    if not as_json:
        typer.echo(loaded)


def _convert(model: InstalledModel, home: Path) -> "ConvertedModel":
    from penstock.models.onnx_to_torch.twin import convert_model
    from penstock.models.optimize.source import read_source

    source = read_source(model.repository / model.name)

    def fill(staged: Path, progress: "Progress") -> "ConvertedModel":
        progress.step("converts by PyTorch", 0)
        return convert_model(source, staged)

    return _make_model_folder(f"{model.name}-torch", fill, home)


def _print_converted(twin: "ConvertedModel", settings: Settings, gateway: GatewayClient, *, as_json: bool) -> None:
    folder = repository_of(settings.home_path) / twin.name
    loaded, is_failure = _load(twin.name, gateway, settings)
    if as_json:
        print_json(asdict(twin) | {"folder": str(folder), "gateway": loaded})
    else:
        typer.echo(
            f"{twin.name} is in {folder} ({_kilobytes(twin.size_bytes)}), converted by PyTorch {twin.torch}; its "
            f"outputs differ from ONNX Runtime's in FP32 by at most {twin.largest_difference:.1e} of the largest value"
        )
    if is_failure:
        fail(loaded, code=1)
    if not as_json:
        typer.echo(loaded)


def _make_model_folder(result_name: str, fill: "Fill[_Result]", home: Path) -> _Result:
    """Raises OptimizeError if a model of that name was not made by this command, and would be lost."""
    from penstock.models.optimize.report import was_optimized
    from penstock.models.optimize.source import OptimizeError, Progress

    folder = repository_of(home) / result_name
    if os.path.lexists(folder) and not was_optimized(folder):
        raise OptimizeError(
            f"there is a model {result_name!r} in {folder.parent} that `models optimize` did not make: rename its "
            f"folder, or remove it with `penstock models remove {result_name}`"
        )
    with progress_bar() as bar:
        if folder.exists():
            bar.console.print(f"{result_name} was made before, and is replaced", soft_wrap=True)
        progress = _progress_on(bar, Progress)
        waiting = f"another process makes {result_name}; waiting for it"
        with new_model_folder(home, result_name, lambda: bar.console.print(waiting, soft_wrap=True)) as staged:
            return fill(staged, progress)


def _progress_on(bar: Bar, kind: "type[Progress]") -> "Progress":
    """One task at a time; a step without a count has no total."""
    current = bar.add_task("", total=None)

    def step(what: str, count: int) -> None:
        bar.reset(current, description=what, total=count or None)

    return kind(step=step, advance=lambda: bar.advance(current))


def _load(name: str, gateway: GatewayClient, settings: Settings) -> tuple[str, bool]:
    """(a sentence on its state in the running gateway, whether that is a failure)."""
    try:
        return load_where_one_runs(name, gateway, settings), False
    except InferenceError as error:
        return str(error), True
