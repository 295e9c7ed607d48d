"""`penstock models optimize`: an INT8 model of a float one, and what that changed."""

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
from server.commands.optimize_tables import show
from server.commands.pictures import NoPictures, pictures_of
from server.commands.terminal import fail, stoppable
from server.settings import Settings

if TYPE_CHECKING:
    from server.optimize.progress import Progress
    from server.optimize.report import Report

    Fill = Callable[[Path, Progress], Report]


def optimize(
    name: Annotated[str, typer.Argument(help="a float model of this machine, of backend onnxruntime")],
    calibrate: Annotated[Path, typer.Option(help="a folder of pictures like those to come", metavar="DIR")],
    int8: Annotated[bool, typer.Option("--int8", help="8-bit integers: weights per channel, activations")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, and nothing else")] = False,
    url: Annotated[str | None, typer.Option(help="the gateway [http://127.0.0.1:8000]", show_default=False)] = None,
    api_key: ApiKey = "",
    home: Annotated[
        Path | None, typer.Option(help="its models/ gets the result [~/.penstock]", show_default=False)
    ] = None,
) -> None:
    """Make a model's faster twin beside it; show what was fused, what it costs in accuracy, how fast it is.

    --int8: NAME-int8 for the CPU. Half of the pictures calibrate (64 at most), the others evaluate: by mAP where DIR has
    an annotations.json in COCO's format, else by agreement with the float model.
    """
    if not int8:
        fail("name what to make of the model: --int8")
    settings = settings_or_fail(home)
    model = _find(name, settings)
    pictures = _pictures(calibrate)
    with stoppable("nothing was written"), _sentences(settings.home_path):
        twin, fill = _work(model, pictures, calibrate)
        report = _made(twin, fill, settings.home_path)
    _tell(report, settings, gateway_of(url, api_key), as_json=as_json)


def _tell(report: "Report", settings: Settings, gateway: Gateway, *, as_json: bool) -> None:
    folder = repository_of(settings.home_path) / report.name
    loaded, is_failure = _load(report.name, gateway, settings)
    if as_json:
        from server.optimize.report import as_json as report_json

        row = report_json(report) | {"folder": str(folder), "gateway": loaded}
        sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
    else:
        show(report, folder)
    if is_failure:
        fail(loaded, code=1)
    if not as_json:
        typer.echo(loaded)


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
    """Ends the command with one message and exit code 1 for an error."""
    from server.optimize.errors import OptimizeError

    try:
        yield
    except (OptimizeError, ValueError) as error:
        fail(str(error), code=1)
    except OSError as error:
        fail(disk_sentence(error, home), code=1)


def _work(model: InstalledModel, pictures: Sequence[Path], calibrate: Path) -> "tuple[str, Fill]":
    """The twin's name, and what fills its folder. The heavy imports are paid here."""
    from server.optimize.optimise import optimise
    from server.optimize.source import read_source
    from server.vision.accuracy import ANNOTATIONS, read_annotations

    source = read_source(model.repository / model.name)
    truth = read_annotations(calibrate) if (calibrate / ANNOTATIONS).is_file() else {}
    return f"{model.name}-int8", lambda staged, progress: optimise(source, pictures, truth, staged, progress)


def _made(twin: str, fill: "Fill", home: Path) -> "Report":
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
