"""`penstock models optimize`: a float model's twin beside it, INT8 or a TensorRT plan, and what that changed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from server.catalogue.installed import InstalledModel
from server.catalogue.placing import disk_sentence, new_model_folder, repository_of
from server.commands.defaults import ApiKey, gateway_of, settings_or_fail
from server.commands.gateway import Gateway, GatewayError
from server.commands.local_models import installed_models, load_where_one_runs, unknown_model
from server.commands.optimize_engine_tables import show_engine
from server.commands.optimize_tables import show
from server.commands.pictures import NoPictures, pictures_of
from server.commands.terminal import fail, stoppable
from server.settings import Settings

if TYPE_CHECKING:
    from server.optimize.progress import Progress
    from server.optimize.report import Report
    from server.optimize.source import SourceModel
    from server.optimize.tensorrt.report import EngineReport
    from server.vision.accuracy import Truth

    AnyReport = Report | EngineReport
    Fill = Callable[[Path, Progress], AnyReport]

PLANS = "plans"  # under PENSTOCK_HOME: what was built before


def optimize(
    name: Annotated[str, typer.Argument(help="a float model of this machine, of backend onnxruntime")],
    calibrate: Annotated[Path, typer.Option(help="a folder of pictures like those to come", metavar="DIR")],
    int8: Annotated[bool, typer.Option("--int8", help="8-bit integers: weights per channel, activations")] = False,
    tensorrt: Annotated[
        bool,
        typer.Option("--tensorrt", help="a plan for this machine's GPU, FP16 or with --int8 that; never run by us"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, and nothing else")] = False,
    url: Annotated[str | None, typer.Option(help="the gateway [http://127.0.0.1:8000]", show_default=False)] = None,
    api_key: ApiKey = "",
    home: Annotated[
        Path | None, typer.Option(help="its models/ gets the result [~/.penstock]", show_default=False)
    ] = None,
) -> None:
    """Make a model's faster twin beside it; show what was fused, what it costs in accuracy, how fast it is.

    --int8: NAME-int8 for the CPU. --tensorrt: NAME-tensorrt-fp16, or with --int8 NAME-tensorrt-int8, for a Triton with
    the TensorRT backend. Half of the pictures calibrate INT8 (64 at most), the others judge: by mAP where DIR has an
    annotations.json in COCO's format, else by agreement with the float model.
    """
    if not (int8 or tensorrt):
        fail("say what to make of the model: --int8, --tensorrt or both")
    settings = settings_or_fail(home)
    model = _find(name, settings)
    pictures = _pictures(calibrate)
    with stoppable("nothing was written"), _sentences(settings.home_path):
        twin, fill = _work(model, pictures, calibrate, (int8, tensorrt), settings.home_path)
        report = _made(twin, fill, settings.home_path)
    _tell(report, settings, gateway_of(url, api_key), as_json=as_json)


def _tell(report: "AnyReport", settings: Settings, gateway: Gateway, *, as_json: bool) -> None:
    folder = repository_of(settings.home_path) / report.name
    loaded, is_failure = _load(report.name, gateway, settings)
    if as_json:
        row = _plain(report) | {"folder": str(folder), "gateway": loaded}
        sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
    else:
        _show(report, folder)
    if is_failure:
        fail(loaded, code=1)
    if not as_json:
        typer.echo(loaded)


def _plain(report: "AnyReport") -> dict[str, object]:
    from server.optimize.report import Report
    from server.optimize.report import as_json as int8_json
    from server.optimize.tensorrt.report import as_json as engine_json

    return int8_json(report) if isinstance(report, Report) else engine_json(report)


def _show(report: "AnyReport", folder: Path) -> None:
    from server.optimize.report import Report

    if isinstance(report, Report):
        show(report, folder)
    else:
        show_engine(report, folder)


def _find(name: str, settings: Settings) -> InstalledModel:
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
def _sentences(home: Path) -> Iterator[None]:
    """What goes wrong, told in one; code 2 where this machine cannot do it at all."""
    from server.optimize.errors import OptimizeError
    from server.optimize.tensorrt.errors import NoEngineHereError

    try:
        yield
    except NoEngineHereError as error:
        fail(str(error))
    except (OptimizeError, ValueError) as error:
        fail(str(error), code=1)
    except OSError as error:
        fail(disk_sentence(error, home), code=1)


def _work(
    model: InstalledModel, pictures: Sequence[Path], calibrate: Path, wanted: tuple[bool, bool], home: Path
) -> "tuple[str, Fill]":
    """The twin's name, and what fills its folder. The heavy imports are paid here."""
    from server.optimize.source import read_source
    from server.vision.accuracy import ANNOTATIONS, read_annotations

    int8, tensorrt = wanted
    source = read_source(model.repository / model.name)
    truth = read_annotations(calibrate) if (calibrate / ANNOTATIONS).is_file() else {}
    if tensorrt:
        return _engine_work(source, pictures, truth, int8=int8, plans=home / PLANS)
    from server.optimize.optimise import optimise

    return f"{model.name}-int8", lambda staged, progress: optimise(source, pictures, truth, staged, progress)


def _engine_work(
    source: "SourceModel", pictures: Sequence[Path], truth: "dict[str, Truth]", *, int8: bool, plans: Path
) -> "tuple[str, Fill]":
    from server.optimize.tensorrt.cards import Precision
    from server.optimize.tensorrt.optimise import Pictures, open_workshop, optimise, twin_name

    precision = Precision.INT8 if int8 else Precision.FP16
    workshop, seen = open_workshop(precision, plans), Pictures(pictures, truth)
    return twin_name(source.name, precision), lambda staged, progress: optimise(
        source, workshop, seen, staged, progress
    )


def _made(twin: str, fill: "Fill", home: Path) -> "AnyReport":
    from server.optimize.progress import Progress

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        progress = _progress_on(bar, Progress)
        waiting = f"another process makes {twin}; waiting for it"
        with new_model_folder(home, twin, lambda: console.print(waiting, soft_wrap=True)) as staged:
            return fill(staged, progress)


def _progress_on(bar: Bar, kind: "type[Progress]") -> "Progress":
    """One task at a time; a step of nothing to count shows no end."""
    current = bar.add_task("", total=None)

    def step(what: str, count: int) -> None:
        bar.reset(current, description=what, total=count or None)

    return kind(step=step, advance=lambda: bar.advance(current))


def _load(name: str, gateway: Gateway, settings: Settings) -> tuple[str, bool]:
    """What became of it in the running gateway, as a sentence; whether that is a failure."""
    try:
        return load_where_one_runs(name, gateway, settings), False
    except GatewayError as error:
        return str(error), True
